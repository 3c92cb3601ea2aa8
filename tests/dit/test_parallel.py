"""Layouts over real processes: equal to one rank, and to an independent implementation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from chitu_diffusion.errors import PreconditionError
from services.dit.attention import needs_lse
from services.dit.attention.sdpa import Sdpa
from services.dit.denoiser import Denoiser, Prompts, make_plan
from services.dit.experts import Experts
from services.dit.flexcache import NoCache
from services.dit.guidance import Execution
from services.dit.parallel import Alone, Layout, Place, auto_layout
from services.dit.parallel.shared import SharedForward
from tests.dit.conftest import CPU, SMALL, load_ours, make_embeds, make_params, make_reference
from tests.dit.ranks import LAYOUTS, OF_SIX_HEADS, World, spread
from tests.dit.reference import published_latents
from tests.dit.threads import in_threads

PROMPTS = Prompts(make_embeds(1, 9), make_embeds(2, 4))
SIX_HEADS = dataclasses.replace(SMALL, num_heads=6, hidden_size=72)
DIVIDES, DOES_NOT = {}, {"num_frames": 1, "height": 112, "width": 80}
"""12 tokens, and 35."""
TASKS: dict[str, dict[str, Any]] = {
    "guided": DIVIDES,
    "guided, padded": DOES_NOT,
    "plain": {"guidance_scale": 1.0} | DOES_NOT,
    "two experts": {"guidance_scale_high": 5.0, "boundary_ratio": 0.875} | DOES_NOT,
    "two experts, one of them plain": {
        "guidance_scale": 1.0,
        "guidance_scale_high": 5.0,
        "boundary_ratio": 0.875,
    },
}


def denoise(
    folders: list[Path], changes: dict[str, Any], parts: list[tuple[Any, int]], config: Any = SMALL
) -> torch.Tensor:
    """The latents of a task whose steps run in one group after another, each up to a step."""
    models = [load_ours(folder, config=config) for folder in folders]
    denoiser = Denoiser(Experts(models, CPU), CPU)
    plan = make_plan(make_params(**changes))
    state = denoiser.from_noise(plan)
    tokens = plan.params.grid[0] * plan.params.grid[1] * plan.params.grid[2] // 4
    for group, end in parts:
        how = Execution(Sdpa(), group.parallel(tokens), NoCache())
        for _ in denoiser.run(state, end, PROMPTS, how, lambda: False):
            pass
    return state.latents


def denoise_in_all(world: World, folders: list[Path], config: Any, layouts: list[Layout]) -> Any:
    """This rank's latents, by task and layout."""
    return {
        (task, layout): denoise(folders, changes, [(group, 6)], config)
        for task, changes in TASKS.items()
        for layout in layouts
        if (group := world.group(layout)) is not None
    }


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).norm() / theirs.norm() < 1e-4)


@pytest.fixture(scope="module")
def folders(checkpoints: dict[str, Path]) -> list[Path]:
    return [checkpoints["two-diffusers"] / name for name in ("transformer", "transformer_2")]


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory, folders: list[Path]) -> list[Any]:
    folder = tmp_path_factory.mktemp("four")
    return spread(folder, 4, denoise_in_all, folders, SMALL, LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("task", TASKS)
def test_equals_one_rank_and_the_pipeline(
    of_four: list[Any],
    folders: list[Path],
    experts: list[WanTransformer3DModel],
    layout: Layout,
    task: str,
) -> None:
    params = make_params(**TASKS[task])
    alone = denoise(folders, TASKS[task], [(Alone(), 6)])
    published = published_latents(params, experts, PROMPTS)
    for rank in range(layout.size):
        assert close(of_four[rank][task, layout], alone), rank
        assert close(of_four[rank][task, layout], published), rank
        # Every rank holds the same state, to the bit: any of them can go on.
        assert torch.equal(of_four[rank][task, layout], of_four[0][task, layout])
    if layout.size == 1:
        assert torch.equal(of_four[0][task, layout], alone)


def test_three_ranks_of_six_heads(tmp_path: Path) -> None:
    references = [make_reference(seed, SIX_HEADS) for seed in (3, 4)]
    folders = [tmp_path / str(n) for n in range(2)]
    for reference, folder in zip(references, folders, strict=True):
        reference.save_pretrained(folder)
    ranks = spread(tmp_path / "ranks", 3, denoise_in_all, folders, SIX_HEADS, OF_SIX_HEADS)
    for task, changes in TASKS.items():
        published = published_latents(make_params(**changes), references, PROMPTS)
        for layout in OF_SIX_HEADS:
            assert all(close(rank[task, layout], published) for rank in ranks), (task, layout)


MOVES = [
    (Layout(1, 1, 1), Layout(2, 2, 1)),
    (Layout(2, 1, 1), Layout(1, 1, 2)),
    (Layout(1, 2, 2), Layout(2, 1, 2)),
]


def change_layout(world: World, folders: list[Path]) -> Any:
    """Two experts, and a change of layout within each of them and at their boundary."""
    results = []
    for before, after in MOVES:
        groups = world.group(before) or Alone(), world.group(after) or Alone()
        parts = [(groups[step % 2], step + 1) for step in range(6)]
        results.append(denoise(folders, TASKS["two experts"], parts))
    return results


def test_across_a_change_of_layout(tmp_path: Path, folders: list[Path]) -> None:
    ranks = spread(tmp_path, 4, change_layout, folders)
    alone = denoise(folders, TASKS["two experts"], [(Alone(), 6)])
    for rank in range(4):
        for (before, after), latents in zip(MOVES, ranks[rank], strict=True):
            if rank < min(before.size, after.size):
                assert close(latents, alone), (rank, before, after)


def side_by_side(world: World, folders: list[Path]) -> Any:
    """Two pairs of ranks, each with a task of its own."""
    first = world.rank // 2 * 2
    group = world.group(Layout(1, 2, 1), first)
    return denoise(folders, {"seed": first}, [(group, 6)])


def test_disjoint_groups_at_the_same_time(tmp_path: Path, folders: list[Path]) -> None:
    ranks = spread(tmp_path, 4, side_by_side, folders)
    for rank, latents in enumerate(ranks):
        assert close(latents, denoise(folders, {"seed": rank // 2 * 2}, [(Alone(), 6)]))


def fail_once(world: World) -> Any:
    """One rank of three leaves in the middle of a slice; the others wait for it."""
    layout = Layout(1, 1, 3)
    group: Any = world.group(layout)
    heard = group.tell([world.rank])
    error = ""
    try:
        if world.rank == 1:
            raise ValueError("a failure of this rank's own")
        group.share(torch.zeros(1000), 1)
    except (RuntimeError, ValueError) as raised:
        error = str(raised)
    world.book.drop(group)
    del group
    again: Any = world.group(layout, epoch=1)
    return heard, error, again.tell([10 * world.rank])


def test_a_rank_that_leaves_frees_the_others(tmp_path: Path) -> None:
    ranks = spread(tmp_path, 3, fail_once)
    assert [error != "" for _, error, _ in ranks] == [True] * 3
    assert all(heard == [[0], [1], [2]] for heard, _, _ in ranks)
    assert all(again == [[0], [10], [20]] for _, _, again in ranks)


@pytest.mark.parametrize(
    ("ranks", "heads", "cfg", "expected"),
    [
        (1, 12, True, (1, 1, 1)),
        (2, 12, True, (2, 1, 1)),
        (2, 12, False, (1, 2, 1)),
        (3, 12, True, (1, 3, 1)),
        (5, 12, True, (1, 1, 5)),
        (8, 12, True, (2, 4, 1)),
        (8, 12, False, (1, 4, 2)),
        (16, 12, True, (2, 4, 2)),
        (8, 40, False, (1, 8, 1)),
        (6, 12, True, (2, 3, 1)),
    ],
)
def test_auto_layout(ranks: int, heads: int, cfg: bool, expected: tuple[int, int, int]) -> None:
    layout = auto_layout(ranks, heads, cfg=cfg)
    assert layout == Layout(*expected)
    assert layout.size == ranks


def test_places_count_through() -> None:
    layout = Layout(2, 2, 3)
    places = [layout.place(position) for position in range(layout.size)]
    assert places[:3] == [Place(0, 0, 0), Place(0, 0, 1), Place(0, 1, 0)]
    assert places[6] == Place(1, 0, 0)
    assert [layout.position(place) for place in places] == list(range(12))


@pytest.mark.parametrize("tokens", [1, 5, 11, 12])
def test_parts_are_equal_and_cover_the_sequence(tokens: int) -> None:
    layout, rows = Layout(1, 2, 2), torch.arange(1.0, tokens + 1).view(1, tokens, 1)
    parts = [SharedForward(layout, n, {}.__getitem__, tokens).shard(rows, 1) for n in range(4)]
    assert {part.shape for part in parts} == {(1, -(-tokens // 4), 1)}
    joined = torch.cat(parts, 1).flatten()
    assert torch.equal(joined[:tokens], rows.flatten())
    assert not joined[tokens:].any()


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_log_sum_exp(rows: int) -> None:
    q, k, v = (torch.randn(2, n, 3, 12) for n in (5, rows, rows))
    attended, lse = Sdpa().with_lse(q, k, v)
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k) / 12**0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(attended, torch.einsum("bqhk,bkhd->bqhd", scores.softmax(-1), v))


def test_a_kernel_without_log_sum_exp_cannot_ring() -> None:
    class Approximate:
        name = "approximate"

        def __call__(self, *_: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    with pytest.raises(PreconditionError, match=r"'approximate'.*ring_degree > 1"):
        needs_lse(Approximate())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 35, 64])
def test_ranks_as_threads(layout: Layout, tokens: int) -> None:
    """The stand-in that the tests on a single CUDA device share."""
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(1, tokens, 4, 12, generator=generator) for _ in range(3))

    def work(share: SharedForward) -> torch.Tensor:
        parts = (share.shard(x, 1) for x in (q, k, v))
        return share.gather(share.attend(Sdpa(), *parts), 1)

    for got in in_threads(layout, tokens, work):
        torch.testing.assert_close(got, Sdpa()(q, k, v))

"""The transformer against diffusers' WanTransformer3DModel, which was written by others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from chitu_diffusion import config as configuration
from services.dit.attention import Attention
from services.dit.attention.sdpa import Sdpa
from services.dit.flexcache import NoCache
from services.dit.models.wan.ops import gelu_tanh
from services.dit.models.wan.transformer import WanTransformer, sinusoid
from services.dit.parallel import Alone
from tests.dit.conftest import load_ours, make_embeds

HOW = {"attention": Sdpa(), "parallel": Alone(), "cache": NoCache()}
TIMESTEPS = [999.0, 937.0, 833.0, 625.0]


@pytest.fixture(scope="module")
def model(checkpoints: dict[str, Path]) -> WanTransformer:
    return load_ours(checkpoints["one-diffusers"] / "transformer")


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize(
    "size",
    [(1, 2, 2), (1, 4, 6), (2, 6, 10), (5, 8, 4), (3, 10, 6)],
    ids=lambda size: "x".join(map(str, size)),
)
@pytest.mark.parametrize("batch", [1, 2])
@torch.inference_mode()
def test_velocity_equals_diffusers(
    model: WanTransformer,
    experts: list[WanTransformer3DModel],
    size: tuple[int, int, int],
    batch: int,
) -> None:
    latents = torch.randn(batch, 16, *size)
    text = torch.cat([make_embeds(n, 5 + 9 * n) for n in range(batch)])
    constants = model.prepare(text, size, TIMESTEPS)
    for step, timestep in enumerate(TIMESTEPS):
        ours = model(latents, step, constants, **HOW)
        theirs = experts[0](latents, torch.tensor([timestep] * batch), text, return_dict=False)[0]
        assert ours.shape == theirs.shape
        assert relative(ours, theirs) < 1e-5


@torch.inference_mode()
def test_fractional_timestep(model: WanTransformer, experts: list[WanTransformer3DModel]) -> None:
    latents, text = torch.randn(1, 16, 2, 4, 4), make_embeds(0, 7)
    ours = model(latents, 0, model.prepare(text, (2, 4, 4), [612.375]), **HOW)
    theirs = experts[0](latents, torch.tensor([612.375]), text, return_dict=False)[0]
    assert relative(ours, theirs) < 1e-5


@torch.inference_mode()
def test_both_layouts_are_the_same_model(
    model: WanTransformer, checkpoints: dict[str, Path]
) -> None:
    other = load_ours(checkpoints["one-original"])
    latents, text = torch.randn(1, 16, 1, 4, 4), make_embeds(0, 7)
    outputs = [
        each(latents, 0, each.prepare(text, (1, 4, 4), [500.0]), **HOW) for each in (model, other)
    ]
    assert torch.equal(*outputs)


@torch.inference_mode()
def test_branch_equals_its_row(model: WanTransformer) -> None:
    latents = torch.randn(1, 16, 2, 4, 6)
    text = torch.cat([make_embeds(0, 7), make_embeds(1, 20)])
    constants = model.prepare(text, (2, 4, 6), TIMESTEPS)
    both = model(latents.expand(2, -1, -1, -1, -1), 1, constants, **HOW)
    for n in range(2):
        alone = model(latents, 1, constants.branch(n), **HOW)
        assert relative(alone, both[n : n + 1]) < 1e-6
    assert relative(both[:1], both[1:]) > 0.01, "the text must matter"


@torch.inference_mode()
def test_zero_rows_take_part(model: WanTransformer) -> None:
    """Masking or cutting rows behind the true length would depart from the published model."""
    latents, text = torch.randn(1, 16, 1, 4, 4), make_embeds(0, 7)
    full, cut = (
        model(latents, 0, model.prepare(rows, (1, 4, 4), [500.0]), **HOW)
        for rows in (text, text[:, :7])
    )
    assert relative(full, cut) > 1e-3


@torch.inference_mode()
def test_bfloat16(model: WanTransformer, checkpoints: dict[str, Path]) -> None:
    half = load_ours(checkpoints["one-diffusers"] / "transformer", torch.bfloat16)
    latents, text = torch.randn(1, 16, 2, 6, 4), make_embeds(0, 7)
    constants = half.prepare(text, (2, 6, 4), TIMESTEPS)
    exact = model.prepare(text, (2, 6, 4), TIMESTEPS)
    out, expected = half(latents, 1, constants, **HOW), model(latents, 1, exact, **HOW)
    assert out.dtype is torch.float32
    assert constants.cross[0][0].dtype is torch.bfloat16
    assert 1e-5 < relative(out, expected) < 3e-2
    # The path of the timestep does not depend on the compute type: 937 does not become 936.
    assert torch.equal(constants.modulation, exact.modulation)
    assert torch.equal(constants.head_modulation, exact.head_modulation)


def test_sinusoid_tells_timesteps_apart() -> None:
    wave = sinusoid(torch.tensor([936.0, 937.0, 998.4, 1000.0], dtype=torch.float64), 32)
    assert wave.dtype is torch.float64
    assert (wave[0] - wave[1]).abs().max() > 0.1
    assert (wave[2] - wave[3]).abs().max() > 0.1


class Recorder:
    """Attention, parallel and cache in one, noting what passes through."""

    name = "recorder"

    def __init__(self) -> None:
        self.attended: list[torch.Size] = []
        self.sharded: list[torch.Size] = []
        self.gathered: list[torch.Size] = []
        self.steps: list[int] = []
        self.skip = False

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.attended.append(q.shape)
        return Sdpa()(q, k, v)

    def attend(
        self, attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        return attention(q, k, v)

    def shard(self, tokens: torch.Tensor, dim: int) -> torch.Tensor:
        self.sharded.append(tokens.shape)
        return tokens

    def gather(self, tokens: torch.Tensor, dim: int) -> torch.Tensor:
        self.gathered.append(tokens.shape)
        return tokens

    def run(
        self,
        step_index: int,
        hidden: torch.Tensor,
        blocks: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        self.steps.append(step_index)
        return hidden if self.skip else blocks(hidden)


@torch.inference_mode()
def test_kernel_layout_and_reuse_are_arguments(model: WanTransformer) -> None:
    latents, text, recorder = torch.randn(1, 16, 2, 4, 6), make_embeds(0, 7), Recorder()
    constants = model.prepare(text, (2, 4, 6), TIMESTEPS)
    how = {"attention": recorder, "parallel": recorder, "cache": recorder}
    assert torch.equal(model(latents, 2, constants, **how), model(latents, 2, constants, **HOW))
    assert recorder.attended == [(1, 12, 4, 12)] * 2, "self-attention of each block, (B, S, H, D)"
    assert sorted(recorder.sharded) == [(1, 12, 64), (12, 1, 6)], "patches and rotations"
    assert recorder.gathered == [(1, 12, 64)], "after the head, not at full width"
    assert recorder.steps == [2]
    recorder.skip = True
    skipped = model(latents, 2, constants, **how)
    assert len(recorder.attended) == 2
    assert relative(skipped, model(latents, 2, constants, **HOW)) > 0.01


@torch.inference_mode()
def test_forward_leaves_its_inputs_alone(model: WanTransformer) -> None:
    latents, text = torch.randn(1, 16, 2, 4, 4), make_embeds(0, 7)
    constants = model.prepare(text, (2, 4, 4), TIMESTEPS)
    first = model(latents, 0, constants, **HOW)
    model(latents, 1, constants, **HOW)
    assert torch.equal(first, model(latents, 0, constants, **HOW))


PUBLISHED = {
    "wan2.1-t2v-1.3b": 1_418_996_800,
    "wan2.1-t2v-14b": 14_288_491_584,
    "wan2.2-t2v-a14b": 14_288_491_584,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    config = configuration.load([f"models={name}"]).models.transformer
    with torch.device("meta"):
        ours = WanTransformer(config)
        theirs = WanTransformer3DModel(
            num_attention_heads=config.num_heads,
            attention_head_dim=128,
            ffn_dim=config.ffn_dim,
            num_layers=config.depth,
        )
    shapes = {key: value.shape for key, value in theirs.state_dict().items()}
    assert {key: value.shape for key, value in ours.state_dict().items()} == shapes
    assert sum(parameter.numel() for parameter in ours.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu(dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-30, 30, 4001), torch.tensor([-1e4, 1e4, 0.0])]).to(dtype)
    expected = torch.nn.functional.gelu(x.double(), approximate="tanh")
    torch.testing.assert_close(
        gelu_tanh(x).double(), expected, rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-6
    )

"""The pool of many ranks: exact in every layout, elastic, and whole again after any fault."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psutil
import pytest
import torch

from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import (
    AbortedError,
    CancelledTaskError,
    CheckpointNotFoundError,
    ComponentError,
    ConfigError,
    NotFoundError,
    OutOfMemoryError,
    PreconditionError,
    UnavailableError,
)
from chitu_diffusion.v1 import component_pb2
from services.dit.denoiser import make_plan
from services.dit.host import make_pool
from services.dit.jobs import Forward, Order, Source
from services.dit.parallel import Layout
from services.dit.pool import LocalPool
from services.dit.ranks.front import RankPool
from services.dit.replies import layout_message
from tests.dit import slices
from tests.dit.conftest import make_embeds, make_params
from tests.dit.pools import Faults, faults_in, gone, pids, running, until
from tests.dit.ranks import LAYOUTS
from tests.dit.slices import collect, latents, run, step_numbers

TWO = {"guidance_scale_high": 5.0, "boundary_ratio": 0.8}
GUIDED = make_plan(make_params(**TWO))
PADDED = make_plan(make_params(**TWO, num_frames=1, height=112, width=80))
PLAIN = make_plan(make_params(guidance_scale=1.0, guidance_scale_high=1.0, boundary_ratio=0.8))
ONE, PAIR, FOUR = Layout(), Layout(2, 1, 1), Layout(2, 2, 1)


def job(task_id: str = "a", **changes: Any) -> Order:
    return slices.job(task_id, **({"plan": GUIDED} | changes))


def on(layout: Layout, *ranks: int) -> dict[str, Any]:
    """The fields of a slice that names its group."""
    return {"layout": layout_message(layout), "ranks": ranks}


def close_to(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).norm() / theirs.norm() < 1e-4)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    with faults_in(tmp_path_factory.mktemp("faults")) as faults:
        yield faults


@pytest.fixture(scope="module")
async def four(make_config: Callable[..., Config], faults: Faults) -> AsyncIterator[RankPool]:
    """Four ranks that survive all of these tests."""
    config = make_config(
        "two-diffusers",
        "distributed.world_size=4",
        "services.dit.warmup=5x32x32",
        "services.dit.stall_timeout_s=4",
    )
    async with running(config) as pool:
        yield pool


@pytest.fixture
def pool(four: RankPool, faults: Faults) -> Iterator[RankPool]:
    yield four
    faults.clear()


@pytest.fixture(scope="module")
async def alone(make_config: Callable[..., Config]) -> AsyncIterator[LocalPool]:
    pool = LocalPool(make_config("two-diffusers"))
    await pool.load()
    yield pool
    await pool.close()


async def ready(pool: RankPool) -> None:
    """Wait until slices are taken again."""

    def takes_slices() -> bool:
        try:
            pool.check()
        except UnavailableError:
            return False
        return True

    await until("the pool takes slices again", takes_slices, within_s=60)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("plan", [GUIDED, PADDED, PLAIN], ids=["guided", "padded", "plain"])
async def test_every_layout_equals_one_rank(
    pool: RankPool, alone: LocalPool, layout: Layout, plan: Any
) -> None:
    given = await run(pool, job(plan=plan, layout=layout_message(layout), return_checkpoint=True))
    expected = await run(alone, job(plan=plan, return_checkpoint=True))
    assert close_to(latents(given), latents(expected))
    assert [step.layout for step in given.steps] == [layout_message(layout)] * 6
    assert [step.expert for step in given.steps] == [step.expert for step in expected.steps]
    assert close_to(given.checkpoints[0].latents, latents(expected))
    if layout == ONE:
        assert torch.equal(latents(given), latents(expected))


async def test_the_same_layout_gives_the_same_bits(pool: RankPool) -> None:
    first = latents(await run(pool, job("a", **on(FOUR, 0, 1, 2, 3))))
    assert torch.equal(first, latents(await run(pool, job("b", **on(FOUR, 3, 1, 0, 2)))))


async def test_without_a_layout_all_ranks_are_used(pool: RankPool) -> None:
    guided = await run(pool, job())
    assert guided.steps[0].layout == layout_message(FOUR)
    plain = await run(pool, job(plan=PLAIN))
    assert plain.steps[0].layout == layout_message(Layout(1, 4, 1))
    pair = await run(pool, job(ranks=[3, 1]))
    assert pair.steps[0].layout == layout_message(PAIR)


async def test_what_the_pool_tells(pool: RankPool) -> None:
    told = pool.describe()
    assert told.layout == layout_message(FOUR)
    assert [rank.rank for rank in told.ranks] == [0, 1, 2, 3]
    assert [(rank.cfg_rank, rank.cp_rank) for rank in told.ranks] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert len({rank.pid for rank in told.ranks}) == 4
    assert {rank.task_id for rank in told.ranks} == {""}
    assert told.attn_type == "sdpa"
    sizes = [len(group.ranks) for group in told.groups]
    assert {size: sizes.count(size) for size in sizes} == {4: 2, 2: 4, 1: 4}
    assert {time.layout.SerializeToString() for time in told.step_times} >= {
        group.layout.SerializeToString() for group in told.groups
    }
    names = [part.name for part in pool.components()]
    assert names == ["transformer", "transformer_2"]
    assert all(part.state == component_pb2.COMPONENT_STATE_READY for part in pool.components())
    assert all(part.weight_bytes > 0 for part in pool.components())
    memory = {entry.process: entry.pid for entry in pool.memory()}
    assert memory == {"dit front": os.getpid()} | {
        f"dit rank {rank}": pid for rank, pid in enumerate(pids(pool))
    }


async def test_disjoint_groups_run_side_by_side(
    pool: RankPool, alone: LocalPool, faults: Faults
) -> None:
    faults.pace(0.05)
    groups = [on(PAIR, 0, 1), on(ONE, 2), on(ONE, 3)]
    plans = [make_plan(make_params(**TWO, seed=seed)) for seed in range(3)]
    tasks = [
        asyncio.create_task(run(pool, job(str(n), plan=plans[n], **group)))
        for n, group in enumerate(groups)
    ]
    await until(
        "all ranks are busy",
        lambda: [rank.task_id for rank in pool.describe().ranks] == ["0", "0", "1", "2"],
    )
    for plan, given in zip(plans, await asyncio.gather(*tasks), strict=True):
        assert close_to(latents(given), latents(await run(alone, job(plan=plan))))


async def test_a_large_slice_is_not_held_up_by_small_ones(pool: RankPool, faults: Faults) -> None:
    faults.pace(0.05)
    order: list[str] = []

    async def follow(name: str, layout: Layout) -> None:
        await run(pool, job(name, layout=layout_message(layout)))
        order.append(name)

    async with asyncio.TaskGroup() as group:
        for name, layout in [("one", ONE), ("all", FOUR), ("two", ONE), ("three", PAIR)]:
            group.create_task(follow(name, layout))
            await asyncio.sleep(0.01)
    assert order[:2] == ["one", "all"]


async def test_a_task_may_change_its_group_between_slices(pool: RankPool, alone: LocalPool) -> None:
    expected = latents(await run(alone, job(plan=PADDED)))
    groups = [on(ONE, 0), on(FOUR, 0, 1, 2, 3), on(PAIR, 1, 2), on(ONE, 3), {}, on(ONE, 0)]
    for step, group in enumerate(groups):
        source = Source.HELD if step else Source.NOISE
        given = await run(
            pool,
            job(
                plan=PADDED,
                source=source,
                first_step=step,
                end_step=step + 1,
                keep_state=True,
                return_latents=step == 5,
                **group,
            ),
        )
        assert step_numbers(given) == [step]
    assert close_to(latents(given), expected)
    with pytest.raises(NotFoundError, match="nowhere"):
        await run(pool, job(plan=PADDED, source=Source.HELD, first_step=5))


async def test_going_on_is_bit_equal_in_the_same_layout(pool: RankPool, alone: LocalPool) -> None:
    whole = latents(await run(pool, job("whole")))
    given = await run(pool, job("cut", end_step=3, keep_state=True, return_checkpoint=True))
    held = await run(pool, job("cut", source=Source.HELD, first_step=3))
    assert torch.equal(latents(held), whole)
    sent = job("sent", source=Source.CHECKPOINT, first_step=3, checkpoint=given.checkpoints[0])
    assert torch.equal(latents(await run(pool, sent)), whole)
    assert close_to(latents(await run(alone, sent)), whole), "in another pool"


async def test_checkpoints_at_an_interval(pool: RankPool) -> None:
    given = await run(pool, job(checkpoint_interval_s=1e-9))
    assert given.checkpoints[-1].step == 5
    again = job(source=Source.CHECKPOINT, first_step=5, checkpoint=given.checkpoints[-1])
    assert torch.equal(latents(await run(pool, again)), latents(given))


async def test_a_newer_state_replaces_what_other_ranks_hold(pool: RankPool) -> None:
    cut = {"end_step": 2, "keep_state": True, "return_latents": False}
    await run(pool, job("retried", **cut, **on(PAIR, 0, 1)))
    await run(pool, job("retried", attempt=2, **cut, **on(PAIR, 1, 2)))
    rest = {"source": Source.HELD, "first_step": 2, "attempt": 2}
    given = await run(pool, job("retried", **rest, **on(FOUR, 0, 1, 2, 3)))
    assert torch.isfinite(latents(given)).all()
    with pytest.raises(AbortedError, match="attempt 1 is behind 2"):
        pool.submit(job("retried"))


async def test_released_state_is_gone(pool: RankPool) -> None:
    await run(pool, job("a", end_step=2, keep_state=True))
    pool.release("a")
    with pytest.raises(NotFoundError, match="nowhere"):
        await run(pool, job("a", source=Source.HELD, first_step=2))


@pytest.mark.parametrize(
    ("group", "error", "words"),
    [
        (on(Layout(2, 4, 1)), PreconditionError, "needs 8 ranks, this pool has 4"),
        (on(Layout(1, 3, 1)), PreconditionError, "must divide the model's 4 heads"),
        (on(ONE, 4), PreconditionError, "ranks 0 to 3"),
        (on(PAIR, 1, 1), ValueError, "must be different"),
        (on(PAIR, 1), ValueError, "1 ranks: must be 2"),
        (on(Layout(3, 1, 1)), ValueError, "must be 1 or 2"),
    ],
)
async def test_groups_that_cannot_be(
    pool: RankPool, group: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        pool.submit(job(**group))


async def test_kernels_that_cannot_run_are_refused_by_name(pool: RankPool) -> None:
    pool.check_attention("sdpa", "params.attn_type")
    with pytest.raises(ConfigError, match=r"params\.attn_type='flash_attn': runs on CUDA only"):
        pool.check_attention("flash_attn", "params.attn_type")


async def test_a_forward(pool: RankPool, alone: LocalPool) -> None:
    latents = torch.randn(1, 16, 2, 4, 6, generator=torch.Generator().manual_seed(1))
    forward = Forward(1, latents, 500.0, make_embeds(1, 9)[0, :9])
    ours, theirs = await pool.forward(forward), await alone.forward(forward)
    assert torch.equal(ours.velocity, theirs.velocity)
    assert ours.attn_type == "sdpa"
    assert ours.report.waited_seconds >= 0


async def test_a_transformer_moves_on_all_ranks(pool: RankPool) -> None:
    part = await pool.move("transformer_2", "cpu")
    assert (part.name, part.device) == ("transformer_2", "cpu")
    await run(pool, job(plan=PADDED))


@pytest.mark.parametrize("when", [0, 3])
async def test_cancel_ends_at_the_step_boundary(pool: RankPool, faults: Faults, when: int) -> None:
    faults.pace(0.1)
    stream = pool.submit(job(keep_state=True))
    steps = []

    async def cancel_after_a_step() -> None:
        async for response in stream:
            steps.append(response.step.step)
            if len(steps) == when + 1:
                stream.cancel()

    with pytest.raises(CancelledTaskError):
        await cancel_after_a_step()
    assert len(steps) <= when + 2
    faults.clear()
    assert step_numbers(await run(pool, job())) == [*range(6)]


async def test_cancelled_before_its_turn_it_ends_at_once(pool: RankPool, faults: Faults) -> None:
    faults.pace(0.1)
    running_, waiting = pool.submit(job("a")), pool.submit(job("b"))
    waiting.cancel()
    with pytest.raises(CancelledTaskError, match="before its turn"):
        await asyncio.wait_for(collect(waiting), 0.05)
    assert step_numbers(await collect(running_)) == [*range(6)]


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("raise", ComponentError, "rank 2: ValueError: a fault of the test's own"),
        ("oom", OutOfMemoryError, "rank 2: out of memory: CUDA out of memory"),
    ],
)
async def test_an_error_names_its_rank_and_the_next_slice_runs(
    pool: RankPool, alone: LocalPool, faults: Faults, what: str, error: type[Exception], words: str
) -> None:
    before = pids(pool)
    faults.at(2, 3, what)
    began = time.monotonic()
    with pytest.raises(error, match=words):
        await run(pool, job())
    assert time.monotonic() - began < 3
    given = await run(pool, job("next"))
    assert close_to(latents(given), latents(await run(alone, job())))
    assert pids(pool) == before, "no rank was started again"


async def test_an_error_leaves_other_groups_alone(pool: RankPool, faults: Faults) -> None:
    faults.pace(0.05)
    faults.at(0, 2, "raise")
    other = asyncio.create_task(run(pool, job("other", **on(PAIR, 2, 3))))
    with pytest.raises(ComponentError, match="rank 0"):
        await run(pool, job(**on(PAIR, 0, 1)))
    assert step_numbers(await other) == [*range(6)]


@pytest.mark.parametrize("what", ["kill", "stop", "hang"])
async def test_a_lost_rank_is_replaced(
    pool: RankPool, alone: LocalPool, faults: Faults, what: str
) -> None:
    before, told = pids(pool), list[bool]()
    pool.serving_changed = told.append
    faults.at(3, 2, what)
    began = time.monotonic()
    both = [
        asyncio.create_task(run(pool, job("a"))),
        asyncio.create_task(run(pool, job("b"))),
    ]
    for slice_ in both:  # the one that ran, and the one that waited
        with pytest.raises(UnavailableError, match="rank"):
            await slice_
    assert time.monotonic() - began < 12
    with pytest.raises(UnavailableError, match="starting again"):
        pool.check()
    await ready(pool)
    assert told == [False, True]
    assert await gone({psutil.Process(pid) for pid in before if psutil.pid_exists(pid)})
    assert not set(pids(pool)) & set(before)
    given = await run(pool, job("next"))
    assert close_to(latents(given), latents(await run(alone, job())))


async def test_killed_while_nothing_runs(pool: RankPool) -> None:
    os.kill(pids(pool)[1], signal.SIGKILL)
    await until("the loss is noticed", lambda: len(pool.describe().ranks) < 4)
    with pytest.raises(UnavailableError):
        pool.check()
    await ready(pool)
    assert step_numbers(await run(pool, job())) == [*range(6)]


async def test_all_ranks_stopped(pool: RankPool) -> None:
    for pid in pids(pool):
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(UnavailableError, match=r"does not answer|are stuck"):
        await run(pool, job())
    await ready(pool)
    assert step_numbers(await run(pool, job())) == [*range(6)]


async def test_weights_that_cannot_be_read(
    make_config: Callable[..., Config], tmp_path: Any
) -> None:
    config = make_config(
        "one-diffusers", "distributed.world_size=2", f"models.ckpt_dir={tmp_path}/nowhere"
    )
    pool = RankPool(config)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(CheckpointNotFoundError, match=r"rank \d: .*nowhere"):
        await pool.load()
    with pytest.raises(UnavailableError, match="nowhere"):
        pool.check()
    await pool.close()
    assert await gone(set(psutil.Process().children(recursive=True)) - before)


def test_more_ranks_than_devices(make_config: Callable[..., Config]) -> None:
    config = make_config("one-diffusers", "distributed.world_size=2", "infer.device=cuda")
    if torch.cuda.device_count() >= 2:
        pytest.skip("this host has enough devices")
    with pytest.raises(ConfigError, match="2 ranks on this host need as many CUDA devices"):
        make_pool(config)


def test_one_rank_lives_in_this_process(make_config: Callable[..., Config]) -> None:
    assert isinstance(make_pool(make_config("one-diffusers")), LocalPool)

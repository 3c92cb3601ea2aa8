"""The pool of one rank: turns, cancelling, errors, and the state it keeps between slices."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

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
    UnavailableError,
)
from chitu_diffusion.v1 import component_pb2
from services.dit import denoiser as denoiser_module
from services.dit.denoiser import make_plan
from services.dit.jobs import Source
from services.dit.pool import LocalPool
from services.dit.rank import MAX_HELD
from tests.dit.conftest import Gate, make_params
from tests.dit.slices import collect, job, latents, run, step_numbers


@pytest.fixture
async def pool(make_config: Callable[..., Config]) -> AsyncIterator[LocalPool]:
    pool = LocalPool(make_config("one-diffusers"))
    await pool.load()
    yield pool
    await pool.close()


async def test_events_of_a_slice(pool: LocalPool) -> None:
    given = await run(pool, job(return_checkpoint=True))
    assert step_numbers(given) == [*range(6)]
    assert given.done is not None
    assert (given.done.next_step, given.done.attn_type) == (6, "sdpa")
    assert given.done.report.seconds > 0
    (checkpoint,) = given.checkpoints
    assert torch.equal(checkpoint.latents, latents(given))


async def test_held_and_checkpoint_go_on_bit_equal(pool: LocalPool) -> None:
    expected = latents(await run(pool, job("whole")))
    first = await run(pool, job(end_step=2, keep_state=True, return_checkpoint=True))
    held = await run(pool, job(first_step=2, source=Source.HELD))
    assert torch.equal(latents(held), expected)
    again = job(first_step=2, source=Source.CHECKPOINT, checkpoint=first.checkpoints[0])
    assert torch.equal(latents(await run(pool, again)), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"task_id": "other"},
        {"first_step": 3},
        {"plan": make_plan(make_params(seed=12))},
    ],
    ids=["task", "step", "params"],
)
async def test_held_state_that_is_not_there(pool: LocalPool, changes: dict[str, Any]) -> None:
    await run(pool, job(end_step=2, keep_state=True))
    fields: dict[str, Any] = {"first_step": 2, "source": Source.HELD} | changes
    with pytest.raises(NotFoundError, match="no state at step"):
        await run(pool, job(**fields))


async def test_state_is_kept_only_if_asked_for(pool: LocalPool) -> None:
    await run(pool, job(end_step=2))
    assert pool.rank.held_tasks == []
    await run(pool, job(end_step=2, keep_state=True))
    assert pool.rank.held_tasks == ["a"]
    await run(pool, job(first_step=2, source=Source.HELD, keep_state=True))
    assert pool.rank.held_tasks == [], "a finished task leaves nothing"


async def test_released_state_is_gone(pool: LocalPool) -> None:
    for task in ("a", "b"):
        await run(pool, job(task, end_step=2, keep_state=True))
    pool.release("a")
    pool.release("never seen")
    with pytest.raises(NotFoundError, match="nowhere"):
        await run(pool, job("a", first_step=2, source=Source.HELD))
    assert pool.rank.held_tasks == ["b"]


async def test_held_states_are_bounded(pool: LocalPool) -> None:
    for n in range(MAX_HELD + 2):
        await run(pool, job(str(n), end_step=1, keep_state=True))
    assert pool.rank.held_tasks == [str(n) for n in range(2, MAX_HELD + 2)]


async def test_slices_run_one_at_a_time_in_order(pool: LocalPool, gate: Gate) -> None:
    order: list[tuple[str, int]] = []

    async def follow(task_id: str) -> None:
        async for response in pool.submit(job(task_id, end_step=3, return_latents=False)):
            if response.HasField("step"):
                order.append((task_id, response.step.step))

    gate.let(9)
    async with asyncio.TaskGroup() as group:
        for task_id in ("a", "b", "c"):
            group.create_task(follow(task_id))
    assert gate.entered == [0, 1, 2] * 3
    assert order == [(task, step) for task in "abc" for step in range(3)]


async def test_waiting_time_is_told(pool: LocalPool, gate: Gate) -> None:
    first, second = pool.submit(job("a", end_step=1)), pool.submit(job("b", end_step=1))
    await asyncio.sleep(0.1)
    gate.let(2)
    waited = [(await collect(stream)).done for stream in (first, second)]
    assert waited[0] is not None
    assert waited[1] is not None
    assert waited[0].report.waited_seconds < 0.09 < waited[1].report.waited_seconds


async def test_cancel_ends_at_the_step_boundary(pool: LocalPool, gate: Gate) -> None:
    stream = pool.submit(job(keep_state=True))
    gate.let(2)
    await gate.reached(3)
    stream.cancel()
    gate.let(9)
    with pytest.raises(CancelledTaskError):
        await collect(stream)
    assert gate.entered == [0, 1, 2]
    assert pool.rank.held_tasks == []


async def test_cancelled_before_its_turn_it_never_starts(pool: LocalPool, gate: Gate) -> None:
    first, second = pool.submit(job("a", end_step=1)), pool.submit(job("b"))
    second.cancel()
    gate.let(9)
    assert step_numbers(await collect(first)) == [0]
    with pytest.raises(CancelledTaskError, match="before its turn"):
        await collect(second)
    assert gate.entered == [0]


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        (ValueError("bad kernel"), ComponentError, "ValueError: bad kernel"),
        (RuntimeError("shape mismatch"), ComponentError, "RuntimeError: shape mismatch"),
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemoryError, "CUDA out of memory"),
        (MemoryError(), OutOfMemoryError, "out of memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            OutOfMemoryError,
            "can't allocate",
        ),
    ],
)
async def test_an_error_fails_its_slice_only(
    pool: LocalPool,
    gate: Gate,
    failure: Exception,
    error: type[Exception],
    message: str,
) -> None:
    gate.let(99)
    await run(pool, job("a", end_step=2, keep_state=True))
    gate.fail = failure
    with pytest.raises(error, match=message):
        await run(pool, job("a", first_step=2, source=Source.HELD))
    assert pool.rank.held_tasks == []
    assert torch.isfinite(latents(await run(pool, job("b")))).all()


async def test_out_of_memory_frees_what_the_slice_had(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def fail(model: Any, latents: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(weakref.ref(latents))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(denoiser_module, "guided_velocity", fail)
    gc.disable()  # freeing must not depend on a later collection
    try:
        with pytest.raises(OutOfMemoryError):
            await run(pool, job())
        assert seen[0]() is None
    finally:
        gc.enable()


async def test_newer_attempt_takes_over(pool: LocalPool, gate: Gate) -> None:
    old = pool.submit(job("a", attempt=1))
    other = pool.submit(job("b", attempt=1, end_step=1))
    await gate.reached(1)
    new = pool.submit(job("a", attempt=2, end_step=1))
    gate.let(9)
    with pytest.raises(AbortedError, match="attempt 2 has taken over"):
        await collect(old)
    assert step_numbers(await collect(other)) == [0]
    assert step_numbers(await collect(new)) == [0]
    with pytest.raises(AbortedError, match="attempt 1 is behind 2"):
        pool.submit(job("a", attempt=1))


async def test_checkpoints_at_an_interval(pool: LocalPool) -> None:
    expected = latents(await run(pool, job()))
    given = await run(pool, job(checkpoint_interval_s=1e-9))
    assert [checkpoint.step for checkpoint in given.checkpoints][-1] == 5
    for checkpoint in given.checkpoints:
        again = job(first_step=checkpoint.step, source=Source.CHECKPOINT, checkpoint=checkpoint)
        assert torch.equal(latents(await run(pool, again)), expected)
    assert not (await run(pool, job())).checkpoints


async def test_slow_reader_keeps_one_checkpoint(pool: LocalPool, gate: Gate) -> None:
    stream = pool.submit(job(checkpoint_interval_s=1e-9))
    gate.let(5)
    await gate.reached(6)
    await asyncio.sleep(0.05)
    gate.let(1)
    given = await collect(stream)
    assert [checkpoint.step for checkpoint in given.checkpoints] == [5]
    assert step_numbers(given) == [*range(6)]


async def test_closing_ends_what_runs(make_config: Callable[..., Config], gate: Gate) -> None:
    pool = LocalPool(make_config("one-diffusers"))
    await pool.load()
    running, waiting = pool.submit(job("a")), pool.submit(job("b"))
    await gate.reached(1)
    closing = asyncio.create_task(pool.close())
    await asyncio.sleep(0)
    gate.let(9)
    for stream in (running, waiting):
        with pytest.raises(UnavailableError, match="shutting down"):
            await collect(stream)
    await closing
    assert gate.entered == [0]
    with pytest.raises(UnavailableError, match="shutting down"):
        pool.submit(job("c"))


async def test_before_and_after_loading(make_config: Callable[..., Config]) -> None:
    pool = LocalPool(make_config("two-original"))
    with pytest.raises(UnavailableError, match="loading"):
        pool.submit(job())
    states = {component.state for component in pool.components()}
    assert states == {component_pb2.COMPONENT_STATE_LOADING}
    await pool.load()
    components = pool.components()
    assert [component.name for component in components] == ["transformer", "transformer_2"]
    for component in components:
        assert component.state == component_pb2.COMPONENT_STATE_READY
        assert (component.device, component.dtype) == ("cpu", "float32")
        assert component.attn_type == "sdpa"
        assert component.weight_bytes == 4 * component.parameter_count > 0
    assert pool.memory()[0].rss_bytes > 0
    await pool.close()


async def test_failed_load(make_config: Callable[..., Config], tmp_path: Any) -> None:
    pool = LocalPool(make_config("one-diffusers", f"models.ckpt_dir={tmp_path}/nowhere"))
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        await pool.load()
    (component,) = pool.components()
    assert component.state == component_pb2.COMPONENT_STATE_FAILED
    assert "nowhere" in component.detail
    with pytest.raises(UnavailableError, match="nowhere"):
        pool.submit(job())
    await pool.close()


async def test_checkpoint_folder_that_is_not_set(make_config: Callable[..., Config]) -> None:
    pool = LocalPool(make_config("one-diffusers", "models.ckpt_dir=null"))
    with pytest.raises(ConfigError, match=r"models\.ckpt_dir is not set"):
        await pool.load()
    assert pool.components()[0].state == component_pb2.COMPONENT_STATE_FAILED
    await pool.close()


async def test_concurrent_tasks_do_not_share_state(pool: LocalPool) -> None:
    plans = [
        make_plan(make_params(solver=solver, num_inference_steps=steps))
        for solver, steps in (("unipc", 4), ("dpm++", 6))
    ]
    jobs = [job(str(n), plan=plan, end_step=len(plan.steps)) for n, plan in enumerate(plans)]
    serial = [latents(await run(pool, each)) for each in jobs]
    halves = await asyncio.gather(
        *(
            run(pool, job(str(n), plan=plan, end_step=2, keep_state=True))
            for n, plan in enumerate(plans)
        )
    )
    assert len(halves) == 2
    for n, plan in enumerate(plans):
        rest = job(str(n), plan=plan, first_step=2, end_step=len(plan.steps), source=Source.HELD)
        assert torch.equal(latents(await run(pool, rest)), serial[n])


async def test_drained_while_loading(make_config: Callable[..., Config]) -> None:
    pool = LocalPool(make_config("one-diffusers"))
    loading = asyncio.create_task(pool.load())
    await asyncio.sleep(0)
    pool.drain()
    await loading
    with pytest.raises(UnavailableError, match="shutting down"):
        pool.submit(job())
    await pool.close()

"""Where transformers live, and where they are while they are used.

There is no accelerator here: moves are recorded instead of made, or made to the meta device.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import (
    CancelledTaskError,
    ComponentError,
    OutOfMemoryError,
    UnavailableError,
)
from services.dit import experts as experts_module
from services.dit import rank as rank_module
from services.dit.denoiser import make_plan
from services.dit.experts import Experts
from services.dit.jobs import Forward, Order, Source
from services.dit.pool import LocalPool
from tests.dit.conftest import CPU, Gate, make_embeds, make_params
from tests.dit.slices import collect, job, latents, run

META, CUDA = torch.device("meta"), torch.device("cuda", 0)
# Steps 0 to 2 are high noise, 3 to 5 low noise.
PLAN = make_plan(make_params(guidance_scale_high=3.0, boundary_ratio=0.8))


def two_experts(**changes: Any) -> Order:
    return job(**({"plan": PLAN} | changes))


class Moves:
    """Stands in for `move_module`: writes down (expert, target), and refuses when it is told to."""

    def __init__(self) -> None:
        self.models: list[Any] = []
        self.made: list[tuple[int, str]] = []
        self.full = False

    def __call__(self, module: Any, device: torch.device) -> None:
        if self.full and device == CUDA:
            raise OutOfMemoryError("does not fit")
        self.made.append((self.models.index(module), device.type))

    def taken(self) -> list[tuple[int, str]]:
        made, self.made = self.made, []
        return made


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Moves:
    moves = Moves()
    monkeypatch.setattr(experts_module, "move_module", moves)
    return moves


@pytest.fixture
async def pool(make_config: Callable[..., Config], moves: Moves) -> AsyncIterator[LocalPool]:
    """Two experts that believe they live on an accelerator."""
    pool = LocalPool(make_config("two-diffusers"))
    await pool.load()
    moves.models = [pool.rank.experts[index] for index in range(2)]
    pool.rank.experts = Experts(moves.models, CUDA)
    yield pool
    await pool.close()


async def to_cpu(pool: LocalPool, moves: Moves) -> None:
    for name in ("transformer", "transformer_2"):
        assert (await pool.move(name, "cpu")).device == "cpu"
    moves.taken()


def devices(pool: LocalPool) -> list[str]:
    return [component.device for component in pool.components()]


async def test_moving_changes_the_home(pool: LocalPool, moves: Moves) -> None:
    assert devices(pool) == ["cuda:0", "cuda:0"]
    component = await pool.move("transformer_2", "cpu")
    assert (component.name, component.device) == ("transformer_2", "cpu")
    assert devices(pool) == ["cuda:0", "cpu"]
    await pool.move("transformer_2", "cpu")
    assert (await pool.move("transformer_2", "device")).device == "cuda:0"
    await pool.move("transformer_2", "device")
    assert moves.taken() == [(1, "cpu"), (1, "cuda")]


async def test_one_that_lives_on_the_device_stays(pool: LocalPool, moves: Moves) -> None:
    await run(pool, two_experts())
    assert moves.taken() == []


async def test_a_slice_brings_each_expert_for_its_steps(pool: LocalPool, moves: Moves) -> None:
    expected = latents(await run(pool, two_experts()))
    await to_cpu(pool, moves)
    whole = latents(await run(pool, two_experts()))
    assert moves.taken() == [(0, "cuda"), (0, "cpu"), (1, "cuda"), (1, "cpu")]
    assert torch.equal(whole, expected)
    await run(pool, two_experts(end_step=2, keep_state=True))
    assert moves.taken() == [(0, "cuda"), (0, "cpu")]
    rest = latents(await run(pool, two_experts(first_step=2, source=Source.HELD)))
    assert moves.taken() == [(0, "cuda"), (0, "cpu"), (1, "cuda"), (1, "cpu")]
    assert torch.equal(rest, expected)


async def test_homes_are_each_expert_s_own(pool: LocalPool, moves: Moves) -> None:
    await pool.move("transformer", "cpu")
    moves.taken()
    await run(pool, two_experts())
    assert moves.taken() == [(0, "cuda"), (0, "cpu")]


async def test_a_forward_brings_its_expert(pool: LocalPool, moves: Moves) -> None:
    await to_cpu(pool, moves)
    forward = Forward(1, torch.zeros(1, 16, 2, 4, 6), 500.0, make_embeds(1, 9)[0, :9])
    assert torch.isfinite((await pool.forward(forward)).velocity).all()
    assert moves.taken() == [(1, "cuda"), (1, "cpu")]


async def test_told_while_a_step_runs_and_moved_behind_it(
    pool: LocalPool, moves: Moves, gate: Gate
) -> None:
    await to_cpu(pool, moves)
    running = asyncio.create_task(run(pool, two_experts()))
    await gate.reached(1)
    assert devices(pool) == ["cuda:0", "cpu"]
    moving = asyncio.create_task(pool.move("transformer", "device"))
    gate.let(3)
    await gate.reached(3)
    assert devices(pool) == ["cpu", "cuda:0"]
    assert not moving.done()
    gate.let(3)
    assert (await moving).device == "cuda:0"
    await running
    assert devices(pool) == ["cuda:0", "cpu"]


@pytest.mark.parametrize("how", ["error", "cancel"])
async def test_goes_home_after_a_slice_that_ends_early(
    pool: LocalPool, moves: Moves, gate: Gate, how: str
) -> None:
    await to_cpu(pool, moves)
    stream = pool.submit(two_experts())
    await gate.reached(1)
    if how == "error":
        gate.fail = ValueError("bad kernel")
    else:
        stream.cancel()
    gate.let(9)
    with pytest.raises(ComponentError if how == "error" else CancelledTaskError):
        await collect(stream)
    assert moves.taken() == [(0, "cuda"), (0, "cpu")]
    assert devices(pool) == ["cpu", "cpu"]


async def test_no_room_on_the_device(pool: LocalPool, moves: Moves) -> None:
    await to_cpu(pool, moves)
    moves.full = True
    with pytest.raises(OutOfMemoryError, match="does not fit"):
        await pool.move("transformer", "device")
    with pytest.raises(OutOfMemoryError, match="does not fit"):
        await run(pool, two_experts())
    assert devices(pool) == ["cpu", "cpu"]
    moves.full = False
    await run(pool, two_experts(end_step=1))
    assert moves.taken() == [(0, "cuda"), (0, "cpu")], "the move that failed changed no home"


async def test_not_before_loading_nor_after_draining(make_config: Callable[..., Config]) -> None:
    pool = LocalPool(make_config("one-diffusers"))
    with pytest.raises(UnavailableError, match="loading"):
        await pool.move("transformer", "cpu")
    pool.drain()
    with pytest.raises(UnavailableError, match="shutting down"):
        await pool.move("transformer", "cpu")
    await pool.close()


@pytest.mark.parametrize(("level", "home"), [(0, META), (2, META), (3, CPU)])
async def test_low_mem_level_sets_the_first_home(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, level: int, home: Any
) -> None:
    monkeypatch.setattr(rank_module, "resolve_device", lambda name: META)
    pool = LocalPool(make_config("two-original", f"infer.diffusion.low_mem_level={level}"))
    assert devices(pool) == [str(home)] * 2, "told before the weights are there"
    await pool.load()
    assert devices(pool) == [str(home)] * 2
    weights = [pool.rank.experts[index].scale_shift_table for index in range(2)]
    assert [weight.device for weight in weights] == [home] * 2
    # Real moves, with the meta device for an accelerator.
    assert (await pool.move("transformer", "device")).device == "meta"
    weights = [pool.rank.experts[index].scale_shift_table for index in range(2)]
    assert [weight.device for weight in weights] == [META, home]
    await pool.close()

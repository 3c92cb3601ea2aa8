"""Rounds of random cancels, kills and stops: nothing hangs, nothing stays, results stay right."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator

import psutil
import pytest

from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import CancelledTaskError, UnavailableError
from services.dit.parallel import Layout
from services.dit.ranks.front import RankPool
from services.dit.replies import layout_message
from tests.dit.pools import Faults, descendants, faults_in, gone, pids, running, until
from tests.dit.slices import collect, job, latents, run, step_numbers
from tests.dit.test_ranks import close_to

pytestmark = pytest.mark.slow

LAYOUTS = [Layout(2, 2, 1), Layout(1, 2, 2), Layout(1, 1, 3), Layout(2, 1, 1), Layout()]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    with faults_in(tmp_path_factory.mktemp("faults")) as faults:
        yield faults


@pytest.fixture(scope="module")
async def four(make_config: Callable[..., Config], faults: Faults) -> AsyncIterator[RankPool]:
    config = make_config(
        "one-diffusers",
        "distributed.world_size=4",
        "services.dit.warmup=5x32x32",
        "services.dit.stall_timeout_s=4",
    )
    async with running(config) as pool:
        yield pool


def takes_slices(pool: RankPool) -> bool:
    try:
        pool.check()
    except UnavailableError:
        return False
    return True


async def test_cancel_at_random_times(four: RankPool, faults: Faults) -> None:
    expected = latents(await run(four, job()))
    before, chance = pids(four), random.Random(4)
    for number in range(30):
        layout = chance.choice(LAYOUTS)
        faults.pace(0.03)
        streams = [
            four.submit(job(f"{number}.{n}", layout=layout_message(layout))) for n in range(2)
        ]
        await asyncio.sleep(chance.uniform(0, 0.3))
        asked = time.monotonic()
        for stream in streams:
            stream.cancel()
        for given in await asyncio.gather(*map(collect, streams), return_exceptions=True):
            # The last step may have been over.
            assert isinstance(given, CancelledTaskError) or not isinstance(given, BaseException)
        assert time.monotonic() - asked < 1
        faults.clear()
        again = await run(four, job(f"{number} again", layout=layout_message(layout)))
        assert close_to(latents(again), expected)
    assert pids(four) == before, "no rank was started again"


@pytest.mark.parametrize("number", range(20))
async def test_lose_a_rank_at_a_random_step(four: RankPool, faults: Faults, number: int) -> None:
    chance = random.Random(number)
    expected = latents(await run(four, job()))
    before = {psutil.Process(pid) for pid in pids(four)}
    how = signal.SIGKILL if number % 2 else signal.SIGSTOP
    faults.pace(0.05)
    slice_ = asyncio.create_task(run(four, job("lost")))
    await asyncio.sleep(chance.uniform(0.02, 0.3))
    os.kill(pids(four)[number // 2 % 4], how)
    began = time.monotonic()
    with pytest.raises(UnavailableError):
        await slice_
    assert time.monotonic() - began < 10
    faults.clear()
    await until("the pool takes slices again", lambda: takes_slices(four), within_s=60)
    assert await gone(before)
    assert close_to(latents(await run(four, job())), expected)


@pytest.mark.parametrize("number", range(10))
async def test_two_pools_start_at_once(make_config: Callable[..., Config], number: int) -> None:
    config = make_config("one-diffusers", "distributed.world_size=2")
    before = descendants()
    pools = [RankPool(config) for _ in range(2)]
    await asyncio.gather(*(pool.load() for pool in pools))
    assert len({pid for pool in pools for pid in pids(pool)}) == 4
    given = await asyncio.gather(*(run(pool, job()) for pool in pools))
    assert all(step_numbers(each) == [*range(6)] for each in given)
    await asyncio.gather(*(pool.close() for pool in pools))
    assert await gone(descendants() - before)

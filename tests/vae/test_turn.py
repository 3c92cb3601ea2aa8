from __future__ import annotations

import asyncio

import pytest

from services.vae.turn import Turn


async def test_turns_come_in_order_of_arrival() -> None:
    lock, order = asyncio.Lock(), []

    async def call(name: int) -> float:
        async with Turn(lock) as turn:
            order.append(name)
            await asyncio.sleep(0.02)
            return turn.waited_seconds

    waits = await asyncio.gather(*(call(name) for name in range(3)))
    assert order == [0, 1, 2]
    assert waits[0] < waits[1] < waits[2]
    assert waits[2] >= 0.03  # two others of 0.02 s each, less the clock's grain


async def test_a_turn_is_kept_while_its_reader_reads() -> None:
    lock = asyncio.Lock()
    async with Turn(lock, stall_s=5) as turn:
        for _ in range(3):
            turn.sending()
            await asyncio.sleep(0)
            await turn.take()
        assert lock.locked()
    assert not lock.locked()


async def test_a_stalled_reader_gives_the_turn_up_and_queues_again() -> None:
    lock, order = asyncio.Lock(), []
    async with Turn(lock, stall_s=0.01) as stalled:

        async def other() -> None:
            async with Turn(lock):
                order.append("other begins")
                await asyncio.sleep(0.03)
                order.append("other ends")

        waiting = asyncio.create_task(other())
        stalled.sending()
        await asyncio.sleep(0.02)
        await stalled.take()
        order.append("goes on")
        assert lock.locked()
        await waiting
    assert order == ["other begins", "other ends", "goes on"]
    assert not lock.locked()


async def test_leaving_after_a_stall_releases_nothing_of_others() -> None:
    lock = asyncio.Lock()
    async with Turn(lock, stall_s=0.01) as stalled:
        stalled.sending()
        await asyncio.sleep(0.02)
        other = Turn(lock)
        await other.take()
    assert lock.locked()


async def test_a_cancelled_wait_holds_nothing() -> None:
    lock = asyncio.Lock()
    async with Turn(lock):
        waiting = asyncio.create_task(Turn(lock).take())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert not lock.locked()

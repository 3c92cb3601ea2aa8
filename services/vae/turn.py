"""Whose turn it is to decode."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

STALL_S = 10.0


class Turn:
    """One call's hold on the worker: calls decode one after the other, in order of arrival.

    A decode keeps the features of earlier frames, gigabytes for large videos; calls that alternated
    would keep them all at once. But a caller that stops reading must not hold up the others: while
    answers wait to be sent, `sending` gives the turn up after `stall_s`, and `take` queues again.
    """

    def __init__(self, lock: asyncio.Lock, stall_s: float = STALL_S) -> None:
        """Share `lock` with the other calls; it is free or held by one of their turns."""
        self._lock = lock
        self._stall_s = stall_s
        self._held = False
        self._timer: asyncio.TimerHandle | None = None
        self.waited_seconds = 0.0
        """Time spent waiting for the turn so far."""

    async def take(self) -> None:
        """Wait for the turn; at once when it is still held."""
        self._stop_timer()
        if self._held:
            return
        asked = time.perf_counter()
        await self._lock.acquire()
        self._held = True
        self.waited_seconds += time.perf_counter() - asked

    def sending(self) -> None:
        """Note that answers wait to be sent from now until the next `take`."""
        self._timer = asyncio.get_running_loop().call_later(self._stall_s, self._drop)

    def _drop(self) -> None:
        if self._held:
            self._held = False
            self._lock.release()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def __aenter__(self) -> Turn:
        await self.take()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop_timer()
        self._drop()

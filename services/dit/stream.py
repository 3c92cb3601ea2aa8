"""What a slice sends back, from the thread that runs it to the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator

from chitu_diffusion.errors import CancelledTaskError, ChituError
from services.dit.denoiser import Checkpoint
from services.dit.jobs import Event, Slice


class SliceStream:
    """Events of one slice, from the thread that runs it to the event loop that reads them.

    Holds at most one checkpoint: a newer one takes the place of one that nobody has read yet.
    """

    def __init__(self, job: Slice) -> None:
        self.job = job
        self.submitted = time.perf_counter()
        self.started: float | None = None
        """When its turn came."""
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._ended = False
        self._error: ChituError | None = None
        self._stop = threading.Event()
        self._stop_error: ChituError | None = None

    @property
    def waited_seconds(self) -> float:
        """How long it waited for its turn."""
        return (self.started or time.perf_counter()) - self.submitted

    def cancel(self, error: ChituError | None = None) -> None:
        """End the slice at the next step boundary; a reader gets `error`, or CancelledTaskError."""
        if not self._stop.is_set():
            self._stop_error = error
            self._stop.set()

    @property
    def cancelled(self) -> bool:
        """Whether it shall end."""
        return self._stop.is_set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield events until the slice has ended; raises the error that ended it."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._events:
                yield self._events.popleft()
            if self._ended:
                if self._error is not None:
                    raise self._error
                return

    def put(self, event: Event) -> None:
        """Add an event; called by the thread that runs the slice."""
        self._loop.call_soon_threadsafe(self._put, event)

    def end(self, error: ChituError | None) -> None:
        """Close the stream; called by the thread that runs the slice."""
        if isinstance(error, CancelledTaskError) and self._stop_error is not None:
            error = self._stop_error
        self._loop.call_soon_threadsafe(self._end, error)

    def _put(self, event: Event) -> None:
        if isinstance(event, Checkpoint):
            unread = [old for old in self._events if not isinstance(old, Checkpoint)]
            self._events = deque(unread)
        self._events.append(event)
        self._arrived.set()

    def _end(self, error: ChituError | None) -> None:
        self._ended, self._error = True, error
        self._arrived.set()

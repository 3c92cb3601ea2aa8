"""What a slice sends back, from whoever runs it to the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import NamedTuple

from chitu_diffusion.errors import CancelledTaskError, ChituError
from chitu_diffusion.v1 import dit_pb2


class _Item(NamedTuple):
    responses: Iterable[dit_pb2.DenoiseResponse]
    replaceable: bool


class SliceStream:
    """Responses of one slice, from whoever runs it to the event loop that reads them.

    Holds at most one checkpoint: a newer one takes the place of one that nobody has read yet.
    """

    def __init__(
        self, task_id: str, attempt: int, on_cancel: Callable[[], None] | None = None
    ) -> None:
        """`on_cancel` is called once, by the thread that cancels."""
        self.task_id, self.attempt = task_id, attempt
        self._on_cancel = on_cancel
        self.submitted = time.perf_counter()
        self.started: float | None = None
        """When its turn came."""
        self._loop = asyncio.get_running_loop()
        self._items: deque[_Item] = deque()
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
            if self._on_cancel is not None:
                self._on_cancel()

    @property
    def cancelled(self) -> bool:
        """Whether it shall end."""
        return self._stop.is_set()

    async def __aiter__(self) -> AsyncIterator[dit_pb2.DenoiseResponse]:
        """Yield responses until the slice has ended; raises the error that ended it."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._items:
                for response in self._items.popleft().responses:
                    if response.HasField("done"):
                        response.done.report.waited_seconds = self.waited_seconds
                    yield response
            if self._ended:
                if self._error is not None:
                    raise self._error
                return

    def put(
        self, responses: Iterable[dit_pb2.DenoiseResponse], *, replaceable: bool = False
    ) -> None:
        """Add responses that belong together, made as they are read; from any thread.

        Args:
            responses: of one event.
            replaceable: they are a checkpoint, which the next one may replace.
        """
        self._loop.call_soon_threadsafe(self._put, _Item(responses, replaceable))

    def end(self, error: ChituError | None) -> None:
        """Close the stream; from any thread."""
        if isinstance(error, CancelledTaskError) and self._stop_error is not None:
            error = self._stop_error
        self._loop.call_soon_threadsafe(self._end, error)

    def _put(self, item: _Item) -> None:
        if item.replaceable:
            self._items = deque(old for old in self._items if not old.replaceable)
        self._items.append(item)
        self._arrived.set()

    def _end(self, error: ChituError | None) -> None:
        self._ended, self._error = True, error
        self._arrived.set()

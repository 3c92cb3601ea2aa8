"""An event loop on a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from chitu_diffusion.errors import PreconditionError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for other threads. What they make belongs to this loop and lives on in it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon: a program that ends without closing is not kept alive by it.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end. An interrupt of the caller cancels it.

        Raises:
            PreconditionError: called on the loop's own thread, where it would wait for itself.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise PreconditionError("a blocking call on the event loop's own thread")
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the loop, once what runs has been told to stop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()

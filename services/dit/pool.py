"""A pool takes slices and gives back streams of responses.

`Pool` is what the servicer needs; `LocalPool` is a pool of one rank in this process, whose model
runs on a thread of its own, so the event loop always answers. `ranks/front.py` has that of many.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import CancelledTaskError, ChituError, ComponentError
from chitu_diffusion.v1 import component_pb2, dit_pb2
from services.common.memory import process_memory
from services.dit.denoiser import Checkpoint
from services.dit.experts import hosted
from services.dit.intake import FAILED, LOADING, READY, Intake
from services.dit.jobs import Forward, ForwardDone, Order
from services.dit.parallel import ALONE
from services.dit.rank import Rank
from services.dit.replies import layout_message, replies
from services.dit.request import make_slice, parse_group
from services.dit.stream import SliceStream
from services.dit.warmup import warm_up


class Pool(Protocol):
    """Ranks that run slices."""

    async def load(self) -> None:
        """Bring the ranks up with their weights."""

    def check(self) -> None:
        """Raise `UnavailableError` unless slices are taken."""

    def check_attention(self, attn_type: str, field: str) -> None:
        """Raise `ConfigError`, naming the request's field, unless the ranks can run this kernel."""

    def check_group(self, start: dit_pb2.DenoiseStart) -> None:
        """Raise `PreconditionError` unless there are such ranks as the slice names."""

    def submit(self, order: Order) -> SliceStream:
        """Queue a slice. A rank runs one at a time, first come, first served.

        Raises:
            AbortedError: a newer attempt of the task is known.
            PreconditionError: as `check_group`.
            UnavailableError: the pool is loading or shutting down.
        """

    async def forward(self, job: Forward) -> ForwardDone:
        """Run one transformer once, in turn with the slices.

        Raises:
            UnavailableError: the pool is loading or shutting down.
        """

    def release(self, task_id: str) -> None:
        """Free the state that a task has left, in turn with the slices."""

    async def move(self, name: str, target: str) -> component_pb2.Component:
        """Give a transformer another home, "cpu" or "device", in turn with the slices.

        Raises:
            OutOfMemoryError: it does not fit; it stays where it was.
            UnavailableError: the pool is loading or shutting down.
        """

    def describe(self) -> dit_pb2.GetPoolResponse:
        """Tell the ranks, and how a slice runs that asks for nothing special."""

    def components(self) -> list[component_pb2.Component]:
        """Describe the transformers and where they are."""

    def memory(self) -> list[component_pb2.ProcessMemory]:
        """Count the memory of each process."""

    def drain(self) -> None:
        """Take no more slices."""

    async def close(self) -> None:
        """End what runs at its next step boundary and free everything."""


class LocalPool:
    """One rank in this process."""

    def __init__(self, config: Config) -> None:
        """Resolve the placement.

        Raises:
            ConfigError: the device, type or attention kernel cannot be had.
        """
        self.rank = Rank(config)
        self._config, self._model = config, config.models
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dit-rank")
        self._intake = Intake()
        self._number = 0

    async def load(self) -> None:
        """Read the weights on the rank's thread."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, self.rank.load)
            await warm_up(self._config, [(ALONE.layout, [0])], self._submit)
        except ChituError as error:
            self._intake.state, self._intake.detail = FAILED, str(error)
            raise
        if self._intake.state == LOADING:  # else drained meanwhile
            self._intake.state = READY

    def check(self) -> None:
        """Raise `UnavailableError` unless slices are taken."""
        self._intake.check()

    def check_attention(self, attn_type: str, field: str) -> None:
        """Raise `ConfigError` unless the rank can run this kernel."""
        self.rank.select_attention(attn_type, field)

    def check_group(self, start: dit_pb2.DenoiseStart) -> None:
        """Raise `PreconditionError` for any rank but the one."""
        parse_group(start, 1, self._model.transformer.num_heads)

    def submit(self, order: Order) -> SliceStream:
        """Queue a slice behind the others."""
        self.check()
        return self._submit(order)

    def _submit(self, order: Order) -> SliceStream:
        self.check_group(order.start)
        stream = self._intake.open(order.start.task_id, order.start.attempt)
        self._number += 1
        future = self._thread.submit(self._work, order, self._number, stream)
        loop = asyncio.get_running_loop()
        ended = self._intake.active.discard
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(ended, stream))
        return stream

    def _work(self, order: Order, number: int, stream: SliceStream) -> None:
        """Run a slice; on the rank's thread."""
        stream.started = time.perf_counter()
        error: ChituError | None = None
        try:
            if stream.cancelled:
                raise CancelledTaskError("cancelled before its turn")
            for event in self.rank.run(make_slice(order, number), lambda: stream.cancelled):
                stream.put(
                    replies(event, order.plan, ALONE.layout),
                    replaceable=isinstance(event, Checkpoint),
                )
        except ChituError as raised:
            error = raised
        except BaseException as raised:
            error = ComponentError(f"{type(raised).__name__}: {raised}")
            raise
        finally:
            stream.end(error)

    async def forward(self, job: Forward) -> ForwardDone:
        """Run one transformer once, on the rank's thread."""
        self.check()
        asked = time.perf_counter()
        started: list[float] = []

        def work() -> ForwardDone:
            started.append(time.perf_counter())
            return self.rank.forward(job)

        done = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        done.report.waited_seconds = started[0] - asked
        return done

    def release(self, task_id: str) -> None:
        """Free the state, on the rank's thread."""
        self._thread.submit(self.rank.release, task_id)

    async def move(self, name: str, target: str) -> component_pb2.Component:
        """Give a transformer another home, on the rank's thread."""
        self.check()
        position = hosted(self._config)[name]
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self.rank.experts.settle, position, target)
        return next(part for part in self.components() if part.name == name)

    def describe(self) -> dit_pb2.GetPoolResponse:
        """Tell the one rank."""
        rank = dit_pb2.PoolRank(
            host=socket.gethostname(), pid=os.getpid(), device=str(self.rank.device)
        )
        return dit_pb2.GetPoolResponse(
            layout=layout_message(ALONE.layout), ranks=[rank], attn_type=self.rank.attention.name
        )

    def components(self) -> list[component_pb2.Component]:
        """Describe the transformers; counts are 0 until their weights are here."""
        return self.rank.components(self._intake.state, self._intake.detail)

    def memory(self) -> list[component_pb2.ProcessMemory]:
        """Count this process's memory."""
        return [process_memory("dit rank 0", self.rank.device)]

    def drain(self) -> None:
        """Take no more slices."""
        self._intake.drain()

    async def close(self) -> None:
        """End what runs at its next step boundary and free everything."""
        self.drain()
        self._intake.cancel_all()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self.rank.close)
        await asyncio.to_thread(self._thread.shutdown)

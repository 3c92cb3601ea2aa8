"""The front of the DiT pool: takes slices, gives back streams of events.

`Pool` is what the servicer needs; `LocalPool` is a pool of one rank in this process, whose model
runs on a thread of its own, so the event loop always answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import (
    AbortedError,
    CancelledTaskError,
    ChituError,
    ComponentError,
    ConfigError,
    UnavailableError,
)
from chitu_diffusion.v1 import component_pb2, dit_pb2
from services.common.memory import process_memory
from services.common.placement import dtype_name
from services.dit.experts import component_names
from services.dit.jobs import Forward, ForwardDone, Slice
from services.dit.rank import Rank
from services.dit.stream import SliceStream

_MAX_KNOWN_TASKS = 10_000
ONE_RANK = dit_pb2.Layout(cfg_size=1, ulysses_degree=1, ring_degree=1)


class Pool(Protocol):
    """Ranks that run slices."""

    async def load(self) -> None:
        """Bring the ranks up with their weights."""

    def check(self) -> None:
        """Raise `UnavailableError` unless slices are taken."""

    def check_attention(self, attn_type: str, field: str) -> None:
        """Raise `ConfigError`, naming the request's field, unless the ranks can run this kernel."""

    def submit(self, job: Slice) -> SliceStream:
        """Queue a slice. Slices of one rank run one at a time, first come, first served.

        Raises:
            AbortedError: a newer attempt of the task is known.
            UnavailableError: the pool is loading or shutting down.
        """

    async def forward(self, job: Forward) -> ForwardDone:
        """Run one transformer once, in turn with the slices.

        Raises:
            UnavailableError: the pool is loading or shutting down.
        """

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
            ConfigError: the device, type or attention kernel cannot be had, or more than one rank
                is asked for.
        """
        for degree in dataclasses.fields(config.distributed):
            if getattr(config.distributed, degree.name) != 1:
                raise ConfigError(
                    f"distributed.{degree.name}={getattr(config.distributed, degree.name)}: "
                    "must be 1, this pool has one rank"
                )
        self.rank = Rank(config)
        self._config = config
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dit-rank")
        self._state = component_pb2.COMPONENT_STATE_LOADING
        self._failure = ""
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._active: set[SliceStream] = set()

    async def load(self) -> None:
        """Read the weights on the rank's thread."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, self.rank.load)
        except ChituError as error:
            self._state, self._failure = component_pb2.COMPONENT_STATE_FAILED, str(error)
            raise
        if self._state == component_pb2.COMPONENT_STATE_LOADING:  # else drained meanwhile
            self._state = component_pb2.COMPONENT_STATE_READY

    def check(self) -> None:
        """Raise `UnavailableError` unless slices are taken."""
        if self._state == component_pb2.COMPONENT_STATE_LOADING:
            raise UnavailableError("weights are loading")
        if self._state == component_pb2.COMPONENT_STATE_DRAINING:
            raise UnavailableError("the pool is shutting down")
        if self._state == component_pb2.COMPONENT_STATE_FAILED:
            raise UnavailableError(f"weights could not be loaded: {self._failure}")

    def check_attention(self, attn_type: str, field: str) -> None:
        """Raise `ConfigError` unless the rank can run this kernel."""
        self.rank.select_attention(attn_type, field)

    def submit(self, job: Slice) -> SliceStream:
        """Queue a slice behind the others."""
        self.check()
        self._take_attempt(job)
        stream = SliceStream(job)
        self._active.add(stream)
        future = self._thread.submit(self._work, stream)
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._active.discard, stream))
        return stream

    def _take_attempt(self, job: Slice) -> None:
        """Refuse an older attempt; end the slices that a newer one replaces."""
        newest = self._attempts.get(job.task_id, job.attempt)
        if job.attempt < newest:
            raise AbortedError(f"task {job.task_id!r}: attempt {job.attempt} is behind {newest}")
        self._attempts[job.task_id] = job.attempt
        self._attempts.move_to_end(job.task_id)
        if len(self._attempts) > _MAX_KNOWN_TASKS:
            self._attempts.popitem(last=False)
        for stream in self._active:
            if stream.job.task_id == job.task_id and stream.job.attempt < job.attempt:
                stream.cancel(AbortedError(f"attempt {job.attempt} has taken over"))

    def _work(self, stream: SliceStream) -> None:
        """Run a slice; on the rank's thread."""
        stream.started = time.perf_counter()
        error: ChituError | None = None
        try:
            if stream.cancelled:
                raise CancelledTaskError("cancelled before its turn")
            for event in self.rank.run(stream.job, lambda: stream.cancelled):
                stream.put(event)
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

    async def move(self, name: str, target: str) -> component_pb2.Component:
        """Give a transformer another home, on the rank's thread."""
        self.check()
        position = component_names(self._config.models).index(name)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self.rank.experts.settle, position, target)
        return self._component(position, name)

    def describe(self) -> dit_pb2.GetPoolResponse:
        """Tell the one rank."""
        rank = dit_pb2.PoolRank(
            host=socket.gethostname(), pid=os.getpid(), device=str(self.rank.device)
        )
        return dit_pb2.GetPoolResponse(
            layout=ONE_RANK, ranks=[rank], attn_type=self.rank.attention.name
        )

    def components(self) -> list[component_pb2.Component]:
        """Describe the transformers; counts are 0 until their weights are here."""
        names = component_names(self._config.models)
        return [self._component(position, name) for position, name in enumerate(names)]

    def _component(self, position: int, name: str) -> component_pb2.Component:
        experts = self.rank.experts
        loaded = position < len(experts)
        parameters = list(experts[position].parameters()) if loaded else []
        return component_pb2.Component(
            name=name,
            model=self._config.models.name,
            state=self._state,
            device=str(experts.where[position] if loaded else self.rank.home),
            dtype=dtype_name(self.rank.dtype),
            parameter_count=sum(parameter.numel() for parameter in parameters),
            weight_bytes=sum(parameter.nbytes for parameter in parameters),
            attn_type=self.rank.attention.name,
            detail=self._failure,
        )

    def memory(self) -> list[component_pb2.ProcessMemory]:
        """Count this process's memory."""
        return [process_memory("dit rank 0", self.rank.device)]

    def drain(self) -> None:
        """Take no more slices."""
        if self._state != component_pb2.COMPONENT_STATE_FAILED:
            self._state = component_pb2.COMPONENT_STATE_DRAINING

    async def close(self) -> None:
        """End what runs at its next step boundary and free everything."""
        self.drain()
        for stream in self._active:
            stream.cancel(UnavailableError("the pool is shutting down"))
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self.rank.release)
        await asyncio.to_thread(self._thread.shutdown)

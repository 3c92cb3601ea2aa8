"""A task's life: what it is, where it is, and what has happened to it.

A task has one owner, the runner; everything else reads. Its events are kept once, here: a watcher
is a cursor into them, so a slow one costs nothing and misses nothing.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from chitu_diffusion import __version__
from chitu_diffusion.errors import ChituError
from chitu_diffusion.v1 import dit_pb2, vae_pb2
from chitu_diffusion.v1 import generation_pb2 as pb
from chitu_diffusion.wire import Payload

QUEUED = pb.TASK_STATE_QUEUED
RUNNING = pb.TASK_STATE_RUNNING
DONE = pb.TASK_STATE_DONE
FAILED = pb.TASK_STATE_FAILED
CANCELLED = pb.TASK_STATE_CANCELLED
TERMINAL = frozenset({DONE, FAILED, CANCELLED})

ENCODE = pb.STAGE_ENCODE
DENOISE = pb.STAGE_DENOISE
DECODE = pb.STAGE_DECODE


@dataclass
class Work:
    """What a task carries from stage to stage. Dropped when it ends."""

    prompt_embeds: Payload | None = None
    negative_prompt_embeds: Payload | None = None
    latents: Payload | None = None
    next_step: int = 0
    """Denoise steps done."""
    solver_state: dit_pb2.SolverState | None = None
    """Set while the state is here, on its way from one pool to another."""
    state_tensors: tuple[Payload, ...] = ()
    """Latents and the solver's memory, with `solver_state`."""


@dataclass(eq=False)
class Task:
    """One video to generate."""

    params: pb.GenerationParams
    """Effective parameters: every field is set."""
    request_id: str | None = None
    """The caller's id for this request, if it gave one."""
    fingerprint: bytes = b""
    """Of the parameters as they were asked for; tells a repeated request from another one."""
    warnings: list[str] = field(default_factory=list)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    state: pb.TaskState.ValueType = QUEUED
    stage: pb.Stage.ValueType = ENCODE
    attempt: int = 1
    create_time: float = field(default_factory=time.time)
    """Seconds since the epoch, as the other times."""
    start_time: float | None = None
    end_time: float | None = None
    work: Work = field(default_factory=Work)
    result: vae_pb2.VideoInfo | None = None
    error: pb.TaskError | None = None
    report: pb.GenerationReport = field(default_factory=pb.GenerationReport)
    events: list[pb.GenerateEvent] = field(default_factory=list)
    cancel_reason: str | None = None
    """Set once, by whoever asked first."""
    watchers: int = 0
    """Open streams on this task."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    def __post_init__(self) -> None:
        self.report.params.CopyFrom(self.params)
        self.report.version = __version__
        self.report.warnings.extend(self.warnings)

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.state in TERMINAL

    def emit(self, **event: Any) -> None:
        """Append an event, e.g. `emit(encoding=pb.Encoding())`, and wake the watchers."""
        sequence = self.events[-1].sequence + 1 if self.events else 1
        message = pb.GenerateEvent(
            sequence=sequence, task_id=self.id, time=_timestamp(time.time()), **event
        )
        # Only the newest place in the queue is worth keeping.
        if "queued" in event and self.events and self.events[-1].HasField("queued"):
            self.events[-1] = message
        else:
            self.events.append(message)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def watch(self, after_sequence: int = 0) -> AsyncGenerator[pb.GenerateEvent, None]:
        """Events after `after_sequence`, then new ones as they come, until the last."""
        seen = after_sequence
        self.watchers += 1
        try:
            while True:
                changed = self._changed
                for event in self._after(seen):
                    seen = event.sequence
                    yield event
                if changed is not self._changed:  # more came while the reader took these
                    continue
                if self.ended:
                    return
                await changed.wait()
        finally:
            self.watchers -= 1

    def _after(self, sequence: int) -> list[pb.GenerateEvent]:
        newer = len(self.events)
        while newer and self.events[newer - 1].sequence > sequence:
            newer -= 1
        return self.events[newer:]

    def start(self) -> None:
        """The first stage begins."""
        if self.state == QUEUED:
            self.state = RUNNING
            self.start_time = time.time()
            self.report.queue_seconds = self.start_time - self.create_time

    def finish(self, result: vae_pb2.VideoInfo) -> None:
        """It has a result. No effect once it has ended, as for the next two."""
        if self._end(DONE):
            self.result = result
            self.emit(done=pb.Done(result=result, report=self.report))

    def fail(self, error: ChituError) -> None:
        """It ended with an error."""
        stage = self.stage
        if self._end(FAILED):
            self.error = pb.TaskError(
                reason=error.reason,
                message=str(error),
                code=error.code.value[0],
                retryable=error.retryable,
                stage=stage,
            )
            self.emit(failed=pb.Failed(error=self.error))

    def cancelled(self) -> None:
        """It was cancelled."""
        if self._end(CANCELLED):
            self.emit(cancelled=pb.Cancelled(reason=self.cancel_reason or "client"))

    def _end(self, state: pb.TaskState.ValueType) -> bool:
        if self.ended:
            return False
        self.state = state
        self.end_time = time.time()
        if self.start_time is not None:
            self.report.run_seconds = self.end_time - self.start_time
        self.work = Work()
        return True

    def to_proto(self, *, with_report: bool = True) -> pb.Task:
        """The task as it is now."""
        message = pb.Task(
            id=self.id,
            state=self.state,
            stage=self.stage,
            params=self.params,
            create_time=_timestamp(self.create_time),
            result=self.result,
            error=self.error,
        )
        if self.request_id is not None:
            message.request_id = self.request_id
        if self.start_time is not None:
            message.start_time.CopyFrom(_timestamp(self.start_time))
        if self.end_time is not None:
            message.end_time.CopyFrom(_timestamp(self.end_time))
        if with_report:
            message.report.CopyFrom(self.report)
            if self.events:
                message.last_event.CopyFrom(self.events[-1])
        return message


def _timestamp(seconds: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromNanoseconds(int(seconds * 1e9))
    return stamp

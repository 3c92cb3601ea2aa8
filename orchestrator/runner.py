"""Drives tasks: asks the scheduler whose turn it is and lets the generator take the step."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import secrets
from collections.abc import Callable

from chitu_diffusion.config.schema import ModelConfig
from chitu_diffusion.errors import (
    CancelledTaskError,
    ChituError,
    ComponentError,
    InvalidRequestError,
    PreconditionError,
    QueueFullError,
    UnavailableError,
)
from chitu_diffusion.request import GenerationRequest
from chitu_diffusion.v1 import generation_pb2 as pb
from orchestrator.generator import Generator
from orchestrator.scheduler import DiffusionScheduler
from orchestrator.store import TaskStore
from orchestrator.task import QUEUED, Task

log = logging.getLogger(__name__)

_MAX_REQUEST_ID_CHARS = 128
# Drawn seeds stay small enough to read out and type.
_SEED_BITS = 32


class TaskRunner:
    """Accepts tasks, runs them, cancels them."""

    def __init__(
        self,
        model: ModelConfig,
        attn_type: Callable[[], str],
        store: TaskStore,
        scheduler: DiffusionScheduler,
        generator: Generator,
        max_queued: int,
    ) -> None:
        """`attn_type` tells the back end that the DiT pool runs."""
        self._model = model
        self._attn_type = attn_type
        self._store = store
        self._scheduler = scheduler
        self._generator = generator
        self._max_queued = max_queued
        self._running: dict[str, asyncio.Task[None]] = {}
        self._accepting = True
        self._driving = False

    def submit(self, params: pb.GenerationParams, request_id: str | None = None) -> Task:
        """Check a request, record it and let it queue.

        Raises:
            InvalidRequestError, AlreadyExistsError, QueueFullError, UnavailableError: as
                GenerationService.Generate documents.
        """
        if not self._accepting:
            raise UnavailableError("the server is shutting down")
        request = GenerationRequest.from_proto(params)
        if request.model not in (None, self._model.name):
            raise InvalidRequestError.of(
                "params.model", f"{request.model!r}: must be one of {self._model.name!r}"
            )
        if request_id is not None and not 1 <= len(request_id) <= _MAX_REQUEST_ID_CHARS:
            raise InvalidRequestError.of(
                "request_id", f"{len(request_id)} characters: must have 1 to 128"
            )
        fingerprint = hashlib.sha256(params.SerializeToString(deterministic=True)).digest()
        existing = self._store.existing(request_id, fingerprint)
        if existing is not None:
            return existing
        resolved = request.resolve(
            self._model, seed=secrets.randbits(_SEED_BITS), attn_type=self._attn_type()
        )
        if self._scheduler.queue_length >= self._max_queued:
            raise QueueFullError(f"{self._max_queued} tasks are waiting: try again later")
        task = Task(
            resolved.to_proto(),
            request_id=request_id,
            fingerprint=fingerprint,
            warnings=_warnings(request, resolved),
        )
        self._store.add(task)
        self._scheduler.submit(task)
        task.emit(queued=pb.Queued(position=self._scheduler.queue_length - 1))
        self._advance()
        return task

    def drive(self) -> None:
        """Run tasks from now on. Before, they move only by `step`."""
        self._driving = True
        self._advance()

    @property
    def driving(self) -> bool:
        """Whether tasks run by themselves."""
        return self._driving

    async def step(self, task: Task) -> None:
        """Run a task's next stage, or slice, by hand; an error ends the task and is raised.

        Raises:
            PreconditionError: it has ended, or a step of it is running.
            CancelledTaskError: it was cancelled meanwhile.
            ChituError: as `Generator.generate_step`.
        """
        if task.ended or task.id in self._running:
            state = pb.TaskState.Name(task.state).removeprefix("TASK_STATE_")
            doing = state if task.ended else "in a step"
            raise PreconditionError(f"task {task.id} is {doing}: there is no step to run")
        self._scheduler.claim(task)
        step = self._begin(task)
        await asyncio.wait({step})  # its callback, added first, has run when this returns
        if step.cancelled():
            raise CancelledTaskError(f"task {task.id}: {task.cancel_reason}")
        step.result()

    def cancel(self, task: Task, reason: str) -> None:
        """Stop a task; no effect once it has ended."""
        if task.ended or task.cancel_reason is not None:
            return
        task.cancel_reason = reason
        running = self._running.get(task.id)
        if running is not None:
            running.cancel()
        else:
            task.cancelled()
            self._ended(task)
            self._advance()

    async def stop(self, *, cancel: bool) -> None:
        """Accept nothing more and wait until every task has ended.

        Args:
            cancel: cancel all tasks; otherwise they are finished first.
        """
        self._accepting = False
        if cancel:
            self._cancel_all()
        self.drive()
        while self._running:
            await asyncio.wait(self._running.values())
        self._cancel_all()  # what somebody took by hand and did not run

    def _cancel_all(self) -> None:
        for task in list(self._store):
            self.cancel(task, "shutdown")

    @property
    def running_count(self) -> int:
        """Tasks with a stage in progress."""
        return len(self._running)

    def _advance(self) -> None:
        """Start whatever may start, unless tasks are run by hand."""
        started = False
        while self._driving and (task_id := self._scheduler.schedule()) is not None:
            self._begin(self._store.get(task_id))
            started = True
        if started:
            self._tell_positions()

    def _begin(self, task: Task) -> asyncio.Task[None]:
        step = asyncio.create_task(self._generator.generate_step(task), name=f"task {task.id}")
        self._running[task.id] = step
        # A callback, since a coroutine that is cancelled before its first line runs no finally.
        step.add_done_callback(functools.partial(self._on_step_ended, task))
        return step

    def _on_step_ended(self, task: Task, step: asyncio.Task[None]) -> None:
        del self._running[task.id]
        self._scheduler.release(task)
        error = None if step.cancelled() else step.exception()
        if isinstance(error, ChituError):
            log.warning("task %s failed: %s", task.id, error)
            task.fail(error)
        elif error is not None:
            log.error("task %s failed", task.id, exc_info=error)
            task.fail(ComponentError(f"{type(error).__name__}: {error}"))
        elif step.cancelled() or task.cancel_reason is not None:
            task.cancelled()
        if task.ended:
            self._ended(task)
        else:
            self._scheduler.submit(task)
        self._advance()

    def _ended(self, task: Task) -> None:
        self._scheduler.remove(task)
        self._generator.forget(task)
        self._store.ended(task)

    def _tell_positions(self) -> None:
        for position, task_id in enumerate(self._scheduler.queue()):
            task = self._store.get(task_id)
            if task.watchers and task.state == QUEUED:
                task.emit(queued=pb.Queued(position=position))


def _warnings(request: GenerationRequest, resolved: GenerationRequest) -> list[str]:
    scales = (resolved.guidance_scale or 0, resolved.guidance_scale_high or 0)
    if request.negative_prompt and max(scales) <= 1:
        return ["negative_prompt has no effect at guidance_scale <= 1"]
    return []

"""The door for programs that hold a backend of their own: `DiffusionBackend` and its functions.

A backend is the core of the orchestrator with a blocking face. The class has the attributes of the
one live backend, so that `DiffusionBackend.vae` works anywhere in the program; before there is one,
and after it has terminated, they are empty. Importing this loads no model library.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar, cast

from chitu_diffusion import config as configuration
from chitu_diffusion import parallel
from chitu_diffusion.errors import (
    ChituError,
    InvalidRequestError,
    PreconditionError,
    UnavailableError,
    error_from,
)
from chitu_diffusion.launch import Embedded
from chitu_diffusion.mirror import Group, Mirrored, Single
from chitu_diffusion.parallel import ParallelGroups
from chitu_diffusion.request import GenerationRequest
from chitu_diffusion.v1 import component_pb2, dit_pb2
from orchestrator.core import BackendState
from orchestrator.handles import (
    DiffusionAttnBackend,
    DitModelHandle,
    FlexCacheManager,
    GeneratorHandle,
    MemoryReport,
    SchedulerHandle,
    TextEncoderHandle,
    VaeHandle,
    soon,
)
from orchestrator.task import Task

__all__ = [
    "BackendState",
    "DiffusionBackend",
    "MemoryReport",
    "chitu_generate",
    "chitu_init",
    "chitu_is_terminated",
    "chitu_start",
    "chitu_terminate",
]

T = TypeVar("T")

_LOGGERS = ("chitu_diffusion", "orchestrator", "services")


class DiffusionBackend(Single):
    """Text encoder, transformers, VAE, scheduler and generator of one model.

    One may live in a process. It drives the services over gRPC: those with a configured `address`
    where they are, the others in this process. Methods block and may be called from any thread.
    """

    current: ClassVar[DiffusionBackend | None] = None
    """The live backend, or the last one that lived."""
    _making: ClassVar[threading.Lock] = threading.Lock()

    model_pool: Mirrored[list[DitModelHandle]] = Mirrored(list)
    """The transformers: the only one, or [high noise, low noise]."""
    text_encoder: Mirrored[TextEncoderHandle | None] = Mirrored(lambda: None)
    vae: Mirrored[VaeHandle | None] = Mirrored(lambda: None)
    scheduler: Mirrored[SchedulerHandle | None] = Mirrored(lambda: None)
    generator: Mirrored[GeneratorHandle | None] = Mirrored(lambda: None)
    flexcache_manager: Mirrored[FlexCacheManager | None] = Mirrored(lambda: None)
    """None: every step is computed."""
    attn_backend: Mirrored[DiffusionAttnBackend | None] = Mirrored(lambda: None)
    cp_group, cfg_group, world_group = Group(), Group(), Group()

    def __init__(self, args: Any, logging_level: int | str | None = None) -> None:
        """Start or connect the components: Uninitialized -> Initialized.

        Args:
            args: the hydra configuration, or a checked `Config`.
            logging_level: level of this project's loggers, e.g. "DEBUG".

        Raises:
            ConfigError: a wrong configuration (a ValueError).
            CheckpointError: a checkpoint that is corrupt or does not fit (a ValueError).
            CheckpointNotFoundError: a missing checkpoint or file (a FileNotFoundError).
            OutOfMemoryError: it does not fit on the device (a RuntimeError).
            PreconditionError: another backend is alive in this process (a RuntimeError).
        """
        for name in _LOGGERS if logging_level is not None else ():
            logging.getLogger(name).setLevel(cast(Any, logging_level))
        config = configuration.check(args)
        with self._making:
            if self.current is not None and self.current.state is not BackendState.Terminated:
                raise PreconditionError(
                    f"a backend is {self.current.state.name} in this process: terminate it first"
                )
            self._system = Embedded(config, autostart=False)
            self._parts = _parts(self._system)
            type(self).current = self
        atexit.register(self.terminate, cancel=True)

    @property
    def address(self) -> str:
        """Where clients in this machine find it."""
        return self._system.address

    def start(self) -> None:
        """Take tasks: Initialized -> Running; no effect when running.

        They move by `step`, or `scheduler.schedule` and `generator.generate_step`; see `drive`.

        Raises:
            PreconditionError: it is terminated.
        """
        if self.state is BackendState.Terminated:
            raise PreconditionError("a backend that is Terminated cannot be started")
        self._on_loop(self._system.core.start)

    def drive(self) -> None:
        """Run tasks by itself from now on, as a server does, and take them from clients."""
        self._on_loop(lambda: self._system.core.runner.drive())

    def submit(self, request: GenerationRequest | None = None, **fields: Any) -> Task:
        """Queue a task.

        Args:
            request: what to generate.
            **fields: instead of it, its fields by name, e.g. `prompt="..."`.

        Raises:
            InvalidRequestError: names each field that is wrong.
            PreconditionError: not Running.
        """
        request = GenerationRequest(**fields) if request is None else request
        return self._on_loop(lambda: self._system.core.runner.submit(request.to_proto()))

    def task(self, task_id: str) -> Task:
        """The task of an id; `NotFoundError` if there is none."""
        return self._on_loop(lambda: self._system.core.store.get(task_id))

    def step(self) -> str | None:
        """Run one stage, or one slice, of the task whose turn it is.

        Returns:
            Its id; None if no task waits. A task that fails is told by its state and `error`.
        """
        task_id = SchedulerHandle(self._alive).schedule()
        if task_id is not None:
            with contextlib.suppress(ChituError):
                GeneratorHandle(self._alive).generate_step(task_id)
        return task_id

    def result(self, task: Task) -> bytes:
        """The video file of a task that is done.

        Raises:
            ChituError: the error that ended it.
            PreconditionError: it has no result yet.
        """
        if task.error is not None:
            raise error_from(task.error.reason, task.error.message)
        return self._alive.run(self._read(task))

    async def _read(self, task: Task) -> bytes:
        if task.result is None:
            raise PreconditionError(f"task {task.id} has no result")
        artifacts = self._system.core.artifacts
        return b"".join([data async for _, data in artifacts.read(task.id, 0)])

    def terminate(self, *, cancel: bool = False) -> None:
        """Finish or cancel all tasks, stop what was started here, free everything; idempotent.

        Args:
            cancel: cancel tasks that have not ended, instead of running them to their end.
        """
        with self._making:
            if not self._parts:
                return
            self._system.run(self._system.core.terminate(cancel=cancel))
            self._parts.clear()
            self._system.close()
        atexit.unregister(self.terminate)

    def offload_to_cpu(self, component: str) -> component_pb2.Component:
        """Move a component to host memory. `load_to_device` brings it back.

        Args:
            component: "text_encoder", "vae", "transformer" or "transformer_2".

        Returns:
            The component as it is now.

        Raises:
            NotFoundError: there is no such component.
        """
        return self._alive.run(self._system.core.move(component, "cpu"))

    def load_to_device(self, component: str) -> component_pb2.Component:
        """Move a component to the device it is configured for.

        Raises:
            NotFoundError: there is no such component.
            OutOfMemoryError: it does not fit; it stays where it was.
        """
        return self._alive.run(self._system.core.move(component, "device"))

    def memory_report(self) -> MemoryReport:
        """Memory of each process, once each, and where each component lives now."""
        components, processes = self._alive.run(self._system.core.describe())
        return MemoryReport(tuple(processes), tuple(components))

    @classmethod
    def get_cp_size(cls) -> int:
        """Context-parallel size: of this process's group, or else of the live backend's pool."""
        return cls._groups().cp_size

    @classmethod
    def get_cfg_size(cls) -> int:
        """Guidance-parallel size, as `get_cp_size`."""
        return cls._groups().cfg_size

    @classmethod
    def get_cp_rank(cls) -> int:
        """Place of this process in its context-parallel group; -1 when it is no rank."""
        return cls._groups().cp_rank

    @classmethod
    def get_cfg_rank(cls) -> int:
        """Place of this process in its guidance-parallel group; -1 when it is no rank."""
        return cls._groups().cfg_rank

    @classmethod
    def _groups(cls) -> ParallelGroups:
        """The groups of this process if it is a rank, else what the pool tells.

        Raises:
            PreconditionError: this process is no rank, and has no live backend.
        """
        groups = parallel.current()
        if groups is not None:
            return groups
        if cls.current is None or cls.current.state is BackendState.Terminated:
            raise PreconditionError("there is neither a live backend nor a rank in this process")
        system = cls.current._system
        return _reported(system.run(system.core.dit.pool()))

    @property
    def _alive(self) -> Embedded:
        if self.state is BackendState.Terminated:
            raise UnavailableError("the backend is terminated")
        return self._system

    def _on_loop(self, call: Callable[[], T]) -> T:
        return self._alive.run(soon(call))

    def parts(self) -> Mapping[str, Any]:
        """Values of the attributes that the class has too; none once it is terminated."""
        return self._parts

    def current_state(self) -> BackendState:
        """What `state` reads."""
        return self._system.core.state

    def enter(self, target: BackendState) -> None:
        """Make the transition to a state; what assigning `state` does.

        Raises:
            InvalidRequestError: not a state.
            PreconditionError: there is no way from here to there.
        """
        if not isinstance(target, BackendState):
            raise InvalidRequestError.of("state", f"{target!r}: must be a BackendState")
        if target is self.state:
            return
        if target is BackendState.Running:
            self.start()
        elif target is BackendState.Terminated:
            self.terminate()
        else:
            raise PreconditionError(f"{self.state.name} -> {target.name}: there is no way back")


def _parts(system: Embedded) -> dict[str, Any]:
    core = system.core
    pool = system.run(core.dit.pool())
    experts: dict[str, str | None] = {"transformer": None}
    if core.model.boundary_ratio is not None:
        experts = {"transformer": "high_noise", "transformer_2": "low_noise"}
    return {
        "model_pool": [DitModelHandle(system, *item) for item in experts.items()],
        "text_encoder": TextEncoderHandle(system, "text_encoder"),
        "vae": VaeHandle(system, "vae"),
        "scheduler": SchedulerHandle(system),
        "generator": GeneratorHandle(system),
        "attn_backend": DiffusionAttnBackend(pool.attn_type),
        "flexcache_manager": FlexCacheManager(system) if pool.HasField("flexcache") else None,
    }


def _reported(pool: dit_pb2.GetPoolResponse) -> ParallelGroups:
    """The pool's sizes, and this process's ranks in it: -1 when it is none of the pool's."""
    here = (socket.gethostname(), os.getpid())
    mine = next((rank for rank in pool.ranks if (rank.host, rank.pid) == here), None)
    return ParallelGroups(
        cp_size=pool.layout.ulysses_degree * pool.layout.ring_degree,
        cfg_size=pool.layout.cfg_size,
        cp_rank=-1 if mine is None else mine.cp_rank,
        cfg_rank=-1 if mine is None else mine.cfg_rank,
    )


def chitu_init(args: Any, logging_level: int | str | None = None) -> DiffusionBackend:
    """Make the backend: Uninitialized -> Initialized. Errors are those of `DiffusionBackend`."""
    return DiffusionBackend(args, logging_level)


def chitu_start() -> None:
    """Take tasks: Initialized -> Running; no effect when running."""
    _live().start()


def chitu_generate() -> str | None:
    """Run one stage, or one slice of denoise steps, of the task whose turn it is.

    Returns:
        The task's id; None if no task waits.
    """
    return _live().step()


def chitu_terminate(*, cancel: bool = False) -> None:
    """Finish or cancel all tasks and free everything: -> Terminated; idempotent."""
    if DiffusionBackend.current is not None:
        DiffusionBackend.current.terminate(cancel=cancel)


def chitu_is_terminated() -> bool:
    """Whether there was a backend and it has terminated."""
    return DiffusionBackend.state is BackendState.Terminated


def _live() -> DiffusionBackend:
    if DiffusionBackend.current is None:
        raise PreconditionError("there is no backend: call chitu_init first")
    return DiffusionBackend.current

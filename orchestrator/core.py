"""The core of the backend: components, scheduler, generator and the state they are in together.

It belongs to one event loop, is served by the orchestrator process, and is what `DiffusionBackend`
puts a blocking face on.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging

from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import (
    ChituError,
    DeadlineError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
)
from chitu_diffusion.memory import process_memory
from chitu_diffusion.v1 import component_pb2, dit_pb2
from orchestrator.artifacts import ArtifactStore
from orchestrator.components import Component, DitPool, TextEncoder, Vae
from orchestrator.generator import Generator
from orchestrator.placement import Placement
from orchestrator.runner import TaskRunner
from orchestrator.scheduler import DiffusionScheduler
from orchestrator.store import TaskStore
from orchestrator.task import DENOISE, Task

log = logging.getLogger(__name__)

_WARN_EVERY_S = 10.0


class BackendState(enum.Enum):
    """Uninitialized -> Initialized -> Running -> Terminated."""

    Uninitialized = 0
    Initialized = 1
    Running = 2
    Terminated = 3


class BackendCore:
    """Owns the components and the state machine."""

    def __init__(self, config: Config) -> None:
        services, settings = config.services, config.orchestrator
        self.model = config.models
        self.text_encoder = TextEncoder(services.encoder.address or services.encoder.listen)
        self.dit = DitPool(services.dit.address or services.dit.listen)
        """The DiT pool, or that of the high-noise expert."""
        low = services.dit.low_noise_address
        self.dits = (self.dit,) if low is None else (self.dit, DitPool(low))
        """All DiT pools, in the order of the experts."""
        self.vae = Vae(services.vae.address or services.vae.listen)
        self.artifacts = ArtifactStore(settings.results_url)
        self.store = TaskStore(settings.max_finished_tasks, self._on_delete)
        self.scheduler = DiffusionScheduler()
        self.generator = Generator(
            self.text_encoder, self.dits, self.vae, self.artifacts, settings.slice_steps
        )
        self._runner = TaskRunner(
            self.model,
            lambda: self.attn_type,
            self.store,
            self.scheduler,
            self.generator,
            settings.max_queued_tasks,
        )
        self._ranks_per_task = settings.ranks_per_task
        self._connect_timeout_s = settings.connect_timeout_s
        self.attn_type = ""
        """Attention back end of the DiT pool; known once it is connected."""
        self.state = BackendState.Uninitialized

    @property
    def components(self) -> tuple[Component, ...]:
        """The model hosts."""
        return (self.text_encoder, *self.dits, self.vae)

    @property
    def runner(self) -> TaskRunner:
        """The runner, once tasks are taken.

        Raises:
            PreconditionError: the backend is not started.
            UnavailableError: it is shut down.
        """
        if self.state is BackendState.Terminated:
            raise UnavailableError("the backend is shut down")
        if self.state is not BackendState.Running:
            raise PreconditionError(f"the backend is {self.state.name}: it takes no tasks yet")
        return self._runner

    async def connect(self) -> None:
        """Wait until every model host is ready: Uninitialized -> Initialized.

        Raises:
            DeadlineError: one is not within orchestrator.connect_timeout_s.
            PreconditionError: a DiT pool has no groups of orchestrator.ranks_per_task.
        """
        for component in self.components:
            await self._wait_for(component)
        pools = {dit: await dit.pool() for dit in self.dits}
        placements = {dit: Placement(self._ranks_per_task, pool) for dit, pool in pools.items()}
        self.generator.placements = placements
        self.scheduler.widen(DENOISE, sum(placement.places for placement in placements.values()))
        self.attn_type = pools[self.dit].attn_type
        self.state = BackendState.Initialized

    async def _wait_for(self, component: Component) -> None:
        waiting = asyncio.ensure_future(component.wait_ready())
        try:
            async with asyncio.timeout(self._connect_timeout_s or None):
                while not (await asyncio.wait({waiting}, timeout=_WARN_EVERY_S))[0]:
                    log.warning("still waiting for %s at %s", component.name, component.address)
        except TimeoutError:
            raise DeadlineError(
                f"{component.name} at {component.address} was not ready within "
                f"orchestrator.connect_timeout_s={self._connect_timeout_s:g}"
            ) from None
        finally:
            waiting.cancel()

    def start(self) -> None:
        """Take tasks: Initialized -> Running; no effect when running.

        Raises:
            PreconditionError: in any other state.
        """
        if self.state not in (BackendState.Initialized, BackendState.Running):
            raise PreconditionError(f"a backend that is {self.state.name} cannot be started")
        self.state = BackendState.Running

    async def terminate(self, *, cancel: bool) -> None:
        """Finish or cancel all tasks and let go of the components; no effect when terminated."""
        if self.state is BackendState.Terminated:
            return
        self.state = BackendState.Terminated
        await self._runner.stop(cancel=cancel)
        for component in self.components:
            await component.close()

    async def describe(
        self,
    ) -> tuple[list[component_pb2.Component], list[component_pb2.ProcessMemory]]:
        """Every component and every process; a host that does not answer is listed as failed."""
        parts: list[component_pb2.Component] = []
        memory = [process_memory("orchestrator")]
        answers = await asyncio.gather(
            *(component.describe() for component in self.components), return_exceptions=True
        )
        for component, answer in zip(self.components, answers, strict=True):
            if isinstance(answer, ChituError):
                parts.append(
                    component_pb2.Component(
                        name=component.name,
                        model=self.model.name,
                        state=component_pb2.COMPONENT_STATE_FAILED,
                        detail=str(answer),
                    )
                )
            elif isinstance(answer, BaseException):
                raise answer
            else:
                parts.extend(answer.components)
                memory.extend(answer.memory)
        return parts, _once_each(memory)

    async def pool(self) -> dit_pb2.GetPoolResponse:
        """The DiT pool's ranks and layout; empty when it does not answer."""
        try:
            return await self.dit.pool()
        except UnavailableError:
            return dit_pb2.GetPoolResponse()

    async def move(self, name: str, target: str) -> component_pb2.Component:
        """Move a component to "cpu" or back to its "device".

        Raises:
            NotFoundError: no host has a component of that name.
            InvalidRequestError, OutOfMemoryError, UnavailableError: as its host says.
        """
        known: list[str] = []
        for host in self.components:
            names = [part.name for part in (await host.describe()).components]
            if name in names:
                return await host.move(name, target)
            known += names
        raise NotFoundError(f"no component {name!r}: there are {', '.join(known)}")

    @property
    def running_count(self) -> int:
        """Tasks with a stage in progress."""
        return self._runner.running_count

    def _on_delete(self, task: Task) -> None:
        with contextlib.suppress(OSError):
            self.artifacts.delete(task.id)


def _once_each(memory: list[component_pb2.ProcessMemory]) -> list[component_pb2.ProcessMemory]:
    """One entry for each process, under the names of all that it hosts; the latest count wins."""
    merged: dict[tuple[str, int], component_pb2.ProcessMemory] = {}
    for entry in memory:
        key = (entry.host, entry.pid)
        names = [merged[key].process] if key in merged else []
        # Entries without accelerator memory come from services that do not use it.
        if key not in merged or entry.reserved_bytes >= merged[key].reserved_bytes:
            merged[key] = entry
        merged[key].process = ", ".join([*names, entry.process])
    return list(merged.values())

"""The orchestrator as a service process."""

from __future__ import annotations

import grpc.aio

from chitu_diffusion.config.schema import Config
from chitu_diffusion.rpc.server import Service
from chitu_diffusion.v1 import backend_pb2, backend_pb2_grpc, generation_pb2, generation_pb2_grpc
from orchestrator.core import BackendCore
from orchestrator.servicer import BackendServicer, GenerationServicer


class OrchestratorHost(Service):
    """Serves one backend."""

    name = "orchestrator"

    def __init__(self, config: Config, *, autostart: bool = True) -> None:
        """Make the core.

        Args:
            config: the checked configuration.
            autostart: take and run tasks once the model hosts are there; otherwise whoever holds
                the core does both.
        """
        self.core = BackendCore(config)
        self._autostart = autostart
        self._generation = GenerationServicer(self.core, config.orchestrator.max_watchers)

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Add both servicers."""
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self._generation, server)
        backend_pb2_grpc.add_BackendServiceServicer_to_server(BackendServicer(self.core), server)
        return [
            generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
            backend_pb2.DESCRIPTOR.services_by_name["BackendService"].full_name,
        ]

    async def load(self) -> None:
        """Wait for the model hosts, then take tasks."""
        await self.core.connect()
        if self._autostart:
            self.core.start()
            self.core.runner.drive()

    async def drain(self) -> None:
        """Cancel what runs: tasks live in this process."""
        await self.core.terminate(cancel=True)

    async def close(self) -> None:
        """Nothing is left to free after `drain`."""

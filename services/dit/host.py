"""The DiT pool as a service process."""

from __future__ import annotations

import grpc.aio

from chitu_diffusion.config.schema import Config
from chitu_diffusion.rpc.server import Service
from chitu_diffusion.v1 import component_pb2, component_pb2_grpc, dit_pb2, dit_pb2_grpc
from services.common.components import ComponentServicer
from services.dit.pool import LocalPool
from services.dit.servicer import DitServicer


class DitHost(Service):
    """The DiT service as a process."""

    name = "dit"

    def __init__(self, config: Config) -> None:
        """Resolve the placement.

        Raises:
            ConfigError: the device, type or attention kernel cannot be had.
        """
        self.pool = LocalPool(config)
        self._model = config.models

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Add both servicers."""
        dit_pb2_grpc.add_DitServiceServicer_to_server(DitServicer(self.pool, self._model), server)
        component_pb2_grpc.add_ComponentServiceServicer_to_server(
            ComponentServicer(self.pool), server
        )
        return [
            module.DESCRIPTOR.services_by_name[name].full_name
            for module, name in ((dit_pb2, "DitService"), (component_pb2, "ComponentService"))
        ]

    async def load(self) -> None:
        """Read the weights."""
        await self.pool.load()

    async def drain(self) -> None:
        """Take no more slices."""
        self.pool.drain()

    async def close(self) -> None:
        """End what runs and free everything."""
        await self.pool.close()

"""The DiT pool as a service process."""

from __future__ import annotations

import grpc.aio

from chitu_diffusion.config.schema import Config
from chitu_diffusion.rpc.server import Service
from chitu_diffusion.v1 import component_pb2, component_pb2_grpc, dit_pb2, dit_pb2_grpc
from services.common.components import ComponentServicer
from services.dit.parallel import configured
from services.dit.pool import LocalPool
from services.dit.ranks.front import RankPool
from services.dit.servicer import DitServicer


def make_pool(config: Config) -> LocalPool | RankPool:
    """A pool of as many ranks as are configured; a single one lives in this process.

    Raises:
        ConfigError: the device, type or attention kernel cannot be had, or too few devices.
    """
    world_size, _ = configured(config.distributed, config.models.transformer.num_heads)
    return LocalPool(config) if world_size == 1 else RankPool(config)


class DitHost(Service):
    """The DiT service as a process."""

    name = "dit"

    def __init__(self, config: Config) -> None:
        """Resolve the placement.

        Raises:
            ConfigError: the device, type or attention kernel cannot be had.
        """
        self.pool = make_pool(config)
        self._config = config

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Add both servicers."""
        dit_pb2_grpc.add_DitServiceServicer_to_server(DitServicer(self.pool, self._config), server)
        component_pb2_grpc.add_ComponentServiceServicer_to_server(
            ComponentServicer(self.pool), server
        )
        return [
            module.DESCRIPTOR.services_by_name[name].full_name
            for module, name in ((dit_pb2, "DitService"), (component_pb2, "ComponentService"))
        ]

    async def load(self) -> None:
        """Bring the ranks up."""
        if isinstance(self.pool, RankPool):
            self.pool.serving_changed = self.serving_changed
        await self.pool.load()

    async def drain(self) -> None:
        """Take no more slices."""
        self.pool.drain()

    async def close(self) -> None:
        """End what runs and free everything."""
        await self.pool.close()

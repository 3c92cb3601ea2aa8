from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from chitu_diffusion import config
from chitu_diffusion.client import AsyncClient
from chitu_diffusion.rpc.server import Server
from orchestrator.host import OrchestratorHost
from tests.orchestrator.stand_ins import Script, StandInDit, StandInEncoder, StandInVae


@dataclass
class System:
    """An orchestrator with stand-in hosts."""

    script: Script
    client: AsyncClient
    orchestrator: OrchestratorHost
    address: str
    servers: dict[str, Server]


@pytest.fixture
async def start_system(socket_dir) -> Callable:
    """Starts a system; hydra overrides as arguments."""
    async with AsyncExitStack() as stack:

        async def start(*overrides: str, script: Script | None = None) -> System:
            script = script or Script()
            names = ("encoder", "dit", "vae")
            sockets = [f"services.{n}.listen=unix:{socket_dir}/{n}" for n in names]
            results = f"orchestrator.results_url={socket_dir}/results"
            settings = config.load([*sockets, results, *overrides])
            servers = {}
            for host in (StandInEncoder(script), StandInDit(script), StandInVae(script)):
                server = Server(host, f"unix:{socket_dir}/{host.name}")
                await server.start()
                stack.push_async_callback(server.stop, 0)
                servers[host.name] = server
            orchestrator = OrchestratorHost(settings)
            server = Server(orchestrator, "127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, 0)
            servers["orchestrator"] = server
            await server.load()
            client = await stack.enter_async_context(AsyncClient(server.address))
            return System(script, client, orchestrator, server.address, servers)

        yield start

"""Serving: one runner for all four services.

`Server` binds, answers health and reflection at once, loads, reports SERVING, and stops in order.
`run` is the whole `__main__` of a service process.
"""

from __future__ import annotations

import abc
import asyncio
import json
import logging
import os
import pkgutil
import signal
import sys
from collections.abc import Callable, Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from chitu_diffusion import config as configuration
from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import ChituError, ConfigError
from chitu_diffusion.rpc.interceptor import ErrorInterceptor
from chitu_diffusion.rpc.options import SERVER_OPTIONS

log = logging.getLogger(__name__)

PARENT_PID = "CHITU_PARENT_PID"
"""Environment variable: the process that must stay alive; when it is gone the service stops."""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Service(abc.ABC):
    """What a room gives to the runner."""

    name: str
    """Section of the configuration: "encoder", "dit", "vae" or "orchestrator"."""

    @abc.abstractmethod
    def register(self, server: grpc.aio.Server) -> list[str]:
        """Add the servicers; returns their full names, for health and reflection."""

    @abc.abstractmethod
    async def load(self) -> None:
        """Make ready to work. Heavy parts run in a thread: the server answers health meanwhile."""

    serving_changed: Callable[[bool], None] = staticmethod(lambda serving: None)
    """Set by the server: tell it when, behind `load`, the service can work no more, or again."""

    async def drain(self) -> None:  # noqa: B027 - nothing to do for most
        """Take no new work and end what would never end by itself, such as event streams."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Free everything. Called once, after the last call has ended."""


class Server:
    """A service on the wire."""

    def __init__(self, service: Service, listen: str) -> None:
        self._service = service
        self._listen = listen
        self._interceptor = ErrorInterceptor()
        self._server = grpc.aio.server(interceptors=[self._interceptor], options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._names: list[str] = []
        self._changes: set[asyncio.Future[None]] = set()
        self.address = listen
        """Where clients find it; differs from `listen` for port 0."""

    async def start(self) -> None:
        """Bind and answer health (process SERVING, service NOT_SERVING) and reflection.

        Raises:
            ConfigError: the address is taken, or not one of this machine's.
        """
        self._names = self._service.register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server
        )
        self.address = bind(self._server, self._listen, f"{self._service.name}: listen")
        await self._server.start()
        await self._health.set("", _SERVING)
        await self._set_serving(False)
        log.info("%s listens on %s", self._service.name, self.address)

    async def load(self) -> None:
        """Load the service, then report SERVING."""
        self._service.serving_changed = self._on_serving
        await self._service.load()
        await self._set_serving(True)
        log.info("%s is serving", self._service.name)

    def _on_serving(self, serving: bool) -> None:
        log.info("%s is %s", self._service.name, "serving" if serving else "not serving")
        change = asyncio.ensure_future(self._set_serving(serving))
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, refuse new calls, give running ones `grace_s`, free everything."""
        await self._set_serving(False)
        await self._service.drain()
        await self._server.stop(grace_s)
        # grpc.aio returns before the handlers that it cancelled have run their finally blocks.
        await self._interceptor.wait_idle(timeout_s=5.0)
        await self._service.close()

    async def _set_serving(self, serving: bool) -> None:
        for name in self._names:
            await self._health.set(name, _SERVING if serving else _NOT_SERVING)


def bind(server: grpc.aio.Server, listen: str, what: str) -> str:
    """Bind a server; returns where clients find it, which differs from `listen` for port 0.

    Args:
        server: not started yet.
        listen: host:port or unix:PATH.
        what: for messages.

    Raises:
        ConfigError: the address is taken, or not one of this machine's.
    """
    try:
        bound = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise ConfigError(
            f"{what}={listen!r}: cannot listen there: the address is in use or not ours"
        ) from error
    return listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{bound}"


def run(service: str, argv: Sequence[str] | None = None) -> int:
    """Run one service as a process until SIGTERM or SIGINT; a second signal stops at once.

    When bound, one JSON line on standard output tells the address; the log goes to standard error.

    Args:
        service: where its class is, as "module:name". Imported once the configuration is known to
            be right: a room's libraries take seconds.
        argv: hydra overrides, by default those of the command line.

    Returns:
        Exit code: 0 after a requested stop, 1 when loading failed, 2 for a wrong configuration.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        config = configuration.load(arguments)
        if PARENT_PID not in os.environ:  # else whoever started this process has told it
            log.info("configuration:\n%s", configuration.to_yaml(config))
        return asyncio.run(_run(pkgutil.resolve_name(service), config))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ChituError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


async def _run(make_service: Callable[[Config], Service], config: Config) -> int:
    service = make_service(config)  # inside the event loop, to which its channels belong
    stop, now = asyncio.Event(), asyncio.Event()
    _on_signals(stop, now)
    server = Server(service, listen_address(config, service.name))
    await server.start()
    print(json.dumps({"service": service.name, "address": server.address}), flush=True)
    loading = asyncio.create_task(server.load())
    stopping = asyncio.create_task(stop.wait())
    watching = asyncio.create_task(_watch_parent(stop, now))
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if loading.done():
            loading.result()
            await stop.wait()
        else:  # a thread that reads weights cannot be interrupted, so leave without it
            log.info("%s: stopped while loading", service.name)
            os._exit(0)
        ending = asyncio.create_task(server.stop(config.services.stop_grace_s))
        hurry = asyncio.create_task(now.wait())
        await asyncio.wait({ending, hurry}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            await server.stop(0)
        hurry.cancel()
        return 0
    finally:
        for task in (stopping, watching):
            task.cancel()
        if loading.done() and loading.exception() is not None:
            await server.stop(0)


def listen_address(config: Config, name: str) -> str:
    """The configured `listen` of a service."""
    section = config.orchestrator if name == "orchestrator" else getattr(config.services, name)
    listen: str = section.listen
    return listen


def _on_signals(stop: asyncio.Event, now: asyncio.Event) -> None:
    def on_signal() -> None:
        (now if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)


async def _watch_parent(stop: asyncio.Event, now: asyncio.Event) -> None:
    parent = os.environ.get(PARENT_PID)
    if parent is None:
        return
    while os.getppid() == int(parent):  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.5)
    log.warning("the process that started this one is gone: stopping")
    stop.set()
    now.set()  # running calls were that process's too

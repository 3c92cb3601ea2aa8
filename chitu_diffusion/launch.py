"""The composition root: starts all four services on this machine.

`Embedded` runs them in this process, on unix sockets: quick to start, gone with the process.
`serve` runs each as a process of its own. Both start the servicers that a cluster runs; services
whose `address` is configured are used where they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import ComponentError
from chitu_diffusion.loop import LoopThread
from chitu_diffusion.rpc.server import PARENT_PID, Server, Service, listen_address

if TYPE_CHECKING:
    from orchestrator.core import BackendCore

log = logging.getLogger(__name__)

T = TypeVar("T")
MODEL_HOSTS = ("encoder", "dit", "vae")
_STOP_TIMEOUT_S = 30.0


def room(name: str) -> Callable[[Config], Service]:
    """The service of a room. Importing a room loads its libraries, so this happens on demand."""
    if name == "orchestrator":
        from orchestrator.host import OrchestratorHost

        return OrchestratorHost
    if name == "encoder":
        from services.encoder.host import EncoderHost

        return EncoderHost
    if name == "dit":
        from services.dit.host import DitHost

        return DitHost
    from services.vae.host import VaeHost

    return VaeHost


class Embedded:
    """The system in this process: an event loop on a thread, the services on unix sockets."""

    def __init__(
        self,
        config: Config,
        on_stage: Callable[[str], None] = log.info,
        *,
        autostart: bool = True,
    ) -> None:
        """Start, and wait until everything is loaded.

        Args:
            config: results go where it says; its listen addresses are not used.
            on_stage: told what start-up is doing.
            autostart: take and run tasks at once; otherwise the core stays Initialized.

        Raises:
            ChituError: a service cannot start. Nothing is left running.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="chitu-", ignore_cleanup_errors=True)
        self._config = _on_unix_sockets(config, Path(self._folder.name))
        self._servers: list[Server] = []
        self._loop = LoopThread("chitu-embedded")
        try:
            self._loop.run(self._start(on_stage, autostart))
        except BaseException:
            # Not waited for: threads that read weights cannot be stopped, and may take minutes.
            self._loop.submit(self._abandon())
            raise
        self.address = self._servers[-1].address
        """Of the orchestrator."""

    core: BackendCore
    """What the orchestrator serves. Belongs to the event loop: use it inside of `run`."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the system's event loop to its end."""
        return self._loop.run(work)

    def close(self) -> None:
        """Stop the services in order, and free everything."""
        self._loop.run(self._stop())
        self._loop.close()
        self._folder.cleanup()

    async def _start(self, on_stage: Callable[[str], None], autostart: bool) -> None:
        from orchestrator.host import OrchestratorHost

        for name in _local_hosts(self._config):
            on_stage(f"starting {name}")
            make_service = await asyncio.to_thread(room, name)
            await self._serve(make_service(self._config))
        host = OrchestratorHost(self._config, autostart=autostart)
        self.core = host.core
        await self._serve(host)
        on_stage("loading weights")
        try:
            async with asyncio.TaskGroup() as loading:
                for server in self._servers:
                    loading.create_task(server.load())
        except* Exception as errors:
            raise errors.exceptions[0] from None

    async def _serve(self, service: Service) -> None:
        server = Server(service, listen_address(self._config, service.name))
        self._servers.append(server)
        await server.start()

    async def _abandon(self) -> None:
        await self._stop()
        self._folder.cleanup()
        asyncio.get_running_loop().stop()

    async def _stop(self) -> None:
        for server in reversed(self._servers):
            await server.stop(grace_s=1.0)


@contextlib.contextmanager
def embedded(config: Config, on_stage: Callable[[str], None] = log.info) -> Iterator[str]:
    """Run the system in this process for a while; gives the orchestrator's address.

    Raises:
        ChituError: a service cannot start. Nothing is left running.
    """
    system = Embedded(config, on_stage)
    try:
        yield system.address
    finally:
        system.close()


def _on_unix_sockets(config: Config, folder: Path) -> Config:
    def moved(name: str) -> str:
        return f"unix:{folder / name}"

    services = dataclasses.replace(
        config.services,
        **{
            name: dataclasses.replace(getattr(config.services, name), listen=moved(name))
            for name in MODEL_HOSTS
        },
    )
    orchestrator = dataclasses.replace(config.orchestrator, listen=moved("orchestrator"))
    return dataclasses.replace(config, services=services, orchestrator=orchestrator)


def _local_hosts(config: Config) -> list[str]:
    """Model hosts that are not configured to be somewhere else."""
    return [name for name in MODEL_HOSTS if getattr(config.services, name).address is None]


def serve(
    config: Config, overrides: Sequence[str], on_ready: Callable[[dict[str, str]], None]
) -> int:
    """Run each service as a process until SIGTERM or SIGINT, or until one of them ends.

    Args:
        config: the checked configuration.
        overrides: the hydra overrides it was made from; each process gets them.
        on_ready: told every service's address once the orchestrator takes tasks.

    Returns:
        Exit code: 0 after a requested stop, 1 when a service ended by itself.
    """
    stopping = threading.Event()
    previous = {
        number: signal.signal(number, lambda *_: stopping.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    children: dict[str, subprocess.Popen[str]] = {}
    try:
        addresses = {name: getattr(config.services, name).address or "" for name in MODEL_HOSTS}
        for name in _local_hosts(config):
            children[name] = _start(f"services.{name}", overrides)
        for name, child in children.items():
            addresses[name] = _address(name, child)
        located = [f"services.{name}.address='{addresses[name]}'" for name in MODEL_HOSTS]
        children["orchestrator"] = _start("orchestrator", [*overrides, *located])
        addresses["orchestrator"] = _address("orchestrator", children["orchestrator"])
        if _wait_ready(addresses["orchestrator"], children, stopping):
            on_ready(addresses)
        while not stopping.wait(0.2):
            ended = _ended(children)
            if ended:
                log.error("%s ended with code %s: stopping", ended, children[ended].returncode)
                return 1
        return 0
    except ComponentError as error:
        log.error("%s", error)
        return 1
    finally:
        _stop(children)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _start(module: str, overrides: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *overrides],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, PARENT_PID: str(os.getpid())},
        # Ctrl-C in a terminal goes to the whole group; the children are stopped in order instead.
        start_new_session=True,
    )


def _address(name: str, child: subprocess.Popen[str]) -> str:
    """The address in the line that a service prints once it is bound."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise ComponentError(f"{name} ended with code {child.wait()} before it was bound")
    address: str = json.loads(line)["address"]
    return address


def _wait_ready(
    address: str, children: dict[str, subprocess.Popen[str]], stopping: threading.Event
) -> bool:
    from chitu_diffusion.rpc.channel import is_serving

    while not stopping.is_set():
        ended = _ended(children)
        if ended:
            raise ComponentError(f"{ended} ended with code {children[ended].returncode}")
        if is_serving(address, "chitu_diffusion.v1.GenerationService", timeout_s=0.5):
            return True
        stopping.wait(0.1)
    return False


def _ended(children: dict[str, subprocess.Popen[str]]) -> str | None:
    return next((name for name, child in children.items() if child.poll() is not None), None)


def _stop(children: dict[str, subprocess.Popen[str]]) -> None:
    """The orchestrator first, so that it can end its calls; TERM, then KILL, each reaped."""
    for child in reversed(children.values()):
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_STOP_TIMEOUT_S)
        if child.poll() is None:
            child.kill()
            child.wait()
        if child.stdout is not None:
            child.stdout.close()

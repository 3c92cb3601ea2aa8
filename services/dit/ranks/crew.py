"""The ranks of a pool as processes: started, joined, watched, and started again."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import grpc.aio

from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import (
    AbortedError,
    ChituError,
    ComponentError,
    PreconditionError,
    UnavailableError,
    error_from,
)
from chitu_diffusion.rpc.interceptor import ErrorInterceptor
from chitu_diffusion.rpc.options import SERVER_OPTIONS
from chitu_diffusion.rpc.server import bind
from chitu_diffusion.v1 import rank_pb2, rank_pb2_grpc
from services.dit.ranks import SECRET
from services.dit.ranks.launcher import Launcher
from services.dit.ranks.members import Member, RankServicer

log = logging.getLogger(__name__)

_SILENCE_S, _LOADING_SILENCE_S = 5.0, 60.0
"""Without a sign of life a rank is lost; reading weights can hold up its heartbeat."""
_GONE_S = 2.0
"""For dismissed ranks to end. torchrun would wait half a minute for one that is stopped."""
_START_S = 300.0
"""For started ranks to join."""
_PROGRESS_EVERY_S = 10.0


class Crew:
    """All ranks of a pool."""

    def __init__(
        self,
        config: Config,
        world_size: int,
        on_request: Callable[[Member, rank_pb2.AttachRequest], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Start nothing yet.

        Args:
            config: of the pool.
            world_size: number of ranks.
            on_request: takes replies and ends of jobs.
            on_lost: told why, when a rank that had loaded is lost.
        """
        self.members: dict[int, Member] = {}
        """By number."""
        self._config, self._world_size = config, world_size
        self._on_request, self._on_lost = on_request, on_lost
        self._folder = tempfile.TemporaryDirectory(prefix="chitu-pool-")
        self._secret = os.environ.get(SECRET) or secrets.token_hex(32)
        self._interceptor = ErrorInterceptor()
        self._server = grpc.aio.server(interceptors=[self._interceptor], options=SERVER_OPTIONS)
        self._launcher: Launcher | None = None
        self._retired: set[tuple[str, int]] = set()
        self._changed = asyncio.Event()

    async def open(self) -> None:
        """Listen for ranks.

        Raises:
            ConfigError: the address is taken, or not one of this host's.
        """
        dit = self._config.services.dit
        private = f"unix:{Path(self._folder.name) / 'ranks'}"
        rank_pb2_grpc.add_RankServiceServicer_to_server(
            RankServicer(self, self._secret), self._server
        )
        bound = bind(self._server, dit.ranks_listen or private, "services.dit.ranks_listen")
        await self._server.start()
        address = dit.ranks_address or bound
        self._launcher = Launcher(self._config, Path(self._folder.name), address, self._secret)

    async def bring_up(self) -> None:
        """Start the ranks if nobody has, and wait until all have loaded.

        Raises:
            ChituError: one could not start.
        """
        assert self._launcher is not None, "call open first"
        if not self._launcher.running:
            self._launcher.start()
        began, told = time.monotonic(), time.monotonic()
        while not self._all_loaded():
            self._changed.clear()
            if self._launcher.running:
                await _wait(self._changed, 0.2)
            self._check_start(began)
            if time.monotonic() - told > _PROGRESS_EVERY_S:
                told = time.monotonic()
                log.info("%s", self._progress())

    def _all_loaded(self) -> bool:
        loaded = [member.loaded for member in self.members.values()]
        return len(loaded) == self._world_size and all(loaded)

    def _check_start(self, began: float) -> None:
        assert self._launcher is not None
        for member in self.members.values():
            if member.failure is not None:
                raise _error(member, member.failure)
        code = self._launcher.ended()
        if code is not None:
            raise ComponentError(f"the ranks ended with code {code} before they had loaded")
        if len(self.members) < self._world_size and time.monotonic() - began > _START_S:
            raise UnavailableError(f"{self._progress()} after {_START_S:g} s")
        silent = self._silent(_LOADING_SILENCE_S)
        if silent is not None:
            raise UnavailableError(f"{silent} does not answer")

    def _progress(self) -> str:
        loaded = sum(member.loaded for member in self.members.values())
        return f"{len(self.members)} of {self._world_size} ranks have joined, {loaded} have loaded"

    def check_alive(self) -> None:
        """Notice ranks that do not answer. Call it often, while all have loaded."""
        silent = self._silent(_SILENCE_S)
        if silent is not None:
            self._on_lost(f"{silent} does not answer")

    def _silent(self, limit_s: float) -> Member | None:
        now = time.monotonic()
        return next((m for m in self.members.values() if now - m.last_seen > limit_s), None)

    async def retire(self) -> None:
        """End all ranks; torchrun starts them again, or is ended as well."""
        leaving = list(self.members.values())
        self._retired = {(member.host, member.pid) for member in leaving}
        self.members.clear()
        for member in leaving:
            member.dismiss(restart=True)
        try:
            async with asyncio.timeout(_GONE_S):
                for member in leaving:
                    await member.gone.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """End torchrun on this host and all ranks there, at once."""
        if self._launcher is not None:
            await self._launcher.kill()

    async def close(self) -> None:
        """End all ranks for good."""
        for member in list(self.members.values()):
            member.dismiss(restart=False)
        if self._launcher is not None:
            await self._launcher.stop()
        await self._server.stop(0)
        await self._interceptor.wait_idle(timeout_s=5.0)
        self._folder.cleanup()

    def joined(self, hello: rank_pb2.Hello) -> Member:
        """Take a rank in.

        Raises:
            PreconditionError: its number is outside the pool, or another one's.
            AbortedError: it has been dismissed.
        """
        member = Member(hello)
        if not 0 <= hello.rank < self._world_size:
            raise PreconditionError(f"{member}: the pool has ranks 0 to {self._world_size - 1}")
        if (hello.host, hello.pid) in self._retired:
            raise AbortedError(f"{member} has been dismissed")
        if hello.rank in self.members:
            raise PreconditionError(f"{member}: {self.members[hello.rank]} is there already")
        self.members[hello.rank] = member
        self._changed.set()
        log.info("%s has joined", member)
        return member

    def heard(self, member: Member, request: rank_pb2.AttachRequest) -> None:
        """Take what a rank says."""
        kind = request.WhichOneof("request")
        if kind == "alive":
            member.heard(request.alive)
        elif kind == "loaded":
            member.heard(request.loaded)
            member.loaded = True
            self._changed.set()
        elif kind == "failed":
            member.failure = request.failed
            self._changed.set()
        elif self.members.get(member.rank) is member:
            self._on_request(member, request)

    def left(self, member: Member) -> None:
        """Do without a rank whose call has ended."""
        if self.members.get(member.rank) is member:
            del self.members[member.rank]
            self._changed.set()
            log.warning("%s has left", member)
            if member.loaded:
                self._on_lost(f"{member} has ended")


def _error(member: Member, failure: rank_pb2.Failure) -> ChituError:
    return error_from(failure.reason, f"rank {member.rank}: {failure.message}")


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass

"""The front's end of the calls of its ranks."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol, TypeAlias

import grpc

from chitu_diffusion.errors import ChituError, InvalidRequestError
from chitu_diffusion.v1 import rank_pb2, rank_pb2_grpc

log = logging.getLogger(__name__)

_Messages: TypeAlias = Iterable[rank_pb2.AttachResponse]


class Member:
    """A rank that has joined."""

    def __init__(self, hello: rank_pb2.Hello) -> None:
        self.rank, self.host, self.pid = hello.rank, hello.host, hello.pid
        self.status = rank_pb2.RankStatus()
        """What it told when it had loaded, kept up to date."""
        self.loaded = False
        self.failure: rank_pb2.Failure | None = None
        """Why it could not start."""
        self.job: int | None = None
        """Number of the job that it does."""
        self.last_seen = time.monotonic()
        self.gone = asyncio.Event()
        """Its call has ended."""
        self._outgoing: asyncio.Queue[_Messages | None] = asyncio.Queue()

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"

    def send(self, messages: _Messages) -> None:
        """Send messages, made one at a time as they go out."""
        self._outgoing.put_nowait(messages)

    def dismiss(self, *, restart: bool) -> None:
        """Tell it to end its process; its call ends with that."""
        self.send([rank_pb2.AttachResponse(leave=rank_pb2.Leave(restart=restart))])

    def hang_up(self) -> None:
        """End the call behind what is to be sent."""
        self._outgoing.put_nowait(None)

    async def outgoing(self) -> AsyncIterator[rank_pb2.AttachResponse]:
        """What is to be sent, until the end of the call."""
        while (messages := await self._outgoing.get()) is not None:
            for message in messages:
                yield message

    def heard(self, status: rank_pb2.RankStatus) -> None:
        """Note how it is."""
        if status.components:
            del self.status.components[:]
        self.status.MergeFrom(status)


class Head(Protocol):
    """Who the ranks belong to."""

    def joined(self, hello: rank_pb2.Hello) -> Member:
        """Take a rank in; `PreconditionError` if it does not belong here."""

    def heard(self, member: Member, request: rank_pb2.AttachRequest) -> None:
        """Take what a rank says."""

    def left(self, member: Member) -> None:
        """Do without a rank whose call has ended."""


class RankServicer(rank_pb2_grpc.RankServiceServicer):
    """Attach."""

    def __init__(self, head: Head, secret: str) -> None:
        self._head, self._secret = head, f"Bearer {secret}"

    async def Attach(
        self, requests: AsyncIterator[rank_pb2.AttachRequest], context: Any
    ) -> AsyncIterator[rank_pb2.AttachResponse]:
        """Speak with a rank until one of both ends the call."""
        metadata = dict(context.invocation_metadata())
        given = metadata.get("authorization", "")
        if not hmac.compare_digest(str(given).encode(), self._secret.encode()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the pool's secret is wrong")
        member = self._head.joined(await _hello(requests))
        reading = asyncio.create_task(self._read(member, requests))
        try:
            async for message in member.outgoing():
                yield message
        finally:
            reading.cancel()
            member.gone.set()
            self._head.left(member)

    async def _read(self, member: Member, requests: AsyncIterator[rank_pb2.AttachRequest]) -> None:
        try:
            with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
                async for request in requests:
                    member.last_seen = time.monotonic()
                    self._head.heard(member, request)
        except ChituError:
            log.exception("%s sent what cannot be", member)
        finally:
            member.hang_up()


async def _hello(requests: AsyncIterator[rank_pb2.AttachRequest]) -> rank_pb2.Hello:
    async for request in requests:
        if request.WhichOneof("request") == "hello":
            return request.hello
        break
    raise InvalidRequestError.of("hello", "must be the first message")

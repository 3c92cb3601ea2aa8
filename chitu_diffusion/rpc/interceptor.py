"""Turns what a handler raises into the status that the error table names."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from chitu_diffusion.errors import (
    ChituError,
    ComponentError,
    InvalidRequestError,
    UnsupportedError,
    to_status,
)
from chitu_diffusion.rpc.malformed import parse_error

log = logging.getLogger(__name__)

_DRAIN_S = 5.0


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler: `ChituError` becomes its status, anything else INTERNAL and a log entry.

    `asyncio.CancelledError` passes through: swallowing it leaks the call.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def wait_idle(self, timeout_s: float) -> None:
        """Wait until no handler runs, at most `timeout_s`."""
        running = self._running - {asyncio.current_task()}
        if running:
            await asyncio.wait(running, timeout=timeout_s)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Called by gRPC for each call."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        shape = (
            f"{'stream' if handler.request_streaming else 'unary'}_"
            f"{'stream' if handler.response_streaming else 'unary'}"
        )
        guard = self._guard_stream if handler.response_streaming else self._guard_unary
        make = getattr(grpc, f"{shape}_rpc_method_handler")
        return make(
            guard(getattr(handler, shape), handler_call_details.method),
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _enter(self) -> None:
        task = asyncio.current_task()
        if task is not None and task not in self._running:
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _guard_unary(self, inner: Callable[..., Any], method: str) -> Callable[..., Any]:
        async def guarded(request: Any, context: Any) -> Any:
            self._enter()
            try:
                result = inner(_checked(request), context)
                return await result if inspect.isawaitable(result) else result
            except Exception as error:
                await _drain(request)
                return await _abort(error, context, method)

        return guarded

    def _guard_stream(self, inner: Callable[..., Any], method: str) -> Callable[..., Any]:
        async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
            self._enter()
            try:
                responses = inner(_checked(request), context)
                if inspect.isawaitable(responses):  # it writes to the context by itself
                    await responses
                    return
                try:
                    async for response in responses:
                        yield response
                finally:
                    await responses.aclose()
            except Exception as error:
                await _drain(request)
                await _abort(error, context, method)

        return guarded


def _tolerant(deserialise: Any) -> Callable[[bytes], Any]:
    """Let a message that cannot be parsed reach the handler's guard, as the error it is."""

    def parse(data: bytes) -> Any:
        try:
            return deserialise(data)
        except DecodeError:
            return parse_error(data, deserialise.__self__)

    return parse


def _checked(request: Any) -> Any:
    """The request, or a stream of them, once it is known to be well formed."""
    if isinstance(request, InvalidRequestError):
        raise request
    return _checked_stream(request) if hasattr(request, "__aiter__") else request


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


async def _drain(request: Any) -> None:
    """Take what the caller still sends, for a while, before an error leaves.

    grpcio's asyncio client loses a status that comes while it writes: it tells INTERNAL instead.
    """
    if hasattr(request, "__aiter__"):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                async for _ in request:
                    pass


async def _abort(error: Exception, context: Any, method: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if type(error) is NotImplementedError:  # what the generated servicers raise
        error = UnsupportedError(f"{method} is not offered here")
    if not isinstance(error, ChituError):
        log.exception("%s raised", method)
        error = ComponentError(f"{type(error).__name__}: {error}")
    status: Any = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)

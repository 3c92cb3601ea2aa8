"""The Python client, sync and async, over the same gRPC door as every other client.

    with Client("127.0.0.1:50050") as client:
        result = client.generate("a red circle moving left on a black background", seed=7)
        Path("out.mp4").write_bytes(result.data)

Wrong requests raise `InvalidRequestError` (a `ValueError`), a failed task the error it failed with.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from chitu_diffusion.errors import (
    CancelledTaskError,
    DataLossError,
    UnavailableError,
    error_from,
    from_rpc_error,
)
from chitu_diffusion.request import GenerationRequest
from chitu_diffusion.rpc.channel import dial, dial_sync
from chitu_diffusion.v1 import backend_pb2, backend_pb2_grpc, generation_pb2_grpc, vae_pb2
from chitu_diffusion.v1 import generation_pb2 as pb

DEFAULT_ADDRESS = "127.0.0.1:50050"

EventCallback = Callable[[pb.GenerateEvent], None]


@dataclass(frozen=True)
class Result:
    """A finished video."""

    task_id: str
    video: vae_pb2.VideoInfo
    """Size, frames, fps, digest."""
    report: pb.GenerationReport
    """Effective parameters, steps, times, memory."""
    data: bytes
    """The file, checked against its SHA-256."""


class Client:
    """Blocking calls; safe to use from several threads."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        """`address`: the orchestrator's, host:port or unix:PATH."""
        self._channels = (dial_sync(address), dial_sync(address, bulk=True))
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channels[0])
        self._bulk = generation_pb2_grpc.GenerationServiceStub(self._channels[1])
        self._backend = backend_pb2_grpc.BackendServiceStub(self._channels[0])

    def generate(
        self,
        request: GenerationRequest | str,
        *,
        on_event: EventCallback | None = None,
        request_id: str | None = None,
        detach: bool = False,
        **params: Any,
    ) -> Result:
        """Generate a video and wait for it.

        Args:
            request: what to generate, or its prompt.
            on_event: called with each event as it comes.
            request_id: makes the call safe to repeat.
            detach: let the task live on if this call is interrupted.
            params: fields of `GenerationRequest`, if `request` is a prompt.

        Raises:
            ChituError: the request is refused, the task fails or is cancelled, the server is away.
        """
        message = _generate_request(request, params, request_id, detach)
        last = None
        with self._events(self._generation.Generate(message)) as responses:
            for response in responses:
                last = _tell(response.event, on_event)
        done = _outcome(last)
        return _result(done, b"".join(self.download(done.task_id)))

    def submit(
        self, request: GenerationRequest | str, *, request_id: str | None = None, **params: Any
    ) -> pb.Task:
        """Make a task and return at once; arguments as for `generate`."""
        message = pb.SubmitTaskRequest(
            params=_request(request, params).to_proto(), request_id=request_id
        )
        with _chitu_errors():
            return self._generation.SubmitTask(message).task

    def watch(self, task_id: str, after_sequence: int = 0) -> Iterator[pb.GenerateEvent]:
        """A task's events after `after_sequence`, until its last."""
        message = pb.WatchTaskRequest(task_id=task_id, after_sequence=after_sequence)
        with self._events(self._generation.WatchTask(message)) as responses:
            for response in responses:
                yield response.event

    def task(self, task_id: str) -> pb.Task:
        """A task as it is now."""
        with _chitu_errors():
            return self._generation.GetTask(pb.GetTaskRequest(task_id=task_id)).task

    def tasks(self) -> Iterator[pb.Task]:
        """All tasks, newest first, fetched page by page."""
        token = ""
        while True:
            with _chitu_errors():
                page = self._generation.ListTasks(pb.ListTasksRequest(page_token=token))
            yield from page.tasks
            token = page.next_page_token
            if not token:
                return

    def cancel(self, task_id: str) -> pb.Task:
        """Ask a task to stop."""
        with _chitu_errors():
            return self._generation.CancelTask(pb.CancelTaskRequest(task_id=task_id)).task

    def delete(self, task_id: str) -> None:
        """Remove a task that has ended, with its result."""
        with _chitu_errors():
            self._generation.DeleteTask(pb.DeleteTaskRequest(task_id=task_id))

    def download(self, task_id: str, offset: int = 0) -> Iterator[bytes]:
        """The bytes of a finished task's file from `offset` on."""
        message = pb.DownloadResultRequest(task_id=task_id, offset=offset)
        with self._events(self._bulk.DownloadResult(message)) as responses:
            for response in responses:
                yield response.chunk.data

    def backend(self) -> backend_pb2.GetBackendResponse:
        """State, components and memory of the backend."""
        with _chitu_errors():
            return self._backend.GetBackend(backend_pb2.GetBackendRequest())

    def models(self) -> list[backend_pb2.Model]:
        """What can be asked for."""
        with _chitu_errors():
            return list(self._backend.ListModels(backend_pb2.ListModelsRequest()).models)

    @contextlib.contextmanager
    def _events(self, call: Any) -> Iterator[Any]:
        try:
            with _chitu_errors():
                yield call
        finally:
            call.cancel()

    def close(self) -> None:
        """Close the connections."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """The same calls for asyncio. Make and use it inside one running event loop."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        """`address`: the orchestrator's, host:port or unix:PATH."""
        self._channels = (dial(address), dial(address, bulk=True))
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channels[0])
        self._bulk = generation_pb2_grpc.GenerationServiceStub(self._channels[1])
        self._backend = backend_pb2_grpc.BackendServiceStub(self._channels[0])

    async def generate(
        self,
        request: GenerationRequest | str,
        *,
        on_event: EventCallback | None = None,
        request_id: str | None = None,
        detach: bool = False,
        **params: Any,
    ) -> Result:
        """As `Client.generate`. Cancelling it cancels the task, unless `detach`."""
        message = _generate_request(request, params, request_id, detach)
        last = None
        async with self._events(self._generation.Generate(message)) as responses:
            async for response in responses:
                last = _tell(response.event, on_event)
        done = _outcome(last)
        return _result(done, b"".join([chunk async for chunk in self.download(done.task_id)]))

    async def submit(
        self, request: GenerationRequest | str, *, request_id: str | None = None, **params: Any
    ) -> pb.Task:
        """As `Client.submit`."""
        message = pb.SubmitTaskRequest(
            params=_request(request, params).to_proto(), request_id=request_id
        )
        with _chitu_errors():
            return (await self._generation.SubmitTask(message)).task

    async def watch(self, task_id: str, after_sequence: int = 0) -> AsyncIterator[pb.GenerateEvent]:
        """As `Client.watch`."""
        message = pb.WatchTaskRequest(task_id=task_id, after_sequence=after_sequence)
        async with self._events(self._generation.WatchTask(message)) as responses:
            async for response in responses:
                yield response.event

    async def task(self, task_id: str) -> pb.Task:
        """As `Client.task`."""
        with _chitu_errors():
            return (await self._generation.GetTask(pb.GetTaskRequest(task_id=task_id))).task

    async def tasks(self) -> AsyncIterator[pb.Task]:
        """As `Client.tasks`."""
        token = ""
        while True:
            with _chitu_errors():
                page = await self._generation.ListTasks(pb.ListTasksRequest(page_token=token))
            for task in page.tasks:
                yield task
            token = page.next_page_token
            if not token:
                return

    async def cancel(self, task_id: str) -> pb.Task:
        """As `Client.cancel`."""
        with _chitu_errors():
            return (await self._generation.CancelTask(pb.CancelTaskRequest(task_id=task_id))).task

    async def delete(self, task_id: str) -> None:
        """As `Client.delete`."""
        with _chitu_errors():
            await self._generation.DeleteTask(pb.DeleteTaskRequest(task_id=task_id))

    async def download(self, task_id: str, offset: int = 0) -> AsyncIterator[bytes]:
        """As `Client.download`."""
        message = pb.DownloadResultRequest(task_id=task_id, offset=offset)
        async with self._events(self._bulk.DownloadResult(message)) as responses:
            async for response in responses:
                yield response.chunk.data

    async def backend(self) -> backend_pb2.GetBackendResponse:
        """As `Client.backend`."""
        with _chitu_errors():
            return await self._backend.GetBackend(backend_pb2.GetBackendRequest())

    async def models(self) -> list[backend_pb2.Model]:
        """As `Client.models`."""
        with _chitu_errors():
            response = await self._backend.ListModels(backend_pb2.ListModelsRequest())
        return list(response.models)

    @contextlib.asynccontextmanager
    async def _events(self, call: Any) -> AsyncIterator[Any]:
        # An abandoned asyncio call is never collected: cancel it in any case.
        try:
            with _chitu_errors():
                yield call
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels:
            await channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _request(request: GenerationRequest | str, params: dict[str, Any]) -> GenerationRequest:
    if isinstance(request, GenerationRequest):
        if params:
            raise TypeError(f"give {sorted(params)} in the request, not beside it")
        return request
    return GenerationRequest(prompt=request, **params)


def _generate_request(
    request: GenerationRequest | str,
    params: dict[str, Any],
    request_id: str | None,
    detach: bool,
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        params=_request(request, params).to_proto(), request_id=request_id, detach=detach
    )


def _tell(event: pb.GenerateEvent, on_event: EventCallback | None) -> pb.GenerateEvent:
    if on_event is not None:
        on_event(event)
    return event


def _outcome(last: pb.GenerateEvent | None) -> pb.GenerateEvent:
    """The `done` event that ended a stream; any other end raises."""
    if last is not None:
        kind = last.WhichOneof("event")
        if kind == "done":
            return last
        if kind == "failed":
            raise error_from(last.failed.error.reason, last.failed.error.message)
        if kind == "cancelled":
            raise CancelledTaskError(f"task {last.task_id}: cancelled ({last.cancelled.reason})")
    raise UnavailableError("the server ended the stream before the task ended")


def _result(done: pb.GenerateEvent, data: bytes) -> Result:
    video = done.done.result
    if hashlib.sha256(data).hexdigest() != video.sha256:
        raise DataLossError(
            f"the file of task {done.task_id} was damaged on the way: fetch it again"
        )
    return Result(done.task_id, video, done.done.report, data)


@contextlib.contextmanager
def _chitu_errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error

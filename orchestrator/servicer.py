"""The public door on the wire: GenerationService and BackendService, as their protos specify."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import cast

import grpc.aio

from chitu_diffusion import __version__
from chitu_diffusion.config.schema import OUTPUT_FORMATS, SOLVERS
from chitu_diffusion.errors import (
    InvalidRequestError,
    PreconditionError,
    QueueFullError,
    UnavailableError,
)
from chitu_diffusion.request import GenerationRequest
from chitu_diffusion.v1 import backend_pb2, backend_pb2_grpc, generation_pb2_grpc, vae_pb2
from chitu_diffusion.v1 import generation_pb2 as pb
from orchestrator.core import BackendCore, BackendState
from orchestrator.task import Task

_DEFAULT_PAGE = 50
_MAX_PAGE = 500
_ORDERING_FIELDS = ("deadline", "accept_late", "priority")


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Tasks."""

    def __init__(self, backend: BackendCore, max_watchers: int) -> None:
        self._backend = backend
        self._max_watchers = max_watchers
        self._watchers = 0

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Make a task and stream its events; cancel it when the caller leaves."""
        with self._watching():
            runner = self._backend.runner
            task = self._submit(request)
            try:
                async with contextlib.aclosing(task.watch()) as events:
                    async for event in events:
                        yield pb.GenerateResponse(event=event)
            finally:
                if not request.detach:
                    runner.cancel(task, "disconnect")

    async def SubmitTask(
        self, request: pb.SubmitTaskRequest, context: grpc.aio.ServicerContext
    ) -> pb.SubmitTaskResponse:
        """Make a task."""
        return pb.SubmitTaskResponse(task=self._submit(request).to_proto())

    async def GetTask(
        self, request: pb.GetTaskRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetTaskResponse:
        """Return a task."""
        return pb.GetTaskResponse(task=self._backend.store.get(request.task_id).to_proto())

    async def ListTasks(
        self, request: pb.ListTasksRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListTasksResponse:
        """List tasks, newest first."""
        if request.page_size < 0:
            raise InvalidRequestError.of("page_size", f"{request.page_size}: must be >= 0")
        size = min(request.page_size or _DEFAULT_PAGE, _MAX_PAGE)
        skipping = _decode_token(request.page_token)
        page: list[Task] = []
        for task in self._backend.store.newest_first():
            if request.states and task.state not in request.states:
                continue
            if skipping is not None:
                skipping = None if task.id == skipping else skipping
                continue
            if len(page) == size:
                return pb.ListTasksResponse(
                    tasks=[t.to_proto(with_report=False) for t in page],
                    next_page_token=_encode_token(page[-1].id),
                )
            page.append(task)
        return pb.ListTasksResponse(tasks=[t.to_proto(with_report=False) for t in page])

    async def WatchTask(
        self, request: pb.WatchTaskRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchTaskResponse]:
        """Stream a task's events."""
        with self._watching():
            task = self._backend.store.get(request.task_id)
            async with contextlib.aclosing(task.watch(request.after_sequence)) as events:
                async for event in events:
                    yield pb.WatchTaskResponse(event=event)

    async def CancelTask(
        self, request: pb.CancelTaskRequest, context: grpc.aio.ServicerContext
    ) -> pb.CancelTaskResponse:
        """Ask a task to stop."""
        task = self._backend.store.get(request.task_id)
        self._backend.runner.cancel(task, "client")
        return pb.CancelTaskResponse(task=task.to_proto())

    async def DeleteTask(
        self, request: pb.DeleteTaskRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeleteTaskResponse:
        """Remove a task that has ended."""
        self._backend.store.delete(request.task_id)
        return pb.DeleteTaskResponse()

    async def DownloadResult(
        self, request: pb.DownloadResultRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.DownloadResultResponse]:
        """Stream a finished task's file."""
        task = self._backend.store.get(request.task_id)
        if task.result is None:
            state = pb.TaskState.Name(task.state).removeprefix("TASK_STATE_")
            raise PreconditionError(f"task {task.id} has no result: it is {state}")
        async for offset, data in self._backend.artifacts.read(task.id, request.offset):
            yield pb.DownloadResultResponse(chunk=vae_pb2.FileChunk(offset=offset, data=data))

    def _submit(self, request: pb.GenerateRequest | pb.SubmitTaskRequest) -> Task:
        runner = self._backend.runner
        if not runner.driving:
            raise PreconditionError("this backend is driven by hand: its owner must call drive()")
        for name in _ORDERING_FIELDS:
            set_ = request.HasField("deadline") if name == "deadline" else getattr(request, name)
            if set_:
                raise InvalidRequestError.of(
                    name, "is not supported: this server runs tasks first come, first served"
                )
        request_id = request.request_id if request.HasField("request_id") else None
        return runner.submit(request.params, request_id)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        if self._watchers >= self._max_watchers:
            raise QueueFullError(f"{self._max_watchers} event streams are open: try again later")
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1


class BackendServicer(backend_pb2_grpc.BackendServiceServicer):
    """The backend."""

    def __init__(self, backend: BackendCore) -> None:
        self._backend = backend

    async def GetBackend(
        self, request: backend_pb2.GetBackendRequest, context: grpc.aio.ServicerContext
    ) -> backend_pb2.GetBackendResponse:
        """Tell state, components and memory."""
        (components, memory), pool = await asyncio.gather(
            self._backend.describe(), self._backend.pool()
        )
        layout = pool.layout
        return backend_pb2.GetBackendResponse(
            state=_state(self._backend),
            components=components,
            memory=memory,
            cp_size=layout.ulysses_degree * layout.ring_degree,
            cfg_size=layout.cfg_size,
            attn_type=pool.attn_type,
            flexcache=pool.flexcache if pool.HasField("flexcache") else None,
            queued_tasks=self._backend.scheduler.queue_length,
            running_tasks=self._backend.running_count,
            version=__version__,
        )

    async def StartBackend(
        self, request: backend_pb2.StartBackendRequest, context: grpc.aio.ServicerContext
    ) -> backend_pb2.StartBackendResponse:
        """Take tasks."""
        self._backend.start()
        return backend_pb2.StartBackendResponse(state=_state(self._backend))

    async def TerminateBackend(
        self, request: backend_pb2.TerminateBackendRequest, context: grpc.aio.ServicerContext
    ) -> backend_pb2.TerminateBackendResponse:
        """Shut the backend down."""
        await self._backend.terminate(cancel=request.cancel_tasks)
        return backend_pb2.TerminateBackendResponse(state=_state(self._backend))

    async def OffloadComponent(
        self, request: backend_pb2.OffloadComponentRequest, context: grpc.aio.ServicerContext
    ) -> backend_pb2.OffloadComponentResponse:
        """Move a component, wherever it is hosted."""
        component = await self._backend.move(request.name, request.target)
        return backend_pb2.OffloadComponentResponse(component=component)

    async def ListModels(
        self, request: backend_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> backend_pb2.ListModelsResponse:
        """List the model that is served."""
        model, limits = self._backend.model, self._backend.model.limits
        if self._backend.state is BackendState.Uninitialized:
            raise UnavailableError("the backend is still connecting to its services")
        defaults = GenerationRequest().resolve(model, seed=0, attn_type=self._backend.attn_type)
        params = defaults.to_proto()
        params.ClearField("seed")  # drawn anew for each task
        return backend_pb2.ListModelsResponse(
            models=[
                backend_pb2.Model(
                    name=model.name,
                    default=True,
                    defaults=params,
                    two_experts=model.boundary_ratio is not None,
                    text_len=model.transformer.text_len,
                    limits=backend_pb2.Limits(
                        max_num_frames=limits.max_num_frames,
                        max_pixels=limits.max_pixels,
                        max_pixel_frames=limits.max_pixel_frames,
                        max_num_inference_steps=limits.max_num_inference_steps,
                        max_prompt_chars=limits.max_prompt_chars,
                    ),
                    solvers=SOLVERS,
                    output_formats=OUTPUT_FORMATS,
                )
            ]
        )


def _state(backend: BackendCore) -> backend_pb2.BackendState.ValueType:
    return cast(backend_pb2.BackendState.ValueType, backend.state.value + 1)


def _encode_token(task_id: str) -> str:
    return base64.urlsafe_b64encode(task_id.encode()).decode()


def _decode_token(token: str) -> str | None:
    """The id of the last task of the page before."""
    if not token:
        return None
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise InvalidRequestError.of("page_token", "was not given by ListTasks") from None

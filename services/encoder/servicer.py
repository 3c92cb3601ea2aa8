"""The encoder on the wire; encoder.proto says what each call promises."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc.aio

import chitu_diffusion
from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import (
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from chitu_diffusion.rpc.server import Service
from chitu_diffusion.v1 import (
    component_pb2,
    component_pb2_grpc,
    encoder_pb2,
    encoder_pb2_grpc,
)
from chitu_diffusion.wire import tensor_parts
from services.common.memory import process_memory, stage_report
from services.common.placement import dtype_name, resolve_device, resolve_dtype
from services.encoder.prompt import TokenizedPrompt
from services.encoder.request import check_request
from services.encoder.worker import Encoded, Worker, load_worker

COMPONENT = "text_encoder"


class EncoderHost(Service):
    """The text encoder, its one worker thread and its servicers."""

    name = "encoder"

    def __init__(self, config: Config) -> None:
        """Resolve device and type; nothing is loaded yet.

        Raises:
            ConfigError: no such device here.
        """
        self._config = config
        self._text_len = config.models.transformer.text_len
        self.device = resolve_device(config.infer.device)
        self.dtype = resolve_dtype(
            config.services.encoder.dtype, self.device, "services.encoder.dtype"
        )
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._worker: Worker | None = None
        self._state = component_pb2.COMPONENT_STATE_LOADING
        self._detail = ""

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Add EncoderService and ComponentService."""
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(EncoderServicer(self), server)
        component_pb2_grpc.add_ComponentServiceServicer_to_server(ComponentServicer(self), server)
        return [
            encoder_pb2.DESCRIPTOR.services_by_name["EncoderService"].full_name,
            component_pb2.DESCRIPTOR.services_by_name["ComponentService"].full_name,
        ]

    async def load(self) -> None:
        """Read tokenizer and weights on the worker thread.

        Raises:
            ConfigError: models.ckpt_dir is not set.
            CheckpointNotFoundError: a folder is missing.
            CheckpointError: a file is corrupt, or the parts do not fit each other.
        """
        loop = asyncio.get_running_loop()
        try:
            self._worker = await loop.run_in_executor(
                self._executor, load_worker, self._config, self.device, self.dtype
            )
        except Exception as error:
            self._state, self._detail = component_pb2.COMPONENT_STATE_FAILED, str(error)
            raise
        self._state = component_pb2.COMPONENT_STATE_READY

    async def drain(self) -> None:
        """Refuse new calls; running ones go on."""
        self._state = component_pb2.COMPONENT_STATE_DRAINING

    async def close(self) -> None:
        """Free the weights and end the thread."""
        self._worker = None
        await asyncio.to_thread(self._executor.shutdown)

    def check(self, request: encoder_pb2.EncodeRequest) -> Worker:
        """Return the worker for a request that it can take.

        Raises:
            UnavailableError: it is loading, has failed, or is shutting down.
            InvalidRequestError: the request breaks a rule.
        """
        if self._worker is None or self._state != component_pb2.COMPONENT_STATE_READY:
            state = component_pb2.ComponentState.Name(self._state)
            raise UnavailableError(f"text encoder: {state.removeprefix('COMPONENT_STATE_')}")
        check_request(request, self._worker.model.vocab_size, self._text_len)
        return self._worker

    async def encode(self, worker: Worker, item: encoder_pb2.TextInput) -> Encoded:
        """Encode one input on the worker thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, worker.encode, item, time.perf_counter())

    def component(self) -> component_pb2.Component:
        """Describe what is held, and where."""
        component = component_pb2.Component(
            name=COMPONENT,
            model=self._config.models.name,
            state=self._state,
            device=str(self.device),
            dtype=dtype_name(self.dtype),
            detail=self._detail,
        )
        if self._worker is not None:
            component.parameter_count = self._worker.model.parameter_count
            component.weight_bytes = self._worker.model.weight_bytes
        return component

    def memory(self) -> component_pb2.ProcessMemory:
        """Memory of this process."""
        return process_memory(f"encoder@{self._config.services.encoder.listen}", self.device)


class EncoderServicer(encoder_pb2_grpc.EncoderServiceServicer):
    """EncoderService."""

    def __init__(self, host: EncoderHost) -> None:
        self._host = host

    async def Encode(
        self, request: encoder_pb2.EncodeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[encoder_pb2.EncodeResponse]:
        """Check everything first, then encode and send text by text."""
        worker = self._host.check(request)
        seconds = waited = 0.0
        for index, item in enumerate(request.inputs):
            encoded = await self._host.encode(worker, item)
            seconds, waited = seconds + encoded.seconds, waited + encoded.waited_seconds
            yield _facts(index, encoded.prompt, request.return_token_ids)
            for part in tensor_parts("prompt_embeds", encoded.rows):
                yield encoder_pb2.EncodeResponse(tensor=part)
        report = stage_report(self._host.device, self._host.dtype, seconds, waited)
        yield encoder_pb2.EncodeResponse(report=report)


def _facts(index: int, prompt: TokenizedPrompt, with_ids: bool) -> encoder_pb2.EncodeResponse:
    return encoder_pb2.EncodeResponse(
        prompt=encoder_pb2.EncodedPrompt(
            index=index,
            token_count=prompt.token_count,
            length=len(prompt.ids),
            truncated=prompt.truncated,
            token_ids=prompt.ids if with_ids else [],
        )
    )


class ComponentServicer(component_pb2_grpc.ComponentServiceServicer):
    """ComponentService of this host."""

    def __init__(self, host: EncoderHost) -> None:
        self._host = host

    async def GetComponents(
        self,
        request: component_pb2.GetComponentsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> component_pb2.GetComponentsResponse:
        """Answer at any time, also while loading."""
        return component_pb2.GetComponentsResponse(
            components=[self._host.component()],
            memory=[self._host.memory()],
            version=chitu_diffusion.__version__,
        )

    async def MoveComponent(
        self,
        request: component_pb2.MoveComponentRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> component_pb2.MoveComponentResponse:
        """Refuse: this host keeps its component where it was loaded."""
        if request.name != COMPONENT:
            raise NotFoundError(f"component {request.name!r}: this host has {COMPONENT!r}")
        raise UnsupportedError("this host does not move components")

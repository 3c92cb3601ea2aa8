"""The VAE on the wire; vae.proto says what each call promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc.aio
import torch

import chitu_diffusion
from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import ConfigError, NotFoundError, UnavailableError, UnsupportedError
from chitu_diffusion.rpc.server import Service
from chitu_diffusion.v1 import component_pb2, component_pb2_grpc, vae_pb2, vae_pb2_grpc
from services.common.memory import process_memory, stage_report
from services.common.placement import dtype_name, resolve_device, resolve_dtype
from services.vae.job import DecodeJob
from services.vae.request import LatentRules, read_request, reading
from services.vae.turn import Turn
from services.vae.wan_vae import WanVae

COMPONENT = "vae"


class VaeHost(Service):
    """The VAE, its one worker thread and its servicers."""

    name = "vae"

    def __init__(self, config: Config) -> None:
        """Resolve device and type; nothing is loaded yet.

        Raises:
            ConfigError: no such device here.
        """
        self.config = config
        self.device = resolve_device(config.infer.device)
        self.dtype = resolve_dtype(config.services.vae.dtype, self.device, "services.vae.dtype")
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="vae")
        self._vae: WanVae | None = None
        self._state = component_pb2.COMPONENT_STATE_LOADING
        self._detail = ""

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Add VaeService and ComponentService."""
        vae_pb2_grpc.add_VaeServiceServicer_to_server(VaeServicer(self), server)
        component_pb2_grpc.add_ComponentServiceServicer_to_server(ComponentServicer(self), server)
        return [
            vae_pb2.DESCRIPTOR.services_by_name["VaeService"].full_name,
            component_pb2.DESCRIPTOR.services_by_name["ComponentService"].full_name,
        ]

    async def load(self) -> None:
        """Read the weights on the worker thread.

        Raises:
            ConfigError: models.ckpt_dir is not set.
            CheckpointNotFoundError: the folder is missing.
            CheckpointError: a file is corrupt, or does not fit the model.
        """
        loop = asyncio.get_running_loop()
        try:
            self._vae = await loop.run_in_executor(self.worker, self._load)
        except Exception as error:
            self._state, self._detail = component_pb2.COMPONENT_STATE_FAILED, str(error)
            raise
        self._state = component_pb2.COMPONENT_STATE_READY

    def _load(self) -> WanVae:
        if self.config.models.ckpt_dir is None:
            raise ConfigError("models.ckpt_dir is not set: the VAE has no weights to read")
        if self.config.infer.num_threads:
            torch.set_num_threads(self.config.infer.num_threads)
        return WanVae.load(Path(self.config.models.ckpt_dir), self.device, self.dtype)

    async def drain(self) -> None:
        """Refuse new calls; running ones go on."""
        self._state = component_pb2.COMPONENT_STATE_DRAINING

    async def close(self) -> None:
        """Free the weights and end the thread."""
        self._vae = None
        await asyncio.to_thread(self.worker.shutdown)

    def vae(self) -> WanVae:
        """Return the model.

        Raises:
            UnavailableError: it is loading, has failed, or is shutting down.
        """
        if self._vae is None or self._state != component_pb2.COMPONENT_STATE_READY:
            state = component_pb2.ComponentState.Name(self._state)
            raise UnavailableError(f"vae: {state.removeprefix('COMPONENT_STATE_')}")
        return self._vae

    def component(self) -> component_pb2.Component:
        """Describe what is held, and where."""
        component = component_pb2.Component(
            name=COMPONENT,
            model=self.config.models.name,
            state=self._state,
            device=str(self.device),
            dtype=dtype_name(self.dtype),
            detail=self._detail,
        )
        if self._vae is not None:
            component.parameter_count = self._vae.parameter_count
            component.weight_bytes = self._vae.weight_bytes
        return component

    def memory(self) -> component_pb2.ProcessMemory:
        """Memory of this process."""
        return process_memory(f"vae@{self.config.services.vae.listen}", self.device)


class VaeServicer(vae_pb2_grpc.VaeServiceServicer):
    """VaeService."""

    def __init__(self, host: VaeHost) -> None:
        self._host = host
        self._lock = asyncio.Lock()

    async def Decode(
        self,
        request_iterator: AsyncIterator[vae_pb2.DecodeRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[vae_pb2.DecodeResponse]:
        """Read and check the whole request, wait for a turn, then decode as the answers leave."""
        host = self._host
        async with reading(request_iterator):
            vae = host.vae()
            rules = LatentRules(
                vae.channels, vae.spatial_stride, vae.temporal_stride, host.config.models.limits
            )
            request = await read_request(request_iterator, rules)
        job = DecodeJob(vae, host.config.services.vae, *request)
        del request
        loop = asyncio.get_running_loop()
        async with Turn(self._lock) as turn:
            try:
                while (batch := await loop.run_in_executor(host.worker, job.advance)) is not None:
                    turn.sending()
                    for response in batch:
                        yield response
                    await turn.take()
            finally:
                # Behind a step that may still run: the worker is one thread.
                host.worker.submit(job.close)
        report = stage_report(vae.device, vae.dtype, job.seconds, turn.waited_seconds)
        yield vae_pb2.DecodeResponse(done=vae_pb2.DecodeDone(video=job.video, report=report))


class ComponentServicer(component_pb2_grpc.ComponentServiceServicer):
    """ComponentService of this host."""

    def __init__(self, host: VaeHost) -> None:
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

"""A host of one model part: one worker thread, and the state the part is in."""

from __future__ import annotations

import abc
import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Generic, Protocol, TypeVar

import torch

from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import ConfigError, UnavailableError
from chitu_diffusion.rpc.server import Service
from chitu_diffusion.v1 import component_pb2
from services.common.memory import process_memory
from services.common.placement import dtype_name, resolve_device, resolve_dtype


class Placed(Protocol):
    """A model that knows its size and its place."""

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters in memory."""

    @property
    def device(self) -> torch.device:
        """Where it is and computes."""

    def to(self, device: torch.device) -> None:
        """Move it; `OutOfMemoryError` if it does not fit, and it is where it was."""


Model = TypeVar("Model", bound=Placed)


class ModelHost(Service, Generic[Model]):
    """Loads a model on its worker thread and tells where it stands."""

    component: ClassVar[str]
    """Name of the model part, as in Component.name."""

    def __init__(self, config: Config) -> None:
        """Resolve device and type; nothing is loaded yet.

        Raises:
            ConfigError: no such device here.
        """
        self.config = config
        self.device = resolve_device(config.infer.device)
        """Where the model is unless it is moved away."""
        dtype = getattr(config.services, self.name).dtype
        self.dtype = resolve_dtype(dtype, self.device, f"services.{self.name}.dtype")
        self.worker = ThreadPoolExecutor(1, thread_name_prefix=self.name)
        """Runs all model work, so that the event loop always answers."""
        self._model: Model | None = None
        self._state = component_pb2.COMPONENT_STATE_LOADING
        self._detail = ""

    @property
    def home(self) -> torch.device:
        """Where the weights are read to."""
        return self.device

    @abc.abstractmethod
    def read(self) -> Model:
        """Read the weights; on the worker thread."""

    async def load(self) -> None:
        """Read the weights.

        Raises:
            ConfigError: models.ckpt_dir is not set.
            CheckpointNotFoundError: a folder is missing.
            CheckpointError: a file is corrupt, or does not fit the model.
        """
        loop = asyncio.get_running_loop()
        try:
            model = await loop.run_in_executor(self.worker, self._read)
        except Exception as error:
            self._state, self._detail = component_pb2.COMPONENT_STATE_FAILED, str(error)
            raise
        if self._state == component_pb2.COMPONENT_STATE_LOADING:  # else drained meanwhile
            self._model = model
            self._state = component_pb2.COMPONENT_STATE_READY

    def _read(self) -> Model:
        if self.config.models.ckpt_dir is None:
            raise ConfigError("models.ckpt_dir is not set: there are no weights to read")
        if self.config.infer.num_threads:
            torch.set_num_threads(self.config.infer.num_threads)
        return self.read()

    async def drain(self) -> None:
        """Refuse new calls; running ones go on."""
        self._state = component_pb2.COMPONENT_STATE_DRAINING

    async def close(self) -> None:
        """Free the weights and end the thread."""
        self._model = None
        await asyncio.to_thread(self.worker.shutdown)

    def model(self) -> Model:
        """The model.

        Raises:
            UnavailableError: it is loading, has failed, or is shutting down.
        """
        if self._model is None or self._state != component_pb2.COMPONENT_STATE_READY:
            state = component_pb2.ComponentState.Name(self._state)
            raise UnavailableError(f"{self.component}: {state.removeprefix('COMPONENT_STATE_')}")
        return self._model

    async def move(self, name: str, target: str) -> component_pb2.Component:
        """Move the model on the worker thread, behind work in progress.

        Raises:
            OutOfMemoryError: it does not fit; it stays where it was.
            UnavailableError: it is loading, has failed, or is shutting down.
        """
        device = self.device if target == "device" else torch.device("cpu")
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.worker, self.model().to, device)
        return self.components()[0]

    def components(self) -> list[component_pb2.Component]:
        """What is held, and where."""
        component = component_pb2.Component(
            name=self.component,
            model=self.config.models.name,
            state=self._state,
            device=str(self.home),
            dtype=dtype_name(self.dtype),
            detail=self._detail,
        )
        if self._model is not None:
            component.parameter_count = self._model.parameter_count
            component.weight_bytes = self._model.weight_bytes
            component.device = str(self._model.device)
        return [component]

    def memory(self) -> list[component_pb2.ProcessMemory]:
        """Memory of this process."""
        return [process_memory(self.name, self.device)]

"""ComponentService, the same for every model host."""

from __future__ import annotations

from typing import Any, Protocol

from chitu_diffusion import __version__
from chitu_diffusion.errors import NotFoundError, UnsupportedError
from chitu_diffusion.v1 import component_pb2, component_pb2_grpc


class Described(Protocol):
    """What a host tells about itself, at any time and without waiting."""

    def components(self) -> list[component_pb2.Component]:
        """Every model part, and where it is."""

    def memory(self) -> list[component_pb2.ProcessMemory]:
        """Memory of each process."""


class ComponentServicer(component_pb2_grpc.ComponentServiceServicer):
    """What a host holds. Never waits for the model."""

    def __init__(self, host: Described) -> None:
        self._host = host

    async def GetComponents(
        self, request: component_pb2.GetComponentsRequest, context: Any
    ) -> component_pb2.GetComponentsResponse:
        """Describe components and memory."""
        return component_pb2.GetComponentsResponse(
            components=self._host.components(), memory=self._host.memory(), version=__version__
        )

    async def MoveComponent(
        self, request: component_pb2.MoveComponentRequest, context: Any
    ) -> component_pb2.MoveComponentResponse:
        """Refuse: components stay where they were loaded."""
        names = [component.name for component in self._host.components()]
        if request.name not in names:
            raise NotFoundError(f"component {request.name!r}: this host has {', '.join(names)}")
        raise UnsupportedError(f"component {request.name!r} cannot be moved on this host")

"""ComponentService, the same for every model host."""

from __future__ import annotations

from typing import Any, Protocol

from chitu_diffusion import __version__
from chitu_diffusion.errors import InvalidRequestError, NotFoundError
from chitu_diffusion.v1 import component_pb2, component_pb2_grpc

TARGETS = ("cpu", "device")


class Movable(Protocol):
    """What a host tells about itself, at any time and without waiting, and does to its parts."""

    def components(self) -> list[component_pb2.Component]:
        """Every model part, and where it is."""

    def memory(self) -> list[component_pb2.ProcessMemory]:
        """Memory of each process."""

    async def move(self, name: str, target: str) -> component_pb2.Component:
        """Move a part that it has to "cpu" or to its "device", behind work in progress."""


class ComponentServicer(component_pb2_grpc.ComponentServiceServicer):
    """What a host holds. Never waits for the model."""

    def __init__(self, host: Movable) -> None:
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
        """Check the request, and let the host move it in turn with its work."""
        names = [component.name for component in self._host.components()]
        if request.name not in names:
            raise NotFoundError(f"component {request.name!r}: this host has {', '.join(names)}")
        if request.target not in TARGETS:
            raise InvalidRequestError.of("target", f"{request.target!r}: must be 'cpu' or 'device'")
        component = await self._host.move(request.name, request.target)
        return component_pb2.MoveComponentResponse(component=component)

"""What MoveComponent promises on every host."""

import grpc
import grpc.aio
import pytest

from chitu_diffusion.errors import InvalidRequestError, NotFoundError, from_rpc_error
from chitu_diffusion.v1 import component_pb2, component_pb2_grpc


async def check_moving(channel: grpc.aio.Channel, name: str, unknown: str) -> None:
    """Moves that change nothing on a CPU, and everything that is wrong with a request."""
    stub = component_pb2_grpc.ComponentServiceStub(channel)
    for target in ("cpu", "cpu", "device", "device"):
        request = component_pb2.MoveComponentRequest(name=name, target=target)
        component = (await stub.MoveComponent(request)).component
        assert (component.name, component.device) == (name, "cpu")
    for target in ("", "cuda:0"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.MoveComponent(component_pb2.MoveComponentRequest(name=name, target=target))
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidRequestError)
        assert error.violations[0].field == "target"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.MoveComponent(component_pb2.MoveComponentRequest(name=unknown, target="cpu"))
    assert isinstance(from_rpc_error(caught.value), NotFoundError)
    assert name in str(from_rpc_error(caught.value))

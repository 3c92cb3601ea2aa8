import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from chitu_diffusion.errors import (
    ConfigError,
    InvalidRequestError,
    UnavailableError,
    from_rpc_error,
)
from chitu_diffusion.rpc import interceptor
from chitu_diffusion.rpc.channel import dial, is_serving
from chitu_diffusion.rpc.server import PARENT_PID, Server, Service
from chitu_diffusion.v1 import (
    encoder_pb2,
    encoder_pb2_grpc,
    tensor_pb2,
    vae_pb2,
    vae_pb2_grpc,
)

ENCODER = "chitu_diffusion.v1.EncoderService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class SlowService(Service, encoder_pb2_grpc.EncoderServiceServicer):
    """Loads when told to; each call takes half a second."""

    name = "encoder"

    def __init__(self):
        self.may_load = asyncio.Event()
        self.ended = []
        self.closed = 0

    def register(self, server):
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(self, server)
        return [ENCODER]

    async def load(self):
        await self.may_load.wait()

    async def close(self):
        self.closed += 1

    async def Encode(self, request, context):
        try:
            yield encoder_pb2.EncodeResponse()
            await asyncio.sleep(0.5)
            yield encoder_pb2.EncodeResponse()
        finally:
            self.ended.append("call")


async def health(address: str, service: str) -> int:
    async with dial(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_health_tells_loading_from_serving_from_draining():
    service = SlowService()
    server = Server(service, "127.0.0.1:0")
    await server.start()
    loading = asyncio.create_task(server.load())
    assert await health(server.address, "") == SERVING
    assert await health(server.address, ENCODER) == NOT_SERVING
    assert not await asyncio.to_thread(is_serving, server.address, ENCODER, 1.0)
    service.may_load.set()
    await loading
    assert await health(server.address, ENCODER) == SERVING
    await server.stop(0)
    assert service.closed == 1
    assert not await asyncio.to_thread(is_serving, server.address, ENCODER, 0.2)


async def test_a_stop_lets_running_calls_end_and_refuses_new_ones():
    service = SlowService()
    server = Server(service, "127.0.0.1:0")
    await server.start()
    async with dial(server.address) as channel:
        stub = encoder_pb2_grpc.EncoderServiceStub(channel)
        running = stub.Encode(encoder_pb2.EncodeRequest())
        await running.read()
        stopping = asyncio.create_task(server.stop(grace_s=5))
        await asyncio.sleep(0.05)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Encode(encoder_pb2.EncodeRequest()).read()
        assert isinstance(from_rpc_error(caught.value), UnavailableError)
        assert await running.read() is not grpc.aio.EOF
        assert await running.read() is grpc.aio.EOF
        await stopping
    assert service.ended == ["call"]


async def test_a_stop_without_grace_awaits_the_handlers_it_cancels():
    service = SlowService()
    server = Server(service, "127.0.0.1:0")
    await server.start()
    async with dial(server.address) as channel:
        call = encoder_pb2_grpc.EncoderServiceStub(channel).Encode(encoder_pb2.EncodeRequest())
        await call.read()
        await server.stop(0)
        assert service.ended == ["call"]
        call.cancel()


class Refusing(SlowService, vae_pb2_grpc.VaeServiceServicer):
    """Refuses each call at its first message."""

    def register(self, server):
        vae_pb2_grpc.add_VaeServiceServicer_to_server(self, server)
        return []

    async def Decode(self, request_iterator, context):
        async for _ in request_iterator:
            raise InvalidRequestError.of("start", "is not to my taste")
        yield vae_pb2.DecodeResponse()


async def test_a_caller_that_is_still_sending_hears_why_it_is_refused():
    server = Server(Refusing(), "127.0.0.1:0")
    await server.start()
    part = tensor_pb2.TensorPart(chunk=tensor_pb2.TensorChunk(data=bytes(1 << 20)))
    requests = [vae_pb2.DecodeRequest(tensor=part)] * 32
    async with dial(server.address) as channel:
        for _ in range(3):
            call = vae_pb2_grpc.VaeServiceStub(channel).Decode(iter(requests))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert "not to my taste" in str(from_rpc_error(caught.value))
    await server.stop(0)


async def test_a_refused_caller_is_not_heard_for_ever(monkeypatch):
    monkeypatch.setattr(interceptor, "_DRAIN_S", 0.1)
    server = Server(Refusing(), "127.0.0.1:0")
    await server.start()

    async def endless():
        while True:
            yield vae_pb2.DecodeRequest()
            await asyncio.sleep(0.01)

    async with dial(server.address) as channel, asyncio.timeout(5):
        call = vae_pb2_grpc.VaeServiceStub(channel).Decode(endless())
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        call.cancel()
    await server.stop(0)


async def test_reflection_lists_the_services():
    server = Server(SlowService(), "127.0.0.1:0")
    await server.start()

    def listed():
        with grpc.insecure_channel(server.address) as channel:
            return set(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert {ENCODER, "grpc.health.v1.Health"} <= await asyncio.to_thread(listed)
    await server.stop(0)


@pytest.mark.parametrize("listen", ["192.0.2.1:0", "nowhere.invalid:0", "unix:" + "x" * 200])
async def test_an_address_that_is_not_ours_is_refused(listen):
    with pytest.raises(ConfigError, match=r"encoder: listen=.*not ours"):
        await Server(SlowService(), listen).start()


async def test_a_port_that_is_taken_is_refused_by_name():
    first = Server(SlowService(), "127.0.0.1:0")
    await first.start()
    with pytest.raises(ConfigError, match=f"{first.address}.*in use"):
        await Server(SlowService(), first.address).start()
    await first.stop(0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=taken):
            await Server(SlowService(), taken).start()


def start_orchestrator(*overrides, cwd=None, **env) -> subprocess.Popen:
    """A service process that waits for hosts which are not there."""
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "orchestrator",
            "orchestrator.listen=127.0.0.1:0",
            "services.encoder.address=127.0.0.1:1",
            *overrides,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_prints_its_address_and_ends_on_a_signal_while_it_loads(number):
    process = start_orchestrator()
    line = json.loads(process.stdout.readline())
    assert line["service"] == "orchestrator"
    assert not is_serving(line["address"], "chitu_diffusion.v1.GenerationService", 1.0)
    began = time.monotonic()
    process.send_signal(number)
    _, log = process.communicate(timeout=10)
    assert process.returncode == 0, log
    assert time.monotonic() - began < 5


def test_a_process_starts_in_a_folder_it_cannot_write_to():
    process = start_orchestrator(cwd="/proc")
    assert json.loads(process.stdout.readline())["address"].startswith("127.0.0.1:")
    process.terminate()
    process.communicate(timeout=10)
    assert process.returncode == 0


def test_a_wrong_configuration_ends_the_process_with_code_2():
    process = start_orchestrator("infer.dtyp=auto")
    _, log = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "did you mean 'infer.dtype'" in log
    assert "Traceback" not in log


def test_a_process_ends_when_its_parent_is_gone():
    stand_in_for_a_parent_that_died = {PARENT_PID: "1"}
    process = start_orchestrator(**stand_in_for_a_parent_that_died)
    _, log = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "is gone" in log

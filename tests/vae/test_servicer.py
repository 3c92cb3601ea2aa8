from __future__ import annotations

import asyncio
import gc
import hashlib
import io
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import av
import grpc
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.video_processor import VideoProcessor

from chitu_diffusion import config
from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import (
    CheckpointNotFoundError,
    ConfigError,
    InvalidRequestError,
    OutOfMemoryError,
    UnavailableError,
    from_rpc_error,
)
from chitu_diffusion.rpc.channel import dial
from chitu_diffusion.rpc.server import Server
from chitu_diffusion.v1 import component_pb2, component_pb2_grpc, vae_pb2, vae_pb2_grpc
from chitu_diffusion.wire import TensorReceiver
from services.vae import job, turn, wan_vae
from services.vae.host import VaeHost
from tests.common.moving import check_moving
from tests.vae.conftest import file_of, make_latents, requests

BT709 = np.array([0.2126, 0.7152, 0.0722])
Responses = list[vae_pb2.DecodeResponse]


async def decode(channel: grpc.aio.Channel, latents: torch.Tensor, **start: Any) -> Responses:
    stub = vae_pb2_grpc.VaeServiceStub(channel)
    call = stub.Decode(requests(latents, **start), timeout=60)
    return [response async for response in call]


def kinds(responses: Responses) -> list[str | None]:
    return [response.WhichOneof("response") for response in responses]


def frames_of(responses: Responses) -> torch.Tensor:
    receiver = TensorReceiver()
    payloads = [
        payload
        for response in responses
        if response.WhichOneof("response") == "tensor"
        and (payload := receiver.feed(response.tensor))
    ]
    (payload,) = payloads
    assert payload.name == "frames"
    return payload.to_torch()


def reference_frames(reference: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    mean = torch.tensor(reference.config.latents_mean).view(1, -1, 1, 1, 1)
    std = 1.0 / torch.tensor(reference.config.latents_std).view(1, -1, 1, 1, 1)
    with torch.no_grad():
        return reference.decode(latents / std + mean, return_dict=False)[0]


async def eventually(condition: Any, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            gc.collect()
            await asyncio.sleep(0.01)


async def test_mp4(channel: grpc.aio.Channel, reference: AutoencoderKLWan) -> None:
    latents = make_latents(5, 4, 6)
    responses = await decode(channel, latents, fps=12, metadata={"seed": "7", "prompt": "红"})
    steps = [r.progress for r in responses if r.WhichOneof("response") == "progress"]
    assert [(step.frame, step.of) for step in steps] == [(n, 17) for n in (1, 5, 9, 13, 17)]
    order = kinds(responses)
    assert order.count("muxing") == 1
    assert order.index("muxing") > max(i for i, kind in enumerate(order) if kind == "progress")
    assert order[order.index("muxing") + 1] == "chunk"
    assert order.index("done") == len(order) - 1
    data, done = file_of(responses), responses[-1].done
    assert done.video == vae_pb2.VideoInfo(
        content_type="video/mp4",
        byte_size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        num_frames=17,
        height=32,
        width=48,
        fps=12,
        codec="h264",
    )
    assert (done.report.device, done.report.dtype) == ("cpu", "float32")
    assert done.report.seconds > 0
    assert done.report.peak_memory_bytes > 10 << 20
    with av.open(io.BytesIO(data)) as container:
        assert container.metadata["seed"] == "7"
        assert container.metadata["prompt"] == "红"
        assert container.streams.video[0].guessed_rate == 12
        pictures = [frame.to_ndarray(format="yuv420p") for frame in container.decode(video=0)]
    expected = VideoProcessor().postprocess_video(
        reference_frames(reference, latents), output_type="pil"
    )[0]
    assert len(pictures) == len(expected)
    # H.264 halves the chroma of these noisy pictures, so brightness is compared.
    for picture, image in zip(pictures, expected, strict=True):
        wanted = 16 + 219 / 255 * (np.asarray(image) @ BT709)
        assert np.abs(picture[:32] - wanted).mean() < 5


async def test_tensor_equals_diffusers(
    channel: grpc.aio.Channel, reference: AutoencoderKLWan
) -> None:
    latents = make_latents(3, 4, 6)
    responses = await decode(channel, latents, output_format="tensor", fps=0)
    assert kinds(responses) == ["progress"] * 3 + ["tensor"] * 3 + ["done"]
    assert torch.equal(frames_of(responses), reference_frames(reference, latents))
    assert not responses[-1].done.HasField("video")


async def test_one_latent_frame(channel: grpc.aio.Channel) -> None:
    responses = await decode(channel, make_latents(1))
    assert responses[-1].done.video.num_frames == 1
    with av.open(io.BytesIO(file_of(responses))) as container:
        assert len(list(container.decode(video=0))) == 1


async def test_same_latents_same_file(channel: grpc.aio.Channel) -> None:
    async def digest(seed: int) -> str:
        responses = await decode(channel, make_latents(3, seed=seed), metadata={"b": "1", "a": "2"})
        return responses[-1].done.video.sha256

    # Often enough to notice an encoder that is only mostly reproducible.
    digests = {await digest(seed=4) for _ in range(12)}
    assert len(digests) == 1
    assert await digest(seed=1) not in digests


async def test_calls_at_once_do_not_mix(channel: grpc.aio.Channel) -> None:
    calls = [
        (make_latents(3, seed=1), {"output_format": "tensor"}),
        (make_latents(4, 6, 4, seed=2), {"output_format": "mp4"}),
        (make_latents(2, 4, 8, seed=3), {"output_format": "tensor"}),
        (make_latents(3, seed=4), {"output_format": "mp4"}),
    ]
    serial = [await decode(channel, latents, **start) for latents, start in calls]
    together = await asyncio.gather(
        *(decode(channel, latents, **start) for latents, start in calls)
    )
    for one, other in zip(serial, together, strict=True):
        assert one[:-1] == other[:-1]
        assert one[-1].done.video == other[-1].done.video
    assert max(responses[-1].done.report.waited_seconds for responses in together) > 0


class Steps:
    """Watches a host's model: counts the latent frames it computes, and may fail at one."""

    def __init__(self, host: VaeHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.error: Exception | None = None
        vae = host.model()
        compute = vae._decode_frame

        def counted(*args: Any) -> torch.Tensor:
            self.count += 1
            if self.error is not None and args[2] == 1:
                raise self.error
            return compute(*args)

        monkeypatch.setattr(vae, "_decode_frame", counted)


async def test_cancel_stops_and_the_next_call_works(
    channel: grpc.aio.Channel, host: VaeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(host, monkeypatch)
    expected = await decode(channel, make_latents(2))
    steps.count = 0
    stub = vae_pb2_grpc.VaeServiceStub(channel)
    call = stub.Decode(requests(make_latents(40, 8, 8)), timeout=60)
    seen = 0
    async for response in call:
        seen = response.progress.frame
        if seen >= 5:
            break
    call.cancel()
    at_cancel = steps.count
    again = await decode(channel, make_latents(2))
    assert again[:-1] == expected[:-1]
    assert steps.count <= at_cancel + 2 + 4 < 40
    await asyncio.sleep(0.1)
    assert steps.count <= at_cancel + 2 + 4


async def test_cancel_while_waiting_for_a_turn(
    channel: grpc.aio.Channel, host: VaeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(host, monkeypatch)
    stub = vae_pb2_grpc.VaeServiceStub(channel)
    first = asyncio.create_task(decode(channel, make_latents(10, 8, 8)))
    await eventually(lambda: steps.count > 0)
    second = stub.Decode(requests(make_latents(30)), timeout=60)
    await asyncio.sleep(0.02)
    second.cancel()
    assert (await first)[-1].done.video.num_frames == 37
    await decode(channel, make_latents(1))
    assert steps.count == 11


async def test_a_deadline_stops_the_work(
    channel: grpc.aio.Channel, host: VaeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(host, monkeypatch)
    stub = vae_pb2_grpc.VaeServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Decode(requests(make_latents(80, 8, 8)), timeout=0.2):
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.sleep(0.1)
    stopped_at = steps.count
    await asyncio.sleep(0.1)
    assert steps.count == stopped_at < 80


async def test_a_slow_reader_is_not_run_ahead_of(
    channel: grpc.aio.Channel, host: VaeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frames wait in their tensor, not in messages, and other callers go on meanwhile."""
    monkeypatch.setattr(turn.Turn.__init__, "__defaults__", (0.1,))
    monkeypatch.setattr(
        host.model(),
        "_decode_frame",
        lambda hidden, cache, index: torch.zeros(1, 3, 4 if index else 1, 256, 256),
    )
    batches = 0
    advance = job.DecodeJob.advance

    def counted(this: job.DecodeJob) -> job.Batch | None:
        nonlocal batches
        batches += 1
        return advance(this)

    monkeypatch.setattr(job.DecodeJob, "advance", counted)
    stub = vae_pb2_grpc.VaeServiceStub(channel)
    call = stub.Decode(requests(make_latents(11, 32, 32), output_format="tensor"), timeout=60)
    responses = [await call.read()]
    made = 0
    while batches > made:  # a busy machine takes its time to come to rest
        made = batches
        await asyncio.sleep(0.5)
    # 11 latent frames, then 33 parts of which gRPC's own window holds some.
    assert made < 11 + 20
    other = await decode(channel, make_latents(1, 32, 32))
    assert other[-1].done.video.num_frames == 1
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    assert frames_of(responses).shape == (1, 3, 41, 256, 256)


async def test_out_of_memory_frees_the_call_and_the_next_works(
    channel: grpc.aio.Channel, host: VaeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(host, monkeypatch)
    steps.error = torch.OutOfMemoryError("no room")

    async def failure() -> Exception:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await decode(channel, make_latents(3, 7, 9))
        return from_rpc_error(caught.value)

    error = await failure()
    assert isinstance(error, OutOfMemoryError)
    assert "no room" in str(error)
    steps.error = None
    await eventually(lambda: not _tensors_of_that_call())
    assert (await decode(channel, make_latents(2)))[-1].done.video.num_frames == 5


def _tensors_of_that_call() -> list[torch.Size]:
    found = [item for item in gc.get_objects() if type(item) is torch.Tensor]
    return [item.shape for item in found if item.dim() == 5 and item.shape[-1] % 9 == 0]


async def test_a_failing_decoder_is_internal(
    channel: grpc.aio.Channel, host: VaeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(host, monkeypatch)
    steps.error = RuntimeError("broken kernel")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await decode(channel, make_latents(2))
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "broken kernel" in caught.value.details()
    steps.error = None
    assert await decode(channel, make_latents(2))


@pytest.mark.parametrize(
    ("latents", "start", "field"),
    [
        (torch.zeros(1, 4, 1, 4, 4), {}, "latents"),
        (torch.full((1, 16, 1, 4, 4), torch.nan), {}, "latents"),
        (make_latents(1), {"output_format": "gif"}, "start.output_format"),
        (make_latents(1), {"fps": 0}, "start.fps"),
        (make_latents(1), {"name": "noise"}, "tensor"),
        (None, {}, "latents"),
    ],
)
async def test_invalid_requests(
    channel: grpc.aio.Channel, latents: torch.Tensor, start: dict[str, Any], field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await decode(channel, latents, **start)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidRequestError)
    assert [violation.field for violation in error.violations] == [field]


async def test_components(channel: grpc.aio.Channel, host: VaeHost) -> None:
    stub = component_pb2_grpc.ComponentServiceStub(channel)
    answer = await stub.GetComponents(component_pb2.GetComponentsRequest())
    (component,) = answer.components
    assert (component.name, component.model) == ("vae", "tiny-wan")
    assert component.state == component_pb2.COMPONENT_STATE_READY
    assert (component.device, component.dtype) == ("cpu", "float32")
    assert component.parameter_count == host.model().parameter_count > 10_000
    assert component.weight_bytes == 4 * component.parameter_count
    assert answer.memory[0].process == "vae"
    assert answer.memory[0].rss_bytes > 10 << 20
    assert answer.version


async def test_moving(channel: grpc.aio.Channel) -> None:
    await check_moving(channel, "vae", "transformer")


async def move(channel: grpc.aio.Channel, target: str) -> component_pb2.Component:
    stub = component_pb2_grpc.ComponentServiceStub(channel)
    request = component_pb2.MoveComponentRequest(name="vae", target=target)
    return (await stub.MoveComponent(request, timeout=30)).component


async def test_a_move_waits_for_the_latent_frame_in_work(
    channel: grpc.aio.Channel, host: VaeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await decode(channel, make_latents(3))
    begun, go_on = threading.Event(), threading.Event()
    order: list[str] = []
    compute = host.model()._decode_frame

    def held(*args: Any) -> torch.Tensor:
        begun.set()
        assert go_on.wait(20)
        order.append(f"frame {args[2]}")
        return compute(*args)

    monkeypatch.setattr(host.model(), "_decode_frame", held)
    monkeypatch.setattr(wan_vae, "move_module", lambda module, device: order.append("moved"))
    decoding = asyncio.create_task(decode(channel, make_latents(3)))
    assert await asyncio.to_thread(begun.wait, 20)
    moving = asyncio.create_task(move(channel, "cpu"))
    await asyncio.sleep(0.1)
    assert not moving.done()
    go_on.set()
    assert (await moving).device == "cpu"
    assert (await decoding)[:-1] == expected[:-1]
    assert order.index("moved") > order.index("frame 0")
    assert sorted(order) == ["frame 0", "frame 1", "frame 2", "moved"]


async def test_what_does_not_fit_stays_and_works(
    channel: grpc.aio.Channel, host: VaeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await decode(channel, make_latents(2))

    def full(module: torch.nn.Module, device: torch.device) -> None:
        raise OutOfMemoryError(f"no room on {device}")

    monkeypatch.setattr(wan_vae, "move_module", full)
    monkeypatch.setattr(host, "device", torch.device("cuda", 0))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await move(channel, "device")
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(from_rpc_error(caught.value), OutOfMemoryError)
    assert host.components()[0].device == "cpu"
    assert (await decode(channel, make_latents(2)))[:-1] == expected[:-1]


@pytest.mark.parametrize("level", [0, 1, 3])
async def test_untiled_decode_is_told_where_tiles_were_asked_for(
    level: int, ckpt_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = [f"models.ckpt_dir={ckpt_dir}", "infer.device=cpu"]
    host = VaeHost(config.load([*overrides, f"infer.diffusion.low_mem_level={level}"]))
    await host.load()
    await host.close()
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [f"low_mem_level={level}" in message for message in warned] == [True] * bool(level)


@pytest.fixture
async def unloaded(host: VaeHost, tmp_path: Path) -> AsyncIterator[tuple[Server, grpc.aio.Channel]]:
    server = Server(host, f"unix:{tmp_path}/unloaded.sock")
    await server.start()
    async with dial(server.address) as channel:
        yield server, channel
    await server.stop(0)


async def test_unavailable_until_loaded_and_while_draining(
    unloaded: tuple[Server, grpc.aio.Channel], host: VaeHost
) -> None:
    server, channel = unloaded

    async def state() -> int:
        stub = component_pb2_grpc.ComponentServiceStub(channel)
        answer = await stub.GetComponents(component_pb2.GetComponentsRequest())
        return answer.components[0].state

    async def check_refused() -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await decode(channel, make_latents(1))
        assert isinstance(from_rpc_error(caught.value), UnavailableError)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await move(channel, "cpu")
        assert isinstance(from_rpc_error(caught.value), UnavailableError)

    assert await state() == component_pb2.COMPONENT_STATE_LOADING
    await check_refused()
    await server.load()
    assert await state() == component_pb2.COMPONENT_STATE_READY
    assert await decode(channel, make_latents(1))
    await host.drain()
    assert await state() == component_pb2.COMPONENT_STATE_DRAINING
    await check_refused()


async def test_failed_load_is_reported(settings: Config, tmp_path: Path) -> None:
    host = VaeHost(config.load([f"models.ckpt_dir={tmp_path}"]))
    with pytest.raises(CheckpointNotFoundError, match="vae"):
        await host.load()
    assert host.components()[0].state == component_pb2.COMPONENT_STATE_FAILED
    assert str(tmp_path) in host.components()[0].detail
    await host.close()


async def test_no_checkpoint_is_named(settings: Config) -> None:
    host = VaeHost(config.load(["models.ckpt_dir=null"]))
    with pytest.raises(ConfigError, match=r"models\.ckpt_dir"):
        await host.load()
    await host.close()

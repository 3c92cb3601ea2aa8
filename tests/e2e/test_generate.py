"""Prompt in, video out, over real sockets between real processes."""

import hashlib
import io
import json
import shutil
import subprocess
import time

import av
import grpc
import pytest

from chitu_diffusion.client import AsyncClient, Client
from chitu_diffusion.rpc.channel import is_serving
from chitu_diffusion.v1 import dit_pb2, generation_pb2, generation_pb2_grpc
from tests.e2e.conftest import ROOT
from tools.tiny_wan.evaluate import judge

PROMPT = "a red circle moving left on a black background"


def read_video(data: bytes):
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        return frames, stream.average_rate, stream.codec_context.name, container.metadata


@pytest.fixture(scope="session")
def result(tiny_wan):
    with Client(tiny_wan.addresses["orchestrator"]) as client:
        return client.generate(PROMPT, seed=7)


def test_the_video_shows_what_the_prompt_says(result):
    import numpy as np

    frames, *_ = read_video(result.data)
    verdict = judge(np.stack(frames))
    assert (verdict.colour, verdict.direction, verdict.background) == ("red", "left", "black")


def test_the_file_is_what_the_report_says(result):
    frames, fps, codec, metadata = read_video(result.data)
    params, video = result.report.params, result.video
    assert len(frames) == params.num_frames == video.num_frames == 9
    assert frames[0].shape == (params.height, params.width, 3) == (video.height, video.width, 3)
    assert fps == params.fps == video.fps
    assert codec == video.codec == "h264"
    assert video.byte_size == len(result.data)
    assert metadata["seed"] == "7"
    assert metadata["prompt_sha256"] == hashlib.sha256(PROMPT.encode()).hexdigest()


def test_the_report_tells_how_to_make_it_again(tiny_wan, result):
    with Client(tiny_wan.addresses["orchestrator"]) as client:
        again = client.generate(PROMPT, seed=result.report.params.seed)
    assert again.video.sha256 == result.video.sha256
    assert [s.step for s in result.report.steps] == list(range(20))
    assert not any(s.reused for s in result.report.steps)
    assert all(s.service.peak_memory_bytes > 0 for s in result.report.stages)
    assert result.report.params.attn_type == "sdpa"


async def test_the_async_client_gets_the_same_file(tiny_wan, result):
    async with AsyncClient(tiny_wan.addresses["orchestrator"]) as client:
        events = []
        other = await client.generate(PROMPT, seed=7, on_event=events.append)
    assert other.video.sha256 == result.video.sha256
    kinds = list(dict.fromkeys(e.WhichOneof("event") for e in events))
    assert kinds == ["queued", "encoding", "denoising", "decoding", "muxing", "done"]
    steps = [e.denoising.step for e in events if e.HasField("denoising")]
    assert steps == list(range(21))


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node with npm")
def test_a_node_client_gets_the_same_file(tiny_wan, result, tmp_path):
    example = ROOT / "examples" / "node"
    if not (example / "node_modules").is_dir():
        subprocess.run(["npm", "ci"], cwd=example, check=True, capture_output=True, timeout=110)
    output = tmp_path / "node.mp4"
    run = subprocess.run(
        ["node", "generate.mjs", tiny_wan.addresses["orchestrator"], output, PROMPT, "seed=7"],
        cwd=example,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == result.video.sha256
    assert hashlib.sha256(output.read_bytes()).hexdigest() == result.video.sha256


def test_sizes_frames_and_fps_are_obeyed(tiny_wan):
    with Client(tiny_wan.addresses["orchestrator"]) as client:
        for height, width, num_frames in ((96, 64, 5), (64, 112, 1)):
            other = client.generate(
                "x",
                height=height,
                width=width,
                num_frames=num_frames,
                fps=24,
                num_inference_steps=2,
            )
            frames, fps, *_ = read_video(other.data)
            assert len(frames) == num_frames
            assert frames[0].shape == (height, width, 3)
            assert fps == 24


def test_an_empty_prompt_and_a_long_one_work(tiny_wan):
    with Client(tiny_wan.addresses["orchestrator"]) as client:
        empty = client.generate("", num_inference_steps=1)
        assert empty.report.prompt.token_count == 1
        long = client.generate("red circle " * 200, num_inference_steps=1)
        assert long.report.prompt.truncated
        assert any("tokens" in w for w in long.report.warnings)


@pytest.mark.parametrize("solver", ["unipc", "dpm++", "euler"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_every_solver_works_with_few_steps(tiny_wan, solver, steps):
    with Client(tiny_wan.addresses["orchestrator"]) as client:
        other = client.generate("x", solver=solver, num_inference_steps=steps, seed=1)
    assert len(other.report.steps) == steps


def test_bad_input_is_the_same_value_error_everywhere(tiny_wan):
    with Client(tiny_wan.addresses["orchestrator"]) as client:
        with pytest.raises(ValueError, match=r"params\.num_frames: 16"):
            client.generate("x", num_frames=16)  # refused before it is sent
        with pytest.raises(ValueError, match=r"params\.num_inference_steps: 5000: at most 1000"):
            client.generate("x", num_inference_steps=5000)  # only the server knows its limit
        with pytest.raises(ValueError, match=r"params\.model: 'sora': must be one of 'tiny-wan'"):
            client.generate("x", model="sora")
        assert client.generate("x", num_inference_steps=1).data


def test_a_closed_channel_stops_the_steps(tiny_wan):
    address = tiny_wan.addresses["orchestrator"]
    channel = grpc.insecure_channel(address)
    params = generation_pb2.GenerationParams(prompt="x", num_inference_steps=1000)
    call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(
        generation_pb2.GenerateRequest(params=params)
    )
    for response in call:
        task_id = response.event.task_id
        if response.event.denoising.step >= 3:
            break
    channel.close()
    with Client(address) as client:
        last = list(client.watch(task_id))[-1]
        assert last.cancelled.reason == "disconnect"
        # The pool is free again at once, not after the other 990 steps.
        assert client.generate("x", num_inference_steps=1).report.queue_seconds < 5


def test_health_answers_while_steps_run(tiny_wan):
    with Client(tiny_wan.addresses["orchestrator"]) as client:
        task = client.submit("x", num_inference_steps=1000, height=128, width=128)
        next(e for e in client.watch(task.id) if e.denoising.step >= 1)
        slowest = 0.0
        for _ in range(20):
            began = time.monotonic()
            assert is_serving(tiny_wan.addresses["dit"], "chitu_diffusion.v1.DitService", 5)
            assert client.backend().running_tasks == 1
            slowest = max(slowest, time.monotonic() - began)
        client.cancel(task.id)
    assert slowest < 1


def test_two_experts_share_the_steps_at_the_boundary(tiny_wan22):
    with Client(tiny_wan22.addresses["orchestrator"]) as client:
        two = client.generate(PROMPT, seed=7, num_inference_steps=10)
        high, low = dit_pb2.EXPERT_HIGH_NOISE, dit_pb2.EXPERT_LOW_NOISE
        experts = [(s.timestep >= 875, s.expert) for s in two.report.steps]
        assert set(experts) == {(True, high), (False, low)}
        all_low = client.generate(PROMPT, seed=7, num_inference_steps=10, boundary_ratio=1.0)
        assert {s.expert for s in all_low.report.steps} == {low}
        assert all_low.video.sha256 != two.video.sha256
        assert json.dumps(two.report.params.boundary_ratio) == "0.875"

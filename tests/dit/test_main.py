"""The service as a process: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chitu_diffusion.v1 import dit_pb2, dit_pb2_grpc
from tests.dit.conftest import SMALL

SIZES = ("hidden_size", "depth", "num_heads", "ffn_dim", "freq_dim", "text_dim", "text_len")
OVERRIDES = [f"models.transformer.{size}={getattr(SMALL, size)}" for size in SIZES]


def command(*overrides: str) -> list[str]:
    return [sys.executable, "-m", "services.dit", "models=tiny-wan", *OVERRIDES, *overrides]


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["models.ckpt_dir=nowhere"], 1, "nowhere does not exist"),
        (["infer.device=cuda:99"], 2, "infer.device='cuda:99'"),
        (["infer.device=cpu", "infer.attn_type=flash_attn"], 2, "infer.attn_type='flash_attn'"),
    ],
)
def test_start_that_fails(
    tmp_path: Path, overrides: list[str], code: int, words: str, socket_dir: Path
) -> None:
    listen = f"services.dit.listen=unix:{socket_dir}/dit"
    ended = subprocess.run(
        command(*overrides, listen), capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == code
    assert words in ended.stderr.splitlines()[-1]


def test_serves_until_sigterm(checkpoints: dict[str, Path], socket_dir: Path) -> None:
    listen = f"unix:{socket_dir}/dit"
    overrides = [
        f"models.ckpt_dir={checkpoints['one-original']}",
        f"services.dit.listen={listen}",
        "infer.device=cpu",
    ]
    process = subprocess.Popen(
        command(*overrides), stdout=subprocess.PIPE, text=True, env=os.environ.copy()
    )
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["address"] == listen
        with grpc.insecure_channel(listen) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service="chitu_diffusion.v1.DitService"), timeout=60
            )
            for response in watch:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    break
            params = dit_pb2.DenoiseParams(
                num_frames=1,
                height=16,
                width=16,
                num_inference_steps=2,
                guidance_scale=1,
                flow_shift=3,
                solver="euler",
            )
            plan = dit_pb2_grpc.DitServiceStub(channel).Plan(dit_pb2.PlanRequest(params=params))
            assert [step.timestep for step in plan.steps] == [1000, 750]
            watch.cancel()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()

"""A service with a weight that cannot be read ends at once and never reports SERVING."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.conftest import ROOT

TINY = ROOT / "assets" / "tiny-wan"
HOSTS = {"encoder": "text_encoder", "dit": "transformer", "vae": "vae"}


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(TINY, tmp_path / "checkpoint"))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def damage_header(file: Path) -> None:
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


@pytest.mark.parametrize("damage", [truncate, damage_header, Path.unlink])
@pytest.mark.parametrize("service", HOSTS)
def test_a_damaged_file_is_named_at_start(checkpoint, service, damage):
    folder = checkpoint / HOSTS[service]
    (file,) = folder.glob("*.safetensors")
    damage(file)
    began = time.monotonic()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            f"services.{service}",
            f"models.ckpt_dir={checkpoint}",
            f"services.{service}.listen=127.0.0.1:0",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    address = json.loads(process.stdout.readline())["address"]
    seen = set()
    with grpc.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="chitu_diffusion.v1.ComponentService")
        )
        try:
            for answer in watch:
                seen.add(answer.status)
        except grpc.RpcError:
            pass
    _, log = process.communicate(timeout=30)
    assert process.returncode == 1
    assert str(checkpoint if damage is Path.unlink else file) in log.splitlines()[-1]
    assert health_pb2.HealthCheckResponse.SERVING not in seen
    assert time.monotonic() - began < 30

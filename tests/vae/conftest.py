"""A random tiny VAE in diffusers' layout, and a running VAE service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import grpc.aio
import pytest
import torch
from diffusers import AutoencoderKLWan

from chitu_diffusion import config
from chitu_diffusion.config.schema import Config
from chitu_diffusion.rpc.channel import dial
from chitu_diffusion.rpc.server import Server
from chitu_diffusion.v1 import vae_pb2
from chitu_diffusion.wire import tensor_parts
from services.vae.host import VaeHost

CHANNELS = 16


def save_vae(folder: Path) -> AutoencoderKLWan:
    """Strides (4, 8, 8); outputs that fill [-1, 1] and clip a little; its own mean and std."""
    torch.manual_seed(0)
    model = AutoencoderKLWan(
        base_dim=4,
        z_dim=CHANNELS,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        latents_mean=[0.1 * index - 0.8 for index in range(CHANNELS)],
        latents_std=[0.5 + 0.1 * index for index in range(CHANNELS)],
    )
    with torch.no_grad():
        model.decoder.conv_out.weight.mul_(3)
    model.save_pretrained(folder)
    return model.eval()


def make_latents(frames: int, height: int = 4, width: int = 4, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, CHANNELS, frames, height, width, generator=generator)


def requests(
    latents: torch.Tensor | None,
    output_format: str = "mp4",
    fps: int = 16,
    metadata: dict[str, str] | None = None,
    name: str = "latents",
) -> Iterator[vae_pb2.DecodeRequest]:
    yield vae_pb2.DecodeRequest(
        start=vae_pb2.DecodeStart(
            task_id="task-1", output_format=output_format, fps=fps, metadata=metadata or {}
        )
    )
    if latents is not None:
        for part in tensor_parts(name, latents):
            yield vae_pb2.DecodeRequest(tensor=part)


def file_of(responses: Iterable[vae_pb2.DecodeResponse]) -> bytes:
    """The file's bytes; checks that offsets rise without gaps."""
    data = bytearray()
    for response in responses:
        if response.WhichOneof("response") == "chunk":
            assert response.chunk.offset == len(data)
            assert 0 < len(response.chunk.data) <= 1 << 20
            data += response.chunk.data
    return bytes(data)


@pytest.fixture(scope="session")
def ckpt_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vae-checkpoint")
    save_vae(folder / "vae")
    return folder


@pytest.fixture(scope="session")
def reference(ckpt_dir: Path) -> AutoencoderKLWan:
    """diffusers' own loading."""
    return AutoencoderKLWan.from_pretrained(ckpt_dir / "vae").eval()


@pytest.fixture(scope="session")
def settings(ckpt_dir: Path) -> Config:
    return config.load(
        [
            f"models.ckpt_dir={ckpt_dir}",
            "infer.device=cpu",
            "services.vae.preset=veryfast",
        ]
    )


@pytest.fixture
async def host(settings: Config) -> VaeHost:
    return VaeHost(settings)


@pytest.fixture
async def channel(host: VaeHost, tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    server = Server(host, f"unix:{tmp_path}/vae.sock")
    await server.start()
    await server.load()
    async with dial(server.address) as channel:
        yield channel
    await server.stop(0)

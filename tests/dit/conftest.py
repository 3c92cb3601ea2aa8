"""A small random Wan in both published layouts, made with diffusers' own class.

All weights are random: the published initialisation has zeros in it, which would hide faults.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file

from chitu_diffusion import config as configuration
from chitu_diffusion.config.schema import Config, TransformerConfig
from chitu_diffusion.rpc.server import Server
from services.common.checkpoint import load_weights
from services.dit import denoiser as denoiser_module
from services.dit.denoiser import DenoiseParams
from services.dit.guidance import guided_velocity
from services.dit.host import DitHost
from services.dit.models.wan.transformer import WanTransformer
from services.dit.models.wan.weights import diffusers_name, weight_dtype

torch.set_num_threads(1)

CPU = torch.device("cpu")
TEXT_LEN, TEXT_DIM = 20, 24
SMALL = TransformerConfig(
    hidden_size=48,
    depth=2,
    num_heads=4,
    ffn_dim=64,
    freq_dim=32,
    text_dim=TEXT_DIM,
    text_len=TEXT_LEN,
)
_TO_ORIGINAL = (
    (r"condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
    (r"condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
    (r"condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
    (r"condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
    (r"condition_embedder\.time_proj", "time_projection.1"),
    (r"^proj_out", "head.head"),
    (r"^scale_shift_table", "head.modulation"),
    (r"attn1\.to_out\.0", "self_attn.o"),
    (r"attn2\.to_out\.0", "cross_attn.o"),
    (r"attn1\.(?:to_)?", "self_attn."),
    (r"attn2\.(?:to_)?", "cross_attn."),
    (r"\.norm2\.", ".norm3."),
    (r"ffn\.net\.0\.proj", "ffn.0"),
    (r"ffn\.net\.2", "ffn.2"),
    (r"\.scale_shift_table", ".modulation"),
)


def make_reference(seed: int, config: TransformerConfig = SMALL) -> WanTransformer3DModel:
    """Diffusers' model with random weights everywhere."""
    model = WanTransformer3DModel(
        num_attention_heads=config.num_heads,
        attention_head_dim=config.hidden_size // config.num_heads,
        text_dim=config.text_dim,
        freq_dim=config.freq_dim,
        ffn_dim=config.ffn_dim,
        num_layers=config.depth,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 100
            parameter.copy_(noise / fan_in**0.5 + (".norm" in name and "weight" in name))
    return model.eval()


def original_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights under the names of the original publication."""
    renamed = {}
    for name, tensor in state.items():
        for pattern, replacement in _TO_ORIGINAL:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor.contiguous()
    return renamed


def load_ours(
    folder: Path, dtype: torch.dtype = torch.float32, config: TransformerConfig = SMALL
) -> WanTransformer:
    with torch.device("meta"):
        model = WanTransformer(config)
    load_weights(
        model,
        folder,
        rename=diffusers_name,
        dtype=lambda name: weight_dtype(name, dtype),
        device=CPU,
    )
    model.fuse()
    return model.eval()


def make_embeds(seed: int, length: int, text_len: int = TEXT_LEN) -> torch.Tensor:
    """Rows (1, text_len, text_dim), zero behind `length`."""
    rows = torch.randn(1, text_len, TEXT_DIM, generator=torch.Generator().manual_seed(seed))
    rows[:, length:] = 0
    return rows


def make_params(**changes: object) -> DenoiseParams:
    """A small task of one expert."""
    fields: dict[str, object] = {
        "num_frames": 5,
        "height": 32,
        "width": 48,
        "num_inference_steps": 6,
        "guidance_scale": 4.0,
        "flow_shift": 3.0,
        "solver": "unipc",
        "seed": 11,
    }
    return DenoiseParams(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def experts() -> list[WanTransformer3DModel]:
    """Two models with different weights."""
    return [make_reference(1), make_reference(2)]


@pytest.fixture(scope="session")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory, experts: list[WanTransformer3DModel]
) -> dict[str, Path]:
    """Checkpoint folders: {one, two} experts x {diffusers, original} layout."""
    root = tmp_path_factory.mktemp("checkpoints")
    for model, name in zip(experts, ("transformer", "transformer_2"), strict=True):
        model.save_pretrained(root / "two-diffusers" / name)
    experts[0].save_pretrained(root / "one-diffusers" / "transformer")
    for model, name in zip(
        (experts[0], *experts),
        ("one-original", "two-original/high", "two-original/low"),
        strict=True,
    ):
        folder = root / (name if name.startswith("one") else f"{name}_noise_model")
        folder.mkdir(parents=True)
        weights = original_names(model.state_dict())
        save_file(weights, folder / "diffusion_pytorch_model.safetensors")
        (folder / "config.json").write_text(json.dumps({"_class_name": "WanModel"}))
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="session")
def make_config(checkpoints: dict[str, Path]) -> Callable[..., Config]:
    """Configurations of the small model: `make_config("one-diffusers", "infer.device=cpu")`."""

    def make(checkpoint: str = "one-diffusers", *overrides: str) -> Config:
        model = "tiny-wan2.2" if checkpoint.startswith("two") else "tiny-wan"
        sizes = ("hidden_size", "depth", "num_heads", "ffn_dim", "freq_dim", "text_dim", "text_len")
        return configuration.load(
            [
                f"models={model}",
                f"models.ckpt_dir={checkpoints[checkpoint]}",
                *(f"models.transformer.{size}={getattr(SMALL, size)}" for size in sizes),
                "infer.device=cpu",
                "infer.num_threads=1",
                "services.dit.warmup=off",
                *overrides,
            ]
        )

    return make


class Gate:
    """Stands in for the model's forward: waits before each step until it is let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.real = guided_velocity
        self.entered: list[int] = []
        self.arrivals = threading.Semaphore(0)
        self.tickets = threading.Semaphore(0)
        self.fail: Exception | None = None
        monkeypatch.setattr(denoiser_module, "guided_velocity", self)

    def __call__(self, model: Any, latents: Any, step: int, *rest: Any) -> torch.Tensor:
        self.entered.append(step)
        self.arrivals.release()
        assert self.tickets.acquire(timeout=20)
        if self.fail is not None:
            failure, self.fail = self.fail, None
            raise failure
        return self.real(model, latents, step, *rest)

    def let(self, steps: int) -> None:
        self.tickets.release(steps)

    async def reached(self, count: int) -> None:
        """Wait until `count` more steps have begun."""
        for _ in range(count):
            assert await asyncio.to_thread(self.arrivals.acquire, timeout=20)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Holds every step back until it is let through."""
    return Gate(monkeypatch)


async def serve(config: Config, listen: str, load: bool = True) -> AsyncIterator[grpc.aio.Channel]:
    server = Server(DitHost(config), listen)
    await server.start()
    if load:
        await server.load()
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield channel
    await server.stop(0)

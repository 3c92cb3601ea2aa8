"""The clips the transformer learns from, encoded once."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from . import shapes
from .train_vae import load_vae, to_model, use_fast_layout
from .whole_clip import encode_moments

CLIPS_A_SCENE = 10
BATCH = 8


def _scene_of(index: int) -> shapes.Scene:
    scenes = shapes.training_scenes()
    return scenes[index % len(scenes)]


@torch.no_grad()
def _encode(vae: AutoencoderKLWan, seed: int) -> Tensor:
    """Render and encode all training clips: float32 (N, 16, 3, 8, 8), clip n of scene n % 168."""
    total = CLIPS_A_SCENE * len(shapes.training_scenes())
    parts = []
    since = time.monotonic()
    use_fast_layout(vae)
    for first in range(0, total, BATCH):
        clips = [
            shapes.render(_scene_of(index), np.random.default_rng((seed, 1, index)))
            for index in range(first, min(first + BATCH, total))
        ]
        batch = to_model(np.stack(clips)).to(memory_format=torch.channels_last_3d)
        with torch.autocast("cpu", torch.bfloat16):  # as the VAE was trained
            parts.append(encode_moments(vae, batch).float().chunk(2, dim=1)[0])
        if first // BATCH % 50 == 49:
            print(f"encode {first + BATCH}/{total} {time.monotonic() - since:.0f} s", flush=True)
    return torch.cat(parts)


def training_latents(work: Path, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return latents (N, 16, 3, 8, 8), normalised, and the mean and std (16,) taken off them.

    They are made by the VAE in `work/vae.pt` and kept in `work/latents.pt`.
    """
    path = work / "latents.pt"
    if not path.exists():
        torch.save(_encode(load_vae(work), seed), path)
    latents = torch.load(path, weights_only=True)
    mean = latents.mean(dim=(0, 2, 3, 4))
    std = latents.std(dim=(0, 2, 3, 4))
    shape = (1, -1, 1, 1, 1)
    return (latents - mean.view(shape)) / std.view(shape), mean, std

"""Train the tiny Wan VAE on rendered clips and measure its latents."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from numpy.typing import NDArray
from torch import Tensor

from . import shapes
from .models import build_vae
from .progress import Progress
from .sheet import save_sheet
from .whole_clip import decode_unclamped, encode_moments, start_from_pictures

PICTURE_RATE, CLIP_RATE = 2e-3, 1e-3  # learning rates; clips come in smaller batches
WARM_UP = 50  # steps
OBJECT_WEIGHT = 6.0
KL_WEIGHT = 1e-5
# The decoder always sees at least this much noise, so that it forgives small errors of the DiT.
LEAST_NOISE = 0.1
NOISE_FROM = 300  # steps without noise at first: a faint signal drowns in it and never grows
# Still pictures first: cheap steps that teach space and colour (see `start_from_pictures`).
PICTURE_SHARE, PICTURES = 0.25, 12
# (frames, clips in a batch, share of the steps). Short clips alone fall apart after their end.
MIX = ((1, 12, 0.08), (5, 4, 0.2), (9, 2, 0.32), (17, 1, 0.4))
# Clips in colours from all of RGB. With black, white and gray alone behind small objects, colour
# is a small part of the loss, and it comes last.
ANY_COLOURS_SHARE = 0.5


def to_model(clips: NDArray[np.uint8]) -> Tensor:
    """uint8 (B, F, H, W, 3) -> float32 (B, 3, F, H, W) in [-1, 1]."""
    return torch.from_numpy(clips).permute(0, 4, 1, 2, 3).float() / 127.5 - 1


def to_pixels(clips: Tensor) -> NDArray[np.uint8]:
    """(B, 3, F, H, W), nominally in [-1, 1] -> uint8 (B, F, H, W, 3)."""
    levels = (clips.float().clamp(-1, 1) + 1) * 127.5
    return levels.round().byte().permute(0, 2, 3, 4, 1).numpy()


def _batch(step: int, total: int, seed: int) -> Tensor:
    """Render the clips of one step: (B, 3, F, H, W); a function of the arguments alone."""
    rng = np.random.default_rng((seed, step))
    frames, count = 1, PICTURES
    if step >= PICTURE_SHARE * total:
        frames, count, _ = MIX[rng.choice(len(MIX), p=[share for *_, share in MIX])]
    scenes = shapes.training_scenes()
    clips = []
    for index in rng.integers(len(scenes), size=count):
        start = rng.integers(shapes.LONG.frames - frames + 1)
        any_colours = rng.uniform() < ANY_COLOURS_SHARE
        clip = shapes.render(scenes[index], rng, take=shapes.LONG, any_colours=any_colours)
        clips.append(clip[start : start + frames])
    return to_model(np.stack(clips))


def object_mask(clip: Tensor) -> Tensor:
    """1.0 where a pixel is not background: (B, 3, F, H, W) -> (B, 1, F, H, W).

    The corner pixel is always background.
    """
    return ((clip - clip[..., :1, :1]).abs().amax(dim=1, keepdim=True) > 0.02).float()


def _loss(vae: AutoencoderKLWan, clip: Tensor, noise: Tensor) -> tuple[Tensor, float]:
    """Return the loss and the mean absolute error on the object, in levels of 0..255."""
    with torch.autocast("cpu", torch.bfloat16):
        mean, log_var = encode_moments(vae, clip).float().chunk(2, dim=1)
        log_var = log_var.clamp(-20, 10)
        std = (0.5 * log_var).exp()
        decoded = decode_unclamped(vae, mean + noise * std.clamp(min=LEAST_NOISE)).float()
    mask = object_mask(clip)
    weight = 1 + OBJECT_WEIGHT * mask
    error = (decoded - clip).abs()
    pixels = (weight * (error + 2 * error.square())).mean() / weight.mean()
    kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).mean()
    on_object = (error.detach() * mask).sum() / (3 * mask.sum()) * 127.5
    return pixels + KL_WEIGHT * kl, on_object.item()


def _rate(step: int, total: int) -> float:
    """Return the learning rate: warm-up, then linear to nothing."""
    peak = PICTURE_RATE if step < PICTURE_SHARE * total else CLIP_RATE
    return peak * min(1.0, (step + 1) / WARM_UP) * max(0.0, 1 - step / total)


def reconstruct(vae: AutoencoderKLWan, clips: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Encode and decode uint8 clips (B, F, H, W, 3) with diffusers' own chunked passes."""
    with torch.no_grad():
        return to_pixels(vae.decode(vae.encode(to_model(clips)).latent_dist.mode()).sample)


def _look(vae: AutoencoderKLWan, path: Path) -> None:
    """Write originals and reconstructions of a few held-out scenes, one above the other."""
    rng = np.random.default_rng(7)
    clips = np.stack(
        [shapes.render(scene, rng, take=shapes.LONG) for scene in shapes.held_out_scenes()[::8]]
    )
    pairs = [row for pair in zip(clips, reconstruct(vae, clips), strict=True) for row in pair]
    save_sheet(pairs, path, every=2)


def use_fast_layout(vae: AutoencoderKLWan) -> None:
    """Lay the weights out as oneDNN's 3-D convolutions are fastest."""
    for parameter in vae.parameters():
        if parameter.dim() == 5:
            parameter.data = parameter.data.to(memory_format=torch.channels_last_3d)


def train_vae(work: Path, steps: int, seed: int) -> None:
    """Train for `steps` steps in all, going on from `work/vae.pt` where there is one."""
    torch.manual_seed(seed)
    vae = build_vae()
    start_from_pictures(vae)
    use_fast_layout(vae)
    optimiser = torch.optim.AdamW(vae.parameters(), PICTURE_RATE, betas=(0.9, 0.95))
    state_path, first = work / "vae.pt", 0
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        vae.load_state_dict(state["vae"])
        optimiser.load_state_dict(state["optimiser"])
        first = state["step"]
    progress = Progress("vae", steps)
    for step in range(first, steps):
        for group in optimiser.param_groups:
            group["lr"] = _rate(step, steps)
        clip = _batch(step, steps, seed)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        batch, _, frames, height, width = clip.shape
        latent_shape = (batch, vae.config.z_dim, 1 + frames // 4, height // 8, width // 8)
        noise = torch.randn(latent_shape, generator=generator) * float(step >= NOISE_FROM)
        loss, on_object = _loss(vae, clip.to(memory_format=torch.channels_last_3d), noise)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0).item()
        if math.isfinite(norm):
            optimiser.step()
        progress.update(step, loss=loss.item(), object=on_object, norm=norm)
        if (step + 1) % 200 == 0 or step + 1 == steps:
            state = {"vae": vae.state_dict(), "optimiser": optimiser.state_dict(), "step": step + 1}
            torch.save(state, state_path.with_suffix(".tmp"))
            state_path.with_suffix(".tmp").replace(state_path)
        if (step + 1) % 400 == 0 or step + 1 == steps:
            _look(vae, work / "sheets" / f"vae-{step + 1:05d}.png")


def load_vae(work: Path) -> AutoencoderKLWan:
    """Return the VAE of `work/vae.pt`, whether it is finished or not."""
    vae = build_vae()
    vae.load_state_dict(torch.load(work / "vae.pt", weights_only=True)["vae"])
    return vae.eval()

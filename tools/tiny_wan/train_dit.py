"""Train the transformer with its text encoder, and then the two experts, by flow matching."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from transformers import UMT5EncoderModel

from . import shapes
from .latents import training_latents
from .models import BOUNDARY, FLOW_SHIFT, build_text_encoder, build_transformer
from .progress import Progress
from .text import Captions, prompt_rows
from .tokenizer import VOCAB_SIZE

BATCH = 32
LEARNING_RATE = 1e-3
EXPERT_RATE = 3e-4
WARM_UP = 100  # steps
EMA = 0.999


class Pair(nn.Module):
    """The transformer and the text encoder, which are trained, averaged and saved together."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer: WanTransformer3DModel = build_transformer()
        self.text_encoder: UMT5EncoderModel = build_text_encoder(VOCAB_SIZE)

    def forward(self, noisy: Tensor, sigma: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """Predict noise - clean, (B, 16, T, h, w), at sigma (B,) in 0..1."""
        rows = prompt_rows(self.text_encoder, ids, mask)
        return self.transformer(noisy, 1000 * sigma, rows, return_dict=False)[0]


def draw_sigma(rng: np.random.Generator, count: int, low: float, high: float) -> Tensor:
    """Draw `count` noise levels of [low, high) as the shifted sampler visits them."""
    ends = [sigma / (FLOW_SHIFT - (FLOW_SHIFT - 1) * sigma) for sigma in (low, high)]
    # One draw from every `count`-th of the range: less scatter of the loss between steps.
    u = ends[0] + (ends[1] - ends[0]) * (np.arange(count) + rng.uniform(size=count)) / count
    return torch.from_numpy(FLOW_SHIFT * u / (1 + (FLOW_SHIFT - 1) * u)).float()


def _rate(step: int, total: int) -> float:
    """Return the learning rate as a part of its peak: warm-up, then half a cosine."""
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / total))


def _flow_loss(
    pair: Pair, latents: Tensor, captions: Captions, sigmas: tuple[float, float], seed: list[int]
) -> Tensor:
    """Return the flow-matching loss of one batch, which `seed` alone decides."""
    rng = np.random.default_rng(seed)
    scenes = shapes.training_scenes()
    indices = rng.integers(len(latents), size=BATCH)
    texts = [shapes.random_caption(scenes[index % len(scenes)], rng) for index in indices]
    ids, mask = captions.batch(texts)
    clean = latents[torch.from_numpy(indices)]
    sigma = draw_sigma(rng, BATCH, *sigmas)
    noise = torch.from_numpy(rng.standard_normal(clean.shape, dtype=np.float32))
    spread = sigma.view(-1, 1, 1, 1, 1)
    flow = pair((1 - spread) * clean + spread * noise, sigma, ids, mask)
    return (flow - (noise - clean)).square().mean()


@torch.no_grad()
def _average(mean: nn.Module, model: nn.Module, step: int) -> None:
    """Move the running mean of the weights towards the model's, faster in the beginning."""
    decay = min(EMA, (1 + step) / (10 + step))
    for old, new in zip(mean.parameters(), model.parameters(), strict=True):
        old.lerp_(new, 1 - decay)


def _train(
    name: str,
    work: Path,
    start: Pair,
    steps: int,
    seed: list[int],
    *,
    peak: float,
    sigmas: tuple[float, float] = (0.0, 1.0),
    text: bool = True,
) -> Pair:
    """Train a copy of `start` on noise levels `sigmas`; return the mean of its weights.

    Goes on from `work/{name}.pt` where there is one. Without `text` the text encoder is frozen.
    """
    latents, _, _ = training_latents(work, seed[0])
    captions = Captions(work / "tokenizer")
    pair, mean = copy.deepcopy(start).train(), copy.deepcopy(start).eval()
    pair.text_encoder.requires_grad_(text)
    trained = [parameter for parameter in pair.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, peak, betas=(0.9, 0.95), weight_decay=0.01)
    path, first = work / f"{name}.pt", 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        pair.load_state_dict(state["pair"])
        mean.load_state_dict(state["mean"])
        optimiser.load_state_dict(state["optimiser"])
        first = state["step"]
    progress = Progress(name, steps)
    for step in range(first, steps):
        for group in optimiser.param_groups:
            group["lr"] = peak * _rate(step, steps)
        loss = _flow_loss(pair, latents, captions, sigmas, [*seed, step])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained, 1.0).item()
        if math.isfinite(norm):
            optimiser.step()
        _average(mean, pair, step)
        progress.update(step, loss=loss.item(), norm=norm)
        if (step + 1) % 200 == 0 or step + 1 == steps:
            state = {
                "pair": pair.state_dict(),
                "mean": mean.state_dict(),
                "optimiser": optimiser.state_dict(),
                "step": step + 1,
            }
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)
    return mean


def load_pair(work: Path, name: str) -> Pair:
    """Return the averaged weights of `work/{name}.pt`, whether they are finished or not."""
    pair = Pair()
    pair.load_state_dict(torch.load(work / f"{name}.pt", weights_only=True)["mean"])
    return pair.eval()


def train_dit(work: Path, steps: int, seed: int) -> None:
    """Train transformer and text encoder together over all noise levels -> `work/dit.pt`."""
    torch.manual_seed(seed)
    _train("dit", work, Pair(), steps, [seed, 2], peak=LEARNING_RATE)


def train_experts(work: Path, steps: int, seed: int) -> None:
    """Fine-tune `work/dit.pt` on either side of the boundary -> `work/high.pt`, `work/low.pt`.

    The experts share the text encoder, so it stays as it is.
    """
    start = load_pair(work, "dit")
    for number, name, sigmas in ((3, "high", (BOUNDARY, 1.0)), (4, "low", (0.0, BOUNDARY))):
        key = [seed, number]
        _train(name, work, start, steps, key, peak=EXPERT_RATE, sigmas=sigmas, text=False)

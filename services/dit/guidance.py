"""Classifier-free guidance (Ho & Salimans, 2022) on the velocity: v_neg + g (v_pos - v_neg)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.dit.attention import Attention
from services.dit.flexcache import BlockCache
from services.dit.models import Constants, Transformer
from services.dit.parallel import Parallel

# Tokens up to which one forward of both branches is faster than two. Measured on one EPYC core in
# float32, widths 192 and 768: 0.72-0.80 of the time at 32 tokens, 0.78-0.91 at 80, 0.92-1.01 at
# 180, above 1 from 320 on, where two branches do not fit in the cache. Not measured on CUDA.
BATCH_TOKENS = 128


@dataclass(frozen=True)
class Execution:
    """How forwards are carried out: what the model takes as arguments besides its data."""

    attention: Attention
    parallel: Parallel
    cache: BlockCache


def uses_negative(scale: float) -> bool:
    """Say whether a guidance scale needs the negative branch."""
    return scale > 1


def guided_velocity(
    model: Transformer,
    latents: torch.Tensor,
    step_index: int,
    constants: Constants,
    scale: float,
    how: Execution,
) -> torch.Tensor:
    """Return the velocity (1, C, F, H, W) float32 of latents (1, C, F, H, W).

    Args:
        model: the expert of this step.
        latents: float32.
        step_index: position in the plan.
        constants: of the positive branch; of `how.parallel.branches`, in order, if `scale` > 1.
        scale: guidance; at <= 1 only the positive branch is computed.
        how: kernels and layout.
    """

    def forward(latents: torch.Tensor, constants: Constants) -> torch.Tensor:
        velocity: torch.Tensor = model(
            latents,
            step_index,
            constants,
            attention=how.attention,
            parallel=how.parallel,
            cache=how.cache,
        )
        return velocity

    if not uses_negative(scale):
        return forward(latents, constants.branch(0))
    own = len(how.parallel.branches)
    if own == 1 or constants.num_tokens <= BATCH_TOKENS:
        velocities = forward(latents.expand(own, -1, -1, -1, -1), constants)
    else:
        velocities = torch.cat([forward(latents, constants.branch(n)) for n in range(own)])
    positive, negative = torch.split(how.parallel.gather_branches(velocities), 1)
    guided: torch.Tensor = negative + scale * (positive - negative)
    return guided

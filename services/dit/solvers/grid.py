"""Noise levels and timesteps of a solver's steps.

A grid on [0, 1] is shifted towards noise by s' = S s / (1 + (S - 1) s) (Esser et al., "Scaling
Rectified Flow Transformers", 2024, section 5.3.2), once, and here only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TRAIN_TIMESTEPS = 1000
SOLVERS = ("unipc", "dpm++", "euler")

# The noise level 1 has no finite log-SNR, so UniPC starts below it. Published as a float32, whose
# excess of 1e-8 also keeps whole timesteps from being cut to the number below.
_UNIPC_TOP = float(np.float32(1 - 1 / TRAIN_TIMESTEPS))


@dataclass(frozen=True)
class Grid:
    """Where the steps of a task are."""

    solver: str
    """Name of the solver it is for."""
    sigmas: tuple[float, ...]
    """N + 1 noise levels, falling from at most 1 to 0."""
    timesteps: tuple[float, ...]
    """N values for the transformer, 0 to 1000."""


def make_grid(solver: str, steps: int, shift: float) -> Grid:
    """Make the grid of `steps` >= 1 steps with a shift > 0.

    UniPC and DPM-Solver++ give the transformer whole timesteps, Euler fractional ones.
    """
    if solver == "unipc":
        levels = np.linspace(_UNIPC_TOP, 0.0, steps + 1)[:-1]
    else:
        levels = np.linspace(1.0, 0.0, steps + 1)[:-1]
    sigmas = shift * levels / (1.0 + (shift - 1.0) * levels)
    timesteps = sigmas * TRAIN_TIMESTEPS
    if solver != "euler":
        timesteps = timesteps.astype(np.int64)
    return Grid(solver, (*sigmas.tolist(), 0.0), tuple(map(float, timesteps)))

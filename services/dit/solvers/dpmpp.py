"""DPM-Solver++ 2M (Lu et al., "DPM-Solver++", 2022, algorithm 2), the midpoint form.

Alpha = 1 - sigma, lambda = log(alpha / sigma); the model's output becomes the clean sample
x - sigma v. The first step and the last, which ends at sigma 0, are of order 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from services.dit.solvers.state import SolverState


class DpmPlusPlus:
    """One task's integration."""

    name = "dpm++"

    def __init__(self, sigmas: Sequence[float]) -> None:
        self._sigmas = tuple(sigmas)
        self.step_index = 0
        self._order = 0
        self._previous: torch.Tensor | None = None
        """Clean sample predicted at the step before."""

    def step(self, velocity: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """Return the sample after the next step; velocity and sample float32, any shape."""
        i = self.step_index
        sigma, following = self._sigmas[i], self._sigmas[i + 1]
        clean = sample - sigma * velocity
        keep = following / sigma
        pull = (1 - following) - keep * (1 - sigma)
        previous = self._previous
        if previous is None or following == 0:
            self._order, moved = 1, sample * keep + clean * pull
        else:
            self._order, bend = 2, 0.5 * pull * self._inverse_ratio(i)
            moved = sample * keep + clean * (pull + bend) - previous * bend
        self._previous = clean
        self.step_index += 1
        return moved

    def _inverse_ratio(self, i: int) -> float:
        """Return this step's length in lambda over the previous one's; 0 if that was infinite."""
        before, here, after = (_log_snr(sigma) for sigma in self._sigmas[i - 1 : i + 2])
        return (after - here) / (here - before)

    def state(self) -> SolverState:
        """Return the last output."""
        tensors = {} if self._previous is None else {"solver.model_output.0": self._previous}
        return SolverState(self.name, self.step_index, self._order, tensors)

    def restore(self, state: SolverState) -> None:
        """Continue from `state`."""
        self.step_index, self._order = state.step, state.order
        self._previous = state.tensors["solver.model_output.0"] if state.step else None


def _log_snr(sigma: float) -> float:
    return -math.inf if sigma == 1 else math.log1p(-sigma) - math.log(sigma)

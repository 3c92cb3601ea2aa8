"""Euler's method on the flow's ODE dx/dsigma = v (Liu et al., "Flow Straight and Fast", 2022)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.dit.solvers.state import SolverState


class Euler:
    """One task's integration. Remembers nothing but its place."""

    name = "euler"

    def __init__(self, sigmas: Sequence[float]) -> None:
        self._sigmas = tuple(sigmas)
        self.step_index = 0

    def step(self, velocity: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """Return the sample after the next step; velocity and sample float32, any shape."""
        here, following = self._sigmas[self.step_index : self.step_index + 2]
        self.step_index += 1
        return sample + (following - here) * velocity

    def state(self) -> SolverState:
        """Return the place."""
        return SolverState(self.name, self.step_index, min(self.step_index, 1))

    def restore(self, state: SolverState) -> None:
        """Continue from `state`."""
        self.step_index = state.step

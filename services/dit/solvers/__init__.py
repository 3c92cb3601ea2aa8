"""Solvers of the flow's ODE dx/dsigma = v, and the grids of noise levels they run on.

A *solver* here is what some libraries call a scheduler.
"""

from __future__ import annotations

from typing import Protocol

import torch

from services.dit.solvers.dpmpp import DpmPlusPlus
from services.dit.solvers.euler import Euler
from services.dit.solvers.grid import SOLVERS, Grid, make_grid
from services.dit.solvers.state import SolverState, remembered
from services.dit.solvers.unipc import UniPC

__all__ = ["SOLVERS", "Grid", "Solver", "SolverState", "make_grid", "make_solver", "remembered"]


class Solver(Protocol):
    """One task's integration, from sigma of the first step to 0."""

    @property
    def step_index(self) -> int:
        """Steps done."""

    def step(self, velocity: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """Return the sample after the next step.

        Args:
            velocity: the model's output at `sample`, float32.
            sample: float32, what the step before returned.
        """

    def state(self) -> SolverState:
        """Return what the solver remembers. The tensors are shared, not copied."""

    def restore(self, state: SolverState) -> None:
        """Continue from a state of this solver on the same grid."""


def make_solver(grid: Grid) -> Solver:
    """Make the solver that a grid is for."""
    if grid.solver == "unipc":
        return UniPC(grid.sigmas)
    if grid.solver == "dpm++":
        return DpmPlusPlus(grid.sigmas)
    return Euler(grid.sigmas)

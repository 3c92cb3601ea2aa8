"""What a solver remembers between two steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class SolverState:
    """Enough to go on elsewhere: the sampling is deterministic from here."""

    solver: str
    """Name of the solver."""
    step: int
    """Steps done."""
    order: int
    """Order of the step before, 0 before the first."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Named "solver.model_output.N" (0 is the newest) and "solver.last_sample"; shaped like the
    latents, float32."""


def remembered(solver: str, step: int) -> list[str]:
    """Name the tensors that a solver's state has after `step` steps."""
    outputs = {"unipc": 2, "dpm++": 1}.get(solver, 0)
    names = [f"solver.model_output.{n}" for n in range(min(outputs, step))]
    return [*names, "solver.last_sample"] if solver == "unipc" and step else names

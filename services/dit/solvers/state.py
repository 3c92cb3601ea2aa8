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

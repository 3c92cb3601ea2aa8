"""UniPC (Zhao et al., "UniPC: A Unified Predictor-Corrector Framework", 2023), order 2.

The variant with B(h) = exp(h) - 1 (bh2) that predicts the clean sample. In the flow's terms
alpha = 1 - sigma, lambda = log(alpha / sigma), and the clean sample is x - sigma v. Every step
first corrects the sample with the model output that has just come (UniC), then predicts the next
one (UniP). Both are of order 2 where the history allows it; the last prediction is of order 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from services.dit.solvers.state import SolverState

_ORDER = 2


class UniPC:
    """One task's integration."""

    name = "unipc"

    def __init__(self, sigmas: Sequence[float]) -> None:
        self._sigmas = tuple(sigmas)
        self.step_index = 0
        self._order = 0
        self._outputs: list[torch.Tensor] = []
        """Clean samples predicted at the last steps, the newest first."""
        self._last_sample: torch.Tensor | None = None

    def step(self, velocity: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """Return the sample after the next step; velocity and sample float32, any shape."""
        clean = sample - self._sigmas[self.step_index] * velocity
        if self._last_sample is not None:
            sample = self._correct(self._last_sample, clean)
        self._outputs = [clean, *self._outputs][:_ORDER]
        self._last_sample = sample
        steps_left = len(self._sigmas) - 1 - self.step_index
        self._order = min(_ORDER, steps_left, len(self._outputs))
        predicted = self._predict(sample)
        self.step_index += 1
        return predicted

    def _predict(self, sample: torch.Tensor) -> torch.Tensor:
        """Take the step from `step_index` with the stored outputs (UniP)."""
        i = self.step_index
        keep, pull = _first_order(self._sigmas[i], self._sigmas[i + 1])
        newest = self._outputs[0]
        if self._order == 1:
            return sample * keep + newest * pull
        # With one earlier output the coefficient of its difference is 1/2 for any step sizes.
        bend = 0.5 * pull / self._ratio(i)
        return sample * keep + newest * (pull - bend) + self._outputs[1] * bend

    def _correct(self, sample: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
        """Repeat the step to `step_index` with the output found at its end (UniC)."""
        i = self.step_index
        keep, pull = _first_order(self._sigmas[i - 1], self._sigmas[i])
        newest = self._outputs[0]
        if self._order == 1:
            return sample * keep + (newest + clean) * (0.5 * pull)
        ratio = self._ratio(i - 1)
        old_weight, new_weight = _corrector_weights(
            ratio, _log_snr(self._sigmas[i]) - _log_snr(self._sigmas[i - 1])
        )
        old, new = pull * old_weight / ratio, pull * new_weight
        return sample * keep + newest * (pull - old - new) + self._outputs[1] * old + clean * new

    def _ratio(self, i: int) -> float:
        """Return where step i - 1 lies, seen from step i, in units of the step from i: negative."""
        here = _log_snr(self._sigmas[i])
        return (_log_snr(self._sigmas[i - 1]) - here) / (_log_snr(self._sigmas[i + 1]) - here)

    def state(self) -> SolverState:
        """Return the last two outputs and the last corrected sample."""
        tensors = {f"solver.model_output.{n}": x for n, x in enumerate(self._outputs)}
        if self._last_sample is not None:
            tensors["solver.last_sample"] = self._last_sample
        return SolverState(self.name, self.step_index, self._order, tensors)

    def restore(self, state: SolverState) -> None:
        """Continue from `state`."""
        self.step_index, self._order = state.step, state.order
        count = min(_ORDER, state.step)
        self._outputs = [state.tensors[f"solver.model_output.{n}"] for n in range(count)]
        self._last_sample = state.tensors["solver.last_sample"] if count else None


def _log_snr(sigma: float) -> float:
    return math.inf if sigma == 0 else math.log1p(-sigma) - math.log(sigma)


def _first_order(sigma: float, following: float) -> tuple[float, float]:
    """Coefficients of the sample and the clean sample in the exact step for a constant output."""
    keep = following / sigma
    return keep, (1 - following) - keep * (1 - sigma)


def _corrector_weights(ratio: float, h: float) -> tuple[float, float]:
    """Weights of the earlier and the new difference, from the two order conditions of UniC.

    They solve p + q = b1 and ratio p + q = b2 with the paper's phi functions at -h.
    """
    growth = math.expm1(-h)
    phi_2 = growth / -h - 1
    phi_3 = phi_2 / -h - 0.5
    b1, b2 = phi_2 / growth, 2 * phi_3 / growth
    earlier = (b2 - b1) / (ratio - 1)
    return earlier, b1 - earlier

"""Guidance: the formula, the number of forwards, and both ways to compute the branches."""

from __future__ import annotations

import pytest
import torch

from services.dit import guidance
from services.dit.attention.sdpa import Sdpa
from services.dit.flexcache import NoCache
from services.dit.guidance import Execution, guided_velocity
from services.dit.models.wan.transformer import Constants
from services.dit.parallel import Alone

HOW = Execution(Sdpa(), Alone(), NoCache())


class Model:
    """Velocity = 3 for the positive branch, 1 for the negative; notes batch sizes."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(
        self, latents: torch.Tensor, step_index: int, constants: Constants, **how: object
    ) -> torch.Tensor:
        assert set(how) == {"attention", "parallel", "cache"}
        self.batches.append(latents.shape[0])
        branch = constants.cross[0][0]
        assert branch.shape[0] == latents.shape[0]
        return latents * 0 + branch.view(-1, 1, 1, 1, 1)


def constants(tokens: int) -> Constants:
    branches = torch.tensor([3.0, 1.0])
    return Constants(torch.zeros(tokens, 1, 1), torch.zeros(0), torch.zeros(0), ((branches,) * 2,))


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0])
def test_up_to_one_a_single_forward(scale: float) -> None:
    model = Model()
    out = guided_velocity(model, torch.ones(1, 2, 1, 1, 1), 0, constants(1), scale, HOW)  # type: ignore[arg-type]
    assert model.batches == [1]
    assert (out == 3).all()


@pytest.mark.parametrize(
    ("tokens", "batches"),
    [(guidance.BATCH_TOKENS, [2]), (guidance.BATCH_TOKENS + 1, [1, 1])],
)
def test_formula_batched_and_one_by_one(tokens: int, batches: list[int]) -> None:
    model = Model()
    out = guided_velocity(model, torch.ones(1, 2, 1, 1, 1), 0, constants(tokens), 5.0, HOW)  # type: ignore[arg-type]
    assert model.batches == batches
    assert (out == 1 + 5 * (3 - 1)).all()

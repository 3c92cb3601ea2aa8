"""Solvers against diffusers' schedulers, written by others: grids and trajectories."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)

from services.dit.solvers import SOLVERS, SolverState, make_grid, make_solver

STEPS = (1, 2, 3, 50, 100)
SHIFTS = (1.0, 3.0, 5.0, 12.0)
every_grid = pytest.mark.parametrize(
    ("steps", "shift"), [(steps, shift) for steps in STEPS for shift in SHIFTS]
)


def reference(solver: str, steps: int, shift: float) -> Any:
    """Diffusers' scheduler on the grid that Wan's publication gives for it."""
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
    if solver == "unipc":
        scheduler = UniPCMultistepScheduler(solver_order=2, solver_type="bh2", **flow)
        scheduler.set_timesteps(sigmas=np.linspace(float(np.float32(0.999)), 0.0, steps + 1)[:-1])
        return scheduler
    levels = np.linspace(1.0, 0.0, steps + 1)[:-1]
    if solver == "euler":
        scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
        scheduler.set_timesteps(sigmas=levels)
        return scheduler
    scheduler = DPMSolverMultistepScheduler(
        solver_order=2, algorithm_type="dpmsolver++", solver_type="midpoint", **flow
    )
    scheduler.set_timesteps(steps)
    shifted = shift * levels / (1 + (shift - 1) * levels)
    scheduler.sigmas = torch.tensor([*shifted, 0.0], dtype=torch.float32)
    scheduler.timesteps = torch.from_numpy((1000 * shifted).astype(np.int64))
    return scheduler


def velocity(sample: torch.Tensor, sigma: float) -> torch.Tensor:
    """An analytic field that bends over time and depends on the sample without being linear."""
    return torch.tanh(sample) * (1 + math.sin(7 * sigma)) + 0.3 * sample - sigma


def noise() -> torch.Tensor:
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))


def run(solver: str, steps: int, shift: float) -> list[torch.Tensor]:
    grid = make_grid(solver, steps, shift)
    integration, samples = make_solver(grid), [noise()]
    for sigma in grid.sigmas[:-1]:
        samples.append(integration.step(velocity(samples[-1], sigma), samples[-1]))
    return samples


@every_grid
@pytest.mark.parametrize("solver", SOLVERS)
def test_grid(solver: str, steps: int, shift: float) -> None:
    grid, scheduler = make_grid(solver, steps, shift), reference(solver, steps, shift)
    assert len(grid.sigmas) == steps + 1
    assert grid.sigmas[-1] == 0
    np.testing.assert_allclose(grid.sigmas, scheduler.sigmas.numpy(), rtol=2e-6, atol=0)
    np.testing.assert_allclose(grid.timesteps, scheduler.timesteps.numpy(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shift", SHIFTS)
def test_unipc_timesteps_are_equal_at_every_step_count(shift: float) -> None:
    for steps in range(1, 101):
        expected = reference("unipc", steps, shift).timesteps.tolist()
        assert list(make_grid("unipc", steps, shift).timesteps) == expected, steps


def test_published_timesteps() -> None:
    timesteps = make_grid("unipc", 50, 5.0).timesteps
    assert (timesteps[:4], timesteps[-4:]) == ((999, 995, 991, 987), (302, 241, 172, 92))


@pytest.mark.parametrize("solver", SOLVERS)
def test_shift_is_applied_once(solver: str) -> None:
    plain, shifted = (make_grid(solver, 10, shift).sigmas[:-1] for shift in (1.0, 5.0))
    for s, moved in zip(plain, shifted, strict=True):
        assert moved == pytest.approx(5 * s / (1 + 4 * s), rel=1e-12)


@every_grid
@pytest.mark.parametrize("solver", SOLVERS)
def test_trajectory(solver: str, steps: int, shift: float) -> None:
    scheduler, grid = reference(solver, steps, shift), make_grid(solver, steps, shift)
    samples = run(solver, steps, shift)
    # Levels in float32 cost it digits of 1 - sigma where sigma is near 1.
    scheduler.sigmas = torch.tensor(grid.sigmas, dtype=torch.float64)
    # It would look its place up by the first timestep, which may occur twice.
    scheduler.set_begin_index(0)
    expected = noise()
    for i, timestep in enumerate(scheduler.timesteps):
        out = velocity(expected, grid.sigmas[i])
        expected = scheduler.step(out, timestep, expected, return_dict=False)[0]
        error = (samples[i + 1] - expected).norm() / expected.norm()
        assert error < 1e-5, f"step {i}: {error}"
    assert len(samples) == steps + 1
    assert torch.isfinite(samples[-1]).all()


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("solver", SOLVERS)
def test_exact_for_a_straight_flow(solver: str, steps: int) -> None:
    """If v = noise - clean everywhere, any number of steps ends at `clean`."""
    clean, start = torch.full((3,), 2.0), torch.tensor([-1.0, 0.5, 3.0])
    grid = make_grid(solver, steps, 3.0)
    sample, integration = (1 - grid.sigmas[0]) * clean + grid.sigmas[0] * start, make_solver(grid)
    for _ in range(steps):
        sample = integration.step(start - clean, sample)
    torch.testing.assert_close(sample, clean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("solver", SOLVERS)
def test_order_of_convergence(solver: str) -> None:
    """Halving the step divides the error by 2 (Euler) or about 4 (the others)."""
    exact = run("unipc", 1000, 1.0)[-1]

    def error(steps: int) -> float:
        return float((run(solver, steps, 1.0)[-1] - exact).norm())

    ratio = error(20) / error(40)
    assert (1.7 < ratio < 2.3) if solver == "euler" else ratio > 2.8


@pytest.mark.parametrize("cut", range(1, 6))
@pytest.mark.parametrize("solver", SOLVERS)
def test_restored_state_goes_on_bit_equal(solver: str, cut: int) -> None:
    grid, expected = make_grid(solver, 6, 5.0), run(solver, 6, 5.0)
    first, sample = make_solver(grid), noise()
    for sigma in grid.sigmas[:cut]:
        sample = first.step(velocity(sample, sigma), sample)
    state = first.state()
    copy = {name: tensor.clone() for name, tensor in state.tensors.items()}
    second = make_solver(grid)
    second.restore(SolverState(state.solver, state.step, state.order, copy))
    for sigma in grid.sigmas[cut:-1]:
        sample = second.step(velocity(sample, sigma), sample)
    assert second.step_index == 6
    assert torch.equal(sample, expected[-1])


def test_state_names() -> None:
    grid = make_grid("unipc", 4, 5.0)
    solver, sample = make_solver(grid), noise()
    assert (solver.state().order, solver.state().tensors) == (0, {})
    for sigma, order, names in (
        (grid.sigmas[0], 1, ["solver.model_output.0", "solver.last_sample"]),
        (
            grid.sigmas[1],
            2,
            ["solver.model_output.0", "solver.model_output.1", "solver.last_sample"],
        ),
    ):
        clean = sample - sigma * velocity(sample, sigma)
        sample = solver.step(velocity(sample, sigma), sample)
        assert (solver.state().order, list(solver.state().tensors)) == (order, names)
        assert torch.equal(solver.state().tensors["solver.model_output.0"], clean)

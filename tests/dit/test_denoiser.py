"""Whole denoising against diffusers' WanPipeline, and what a task's state promises."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    WanTransformer3DModel,
)

from chitu_diffusion.errors import CancelledTaskError, ComponentError
from services.dit import denoiser as module
from services.dit.attention.sdpa import Sdpa
from services.dit.denoiser import DenoiseParams, Denoiser, Prompts, TaskState, make_plan
from services.dit.experts import Experts
from services.dit.flexcache import NoCache
from services.dit.guidance import Execution
from services.dit.models.wan.transformer import ConditionEmbedder, CrossAttention, WanTransformer
from services.dit.parallel import Alone
from services.dit.solvers import SOLVERS
from tests.dit.conftest import CPU, load_ours, make_embeds, make_params
from tests.dit.reference import published_latents

HOW = Execution(Sdpa(), Alone(), NoCache())
TWO = {"guidance_scale": 3.0, "guidance_scale_high": 5.0, "boundary_ratio": 0.875}


@pytest.fixture(scope="module")
def models(checkpoints: dict[str, Path]) -> list[WanTransformer]:
    root = checkpoints["two-diffusers"]
    return [load_ours(root / name) for name in ("transformer", "transformer_2")]


@pytest.fixture
def denoiser(models: list[WanTransformer]) -> Denoiser:
    return Denoiser(Experts(models, CPU), CPU)


@pytest.fixture
def prompts() -> Prompts:
    return Prompts(make_embeds(1, 9), make_embeds(2, 4))


def never() -> bool:
    return False


def advance(denoiser: Denoiser, state: TaskState, end: int, prompts: Prompts) -> TaskState:
    expected = list(range(state.step, end))
    done = [event.planned.step for event in denoiser.run(state, end, prompts, HOW, never)]
    assert done == expected
    return state


def denoise(denoiser: Denoiser, params: DenoiseParams, prompts: Prompts) -> torch.Tensor:
    state = denoiser.from_noise(make_plan(params))
    return advance(denoiser, state, params.num_inference_steps, prompts).latents


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("changes", [{}, TWO, {"guidance_scale": 1.0}], ids=["one", "two", "plain"])
def test_latents_equal_the_pipeline(
    denoiser: Denoiser,
    experts: list[WanTransformer3DModel],
    prompts: Prompts,
    solver: str,
    changes: dict[str, float],
) -> None:
    params = make_params(solver=solver, **changes)
    ours = denoise(denoiser, params, prompts)
    theirs = published_latents(params, experts, prompts)
    assert ours.shape == theirs.shape == (1, 16, 2, 4, 6)
    assert (ours - theirs).norm() / theirs.norm() < 1e-4
    assert ours.dtype is torch.float32


def test_plan_of_two_experts() -> None:
    plan = make_plan(make_params(num_inference_steps=40, flow_shift=12.0, **TWO))
    for step in plan.steps:
        high = step.timestep >= 875
        assert (step.expert, step.guidance) == ((0, 5.0) if high else (1, 3.0))
    assert {step.expert for step in plan.steps} == {0, 1}
    assert plan.forward_count == 80


def test_timestep_on_the_boundary_is_high_noise() -> None:
    on = make_plan(make_params(solver="euler", flow_shift=1.0, num_inference_steps=8, **TWO))
    assert [(step.timestep, step.expert) for step in on.steps[:3]] == [
        (1000.0, 0),
        (875.0, 0),
        (750.0, 1),
    ]


@pytest.mark.parametrize(("boundary", "expert"), [(0.0, 0), (1.0, 1)])
def test_boundary_at_the_ends(boundary: float, expert: int) -> None:
    plan = make_plan(make_params(**(TWO | {"boundary_ratio": boundary})))
    assert {step.expert for step in plan.steps} == {expert}


def test_forward_count() -> None:
    assert make_plan(make_params()).forward_count == 12
    assert make_plan(make_params(guidance_scale=1.0)).forward_count == 6
    mixed = make_plan(make_params(**(TWO | {"guidance_scale_high": 1.0})))
    high = sum(step.expert == 0 for step in mixed.steps)
    assert mixed.forward_count == 12 - high < 12


def test_noise_depends_on_the_seed_alone(denoiser: Denoiser) -> None:
    first, again = (denoiser.from_noise(make_plan(make_params(seed=0))) for _ in range(2))
    expected = torch.randn((1, 16, 2, 4, 6), generator=torch.Generator().manual_seed(0))
    assert torch.equal(first.latents, expected)
    assert torch.equal(again.latents, expected)
    other = denoiser.from_noise(make_plan(make_params(seed=1)))
    assert not torch.equal(other.latents, expected)


@pytest.mark.parametrize("cut", [1, 2, 5])
@pytest.mark.parametrize("solver", SOLVERS)
def test_slices_are_bit_equal_to_one_run(
    denoiser: Denoiser, prompts: Prompts, solver: str, cut: int
) -> None:
    params = make_params(solver=solver, **TWO)
    plan, expected = make_plan(params), denoise(denoiser, params, prompts)
    held = advance(denoiser, denoiser.from_noise(plan), cut, prompts)
    checkpoint = held.checkpoint()
    assert checkpoint.step == held.step == cut
    restored = denoiser.from_checkpoint(plan, checkpoint)
    for state in (held, restored):
        assert torch.equal(advance(denoiser, state, 6, prompts).latents, expected)


def test_checkpoint_does_not_change_later(denoiser: Denoiser, prompts: Prompts) -> None:
    state = denoiser.from_noise(make_plan(make_params()))
    checkpoint = advance(denoiser, state, 2, prompts).checkpoint()
    copies = {name: tensor.clone() for name, tensor in checkpoint.solver.tensors.items()}
    latents = checkpoint.latents.clone()
    advance(denoiser, state, 6, prompts)
    assert torch.equal(checkpoint.latents, latents)
    assert all(torch.equal(checkpoint.solver.tensors[name], copies[name]) for name in copies)


def test_constants_are_computed_once_a_task(
    denoiser: Denoiser, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, int] = {}

    def count(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return original(*args)

        monkeypatch.setattr(owner, name, counted)

    count(ConditionEmbedder, "embed_text")
    count(ConditionEmbedder, "embed_time")
    count(CrossAttention, "keys_values")
    state = denoiser.from_noise(make_plan(make_params()))
    for end in (1, 3, 6):
        advance(denoiser, state, end, prompts)
    assert calls == {"embed_text": 1, "embed_time": 1, "keys_values": 2}
    calls.clear()
    denoise(denoiser, make_params(**TWO), prompts)
    assert calls == {"embed_text": 2, "embed_time": 2, "keys_values": 4}, "once an expert"


def test_negative_prompt(denoiser: Denoiser, prompts: Prompts) -> None:
    other = dataclasses.replace(prompts, negative=make_embeds(7, 15))
    for scale, equal in ((0.0, True), (1.0, True), (4.0, False)):
        params = make_params(guidance_scale=scale)
        results = [denoise(denoiser, params, each) for each in (prompts, other)]
        assert torch.equal(*results) is equal, scale


def test_each_expert_matters(
    denoiser: Denoiser, models: list[WanTransformer], prompts: Prompts
) -> None:
    expected = denoise(denoiser, make_params(**TWO), prompts)
    for swapped in (models[:1] * 2, models[1:] * 2):
        assert not torch.equal(
            denoise(Denoiser(Experts(swapped, CPU), CPU), make_params(**TWO), prompts), expected
        )


def test_cancel_is_seen_at_the_next_step(denoiser: Denoiser, prompts: Prompts) -> None:
    state, answers = denoiser.from_noise(make_plan(make_params())), iter([False, False, True])
    steps = denoiser.run(state, 6, prompts, HOW, lambda: next(answers))
    assert [next(steps).planned.step for _ in range(2)] == [0, 1]
    with pytest.raises(CancelledTaskError, match="before step 2"):
        next(steps)


def test_latents_that_are_not_finite(
    denoiser: Denoiser, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        module, "guided_velocity", lambda model, latents, *rest: latents * float("nan")
    )
    with pytest.raises(ComponentError, match="after step 6 are not finite"):
        denoise(denoiser, make_params(), prompts)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("steps", [1, 2, 51])
def test_step_counts(denoiser: Denoiser, prompts: Prompts, solver: str, steps: int) -> None:
    params = make_params(
        solver=solver, num_inference_steps=steps, num_frames=1, height=16, width=16
    )
    assert torch.isfinite(denoise(denoiser, params, prompts)).all()

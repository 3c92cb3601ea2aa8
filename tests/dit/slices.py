"""Slices of the small model, as a pool is asked for them, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from chitu_diffusion.v1 import dit_pb2
from chitu_diffusion.wire import TensorReceiver
from services.dit.denoiser import Checkpoint, DenoiseParams, Plan, make_plan
from services.dit.jobs import Order, Source
from services.dit.pool import Pool
from services.dit.solvers import SolverState
from services.dit.stream import SliceStream
from tests.dit.conftest import make_embeds, make_params

_SOURCES = {
    Source.NOISE: dit_pb2.LATENT_SOURCE_NOISE,
    Source.HELD: dit_pb2.LATENT_SOURCE_HELD,
    Source.CHECKPOINT: dit_pb2.LATENT_SOURCE_CHECKPOINT,
}


def params_message(params: DenoiseParams, attn_type: str = "") -> dit_pb2.DenoiseParams:
    message = dit_pb2.DenoiseParams(
        num_frames=params.num_frames,
        height=params.height,
        width=params.width,
        num_inference_steps=params.num_inference_steps,
        guidance_scale=params.guidance_scale,
        flow_shift=params.flow_shift,
        solver=params.solver,
        seed=params.seed,
        attn_type=attn_type,
    )
    if params.guidance_scale_high is not None and params.boundary_ratio is not None:
        message.guidance_scale_high = params.guidance_scale_high
        message.boundary_ratio = params.boundary_ratio
    return message


def job(
    task_id: str = "a",
    plan: Plan | None = None,
    source: Source = Source.NOISE,
    checkpoint: Checkpoint | None = None,
    attn_type: str = "",
    **changes: Any,
) -> Order:
    """All steps of a task from noise, its latents returned; `changes` are fields of the start."""
    plan = plan or make_plan(make_params())
    tensors = {"prompt_embeds": make_embeds(1, 9)[0, :9]}
    if plan.is_guided(0, len(plan.steps)):
        tensors["negative_prompt_embeds"] = make_embeds(2, 4)[0, :4]
    fields: dict[str, Any] = {
        "attempt": 1,
        "first_step": 0,
        "end_step": len(plan.steps),
        "return_latents": True,
    }
    start = dit_pb2.DenoiseStart(
        task_id=task_id,
        params=params_message(plan.params, attn_type),
        source=_SOURCES[source],
        **(fields | changes),
    )
    if checkpoint is not None:
        state = checkpoint.solver
        start.solver_state.CopyFrom(solver_message(state))
        tensors |= {"latents": checkpoint.latents, **state.tensors}
    return Order(start, plan, tensors)


def solver_message(state: SolverState) -> dit_pb2.SolverState:
    return dit_pb2.SolverState(
        solver=state.solver, step=state.step, order=state.order, tensors=list(state.tensors)
    )


@dataclass
class Answer:
    """What a slice gave back."""

    steps: list[dit_pb2.StepReport] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    latents: torch.Tensor | None = None
    done: dit_pb2.DenoiseDone | None = None


def answer(responses: Iterable[dit_pb2.DenoiseResponse]) -> Answer:
    """Put the messages together."""
    given, receiver, tensors = Answer(), TensorReceiver(), dict[str, torch.Tensor]()
    opened: dit_pb2.Checkpoint | None = None
    for response in responses:
        kind = response.WhichOneof("response")
        if kind == "step":
            given.steps.append(response.step)
        elif kind == "done":
            given.done = response.done
        elif kind == "checkpoint":
            opened, tensors = response.checkpoint, {}
        elif (payload := receiver.feed(response.tensor)) is not None:
            tensors[payload.name] = payload.to_torch()
            if opened is None:
                given.latents = tensors["latents"]
            elif len(tensors) == 1 + len(opened.solver_state.tensors):
                given.checkpoints.append(_checkpoint(opened, tensors))
                opened = None
    return given


def _checkpoint(opened: dit_pb2.Checkpoint, tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
    state = opened.solver_state
    kept = {name: tensors[name] for name in state.tensors}
    solver = SolverState(state.solver, state.step, state.order, kept)
    return Checkpoint(opened.step, tensors["latents"], solver)


async def collect(stream: SliceStream) -> Answer:
    return answer([response async for response in stream])


async def run(pool: Pool, order: Order) -> Answer:
    return await collect(pool.submit(order))


def latents(given: Answer) -> torch.Tensor:
    assert given.latents is not None
    return given.latents


def step_numbers(given: Answer) -> Sequence[int]:
    return [step.step for step in given.steps]

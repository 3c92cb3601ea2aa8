"""What a slice tells, as messages of dit.proto."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from chitu_diffusion.v1 import dit_pb2
from chitu_diffusion.wire import tensor_parts
from services.dit.denoiser import Checkpoint, Plan, PlannedStep, StepDone
from services.dit.jobs import Event
from services.dit.parallel import Layout


def replies(event: Event, plan: Plan, layout: Layout) -> Iterator[dit_pb2.DenoiseResponse]:
    """Make the messages of an event, one at a time.

    Args:
        event: of the slice.
        plan: of its task.
        layout: the slice runs in.
    """
    if isinstance(event, StepDone):
        yield dit_pb2.DenoiseResponse(step=_report(event, plan, layout))
    elif isinstance(event, Checkpoint):
        yield from _checkpoint(event)
    else:
        if event.latents is not None:
            yield from _tensor("latents", event.latents)
        if event.checkpoint is not None:
            yield from _checkpoint(event.checkpoint)
        yield dit_pb2.DenoiseResponse(
            done=dit_pb2.DenoiseDone(
                next_step=event.next_step, attn_type=event.attn_type, report=event.report
            )
        )


def planned(step: PlannedStep, plan: Plan) -> dit_pb2.PlannedStep:
    """Make the message of a step that is to come."""
    return dit_pb2.PlannedStep(
        step=step.step,
        timestep=step.timestep,
        sigma=step.sigma,
        expert=_expert(step, plan),
        reused=step.reused,
        guidance_scale=step.guidance,
    )


def layout_message(layout: Layout) -> dit_pb2.Layout:
    """Make the message of a layout."""
    return dit_pb2.Layout(
        cfg_size=layout.cfg_size,
        ulysses_degree=layout.ulysses_degree,
        ring_degree=layout.ring_degree,
    )


def _report(event: StepDone, plan: Plan, layout: Layout) -> dit_pb2.StepReport:
    step = event.planned
    return dit_pb2.StepReport(
        step=step.step,
        of=len(plan.steps),
        timestep=step.timestep,
        sigma=step.sigma,
        expert=_expert(step, plan),
        reused=step.reused,
        seconds=event.seconds,
        layout=layout_message(layout),
    )


def _expert(step: PlannedStep, plan: Plan) -> dit_pb2.Expert.ValueType:
    if plan.params.boundary_ratio is None:
        return dit_pb2.EXPERT_UNSPECIFIED
    return (dit_pb2.EXPERT_HIGH_NOISE, dit_pb2.EXPERT_LOW_NOISE)[step.expert]


def _checkpoint(checkpoint: Checkpoint) -> Iterator[dit_pb2.DenoiseResponse]:
    checkpoint.wait()
    solver = checkpoint.solver
    state = dit_pb2.SolverState(
        solver=solver.solver, step=solver.step, order=solver.order, tensors=list(solver.tensors)
    )
    yield dit_pb2.DenoiseResponse(
        checkpoint=dit_pb2.Checkpoint(step=checkpoint.step, solver_state=state)
    )
    yield from _tensor("latents", checkpoint.latents)
    for name, tensor in solver.tensors.items():
        yield from _tensor(name, tensor)


def _tensor(name: str, tensor: torch.Tensor) -> Iterator[dit_pb2.DenoiseResponse]:
    for part in tensor_parts(name, tensor):
        yield dit_pb2.DenoiseResponse(tensor=part)

"""The door of Plan and Denoise: what a request must be, checked before any work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch

from chitu_diffusion.config.schema import Config, ModelConfig
from chitu_diffusion.errors import PreconditionError, Violation
from chitu_diffusion.v1 import dit_pb2
from chitu_diffusion.wire import Payload
from services.dit.attention import ATTN_TYPES
from services.dit.denoiser import Checkpoint, DenoiseParams, Plan, make_plan
from services.dit.experts import hosted
from services.dit.jobs import Order, Slice, Source
from services.dit.models import get_family
from services.dit.parallel import Layout
from services.dit.rules import FLOATS, listed, not_finite, refuse
from services.dit.solvers import SOLVERS, SolverState, remembered

_SOURCES = {
    dit_pb2.LATENT_SOURCE_NOISE: Source.NOISE,
    dit_pb2.LATENT_SOURCE_HELD: Source.HELD,
    dit_pb2.LATENT_SOURCE_CHECKPOINT: Source.CHECKPOINT,
}


def parse_params(params: dit_pb2.DenoiseParams, model: ModelConfig) -> DenoiseParams:
    """Check the parameters against their ranges and the model.

    Raises:
        InvalidRequestError: names every field that breaks a rule.
        PreconditionError: feature reuse is asked for.
    """
    refuse([*_shape_problems(params, model), *_sampling_problems(params, model)])
    if params.HasField("flexcache"):
        raise PreconditionError(
            f"params.flexcache: this pool was started without feature reuse "
            f"(strategy {params.flexcache.strategy!r})"
        )
    two = model.boundary_ratio is not None
    return DenoiseParams(
        num_frames=params.num_frames,
        height=params.height,
        width=params.width,
        num_inference_steps=params.num_inference_steps,
        guidance_scale=params.guidance_scale,
        flow_shift=params.flow_shift,
        solver=params.solver,
        seed=params.seed,
        guidance_scale_high=params.guidance_scale_high if two else None,
        boundary_ratio=params.boundary_ratio if two else None,
        latent_stride=get_family(model.type).latent_stride,
    )


def _shape_problems(params: dit_pb2.DenoiseParams, model: ModelConfig) -> Iterator[Violation]:
    limits, frames, patch = model.limits, params.num_frames, model.transformer.patch_size
    stride = get_family(model.type).latent_stride
    if frames < 1 or (frames - 1) % stride[0]:
        yield Violation("params.num_frames", f"{frames}: must be {stride[0]}n + 1, at least 1")
    elif frames > limits.max_num_frames:
        yield Violation("params.num_frames", f"{frames}: at most {limits.max_num_frames}")
    for axis, name in ((1, "height"), (2, "width")):
        size, unit = getattr(params, name), stride[axis] * patch[axis]
        if size < unit or size % unit:
            yield Violation(
                f"params.{name}", f"{size}: must be a multiple of {unit}, at least {unit}"
            )
    pixels = params.height * params.width
    if pixels > limits.max_pixels:
        yield Violation("params.height", f"height x width = {pixels}: at most {limits.max_pixels}")
    elif pixels * frames > limits.max_pixel_frames:
        yield Violation(
            "params.num_frames",
            f"height x width x num_frames = {pixels * frames}: at most {limits.max_pixel_frames}",
        )


def _sampling_problems(params: dit_pb2.DenoiseParams, model: ModelConfig) -> Iterator[Violation]:
    steps = params.num_inference_steps
    if not 1 <= steps <= 1000:
        yield Violation("params.num_inference_steps", f"{steps}: must be 1 to 1000")
    if params.solver not in SOLVERS:
        yield Violation("params.solver", f"{params.solver!r}: must be one of {listed(SOLVERS)}")
    if not (math.isfinite(params.flow_shift) and params.flow_shift > 0):
        yield Violation("params.flow_shift", f"{params.flow_shift}: must be > 0 and finite")
    if params.attn_type and params.attn_type not in ATTN_TYPES:
        yield Violation(
            "params.attn_type", f"{params.attn_type!r}: must be one of {listed(ATTN_TYPES)}"
        )
    yield from _guidance_problems("guidance_scale", params.guidance_scale)
    two = model.boundary_ratio is not None
    for name in ("guidance_scale_high", "boundary_ratio"):
        if params.HasField(name) != two:
            rule = (
                "must be set: the model has two experts"
                if two
                else ("must not be set: the model has one expert")
            )
            yield Violation(f"params.{name}", rule)
    if params.HasField("guidance_scale_high"):
        yield from _guidance_problems("guidance_scale_high", params.guidance_scale_high)
    if params.HasField("boundary_ratio") and not 0 <= params.boundary_ratio <= 1:
        yield Violation("params.boundary_ratio", f"{params.boundary_ratio}: must be 0 to 1")


def _guidance_problems(name: str, scale: float) -> Iterator[Violation]:
    if not (math.isfinite(scale) and scale >= 0):
        yield Violation(f"params.{name}", f"{scale}: must be >= 0 and finite")


def parse_start(start: dit_pb2.DenoiseStart, config: Config) -> Plan:
    """Check a slice's opening message but for its group, and plan its task.

    Raises:
        InvalidRequestError: names every field that breaks a rule.
        PreconditionError: it asks for previews, or for an expert that is not here.
    """
    plan = make_plan(parse_params(start.params, config.models))
    refuse([*_range_problems(start), *_source_problems(start)])
    here = hosted(config).values()
    for step in plan.steps[start.first_step : start.end_step]:
        if step.expert not in here:
            noise = ("high", "low")[step.expert]
            raise PreconditionError(
                f"end_step: step {step.step} is one of the {noise}-noise expert, this pool was "
                f"started with services.dit.expert={config.services.dit.expert}"
            )
    if start.preview_interval:
        raise PreconditionError("preview_interval: this pool makes no previews")
    return plan


def parse_group(
    start: dit_pb2.DenoiseStart, num_ranks: int, num_heads: int
) -> tuple[Layout | None, tuple[int, ...]]:
    """Check the layout and the ranks that a slice names.

    Args:
        start: the opening message.
        num_ranks: of the pool.
        num_heads: of the model.

    Returns:
        None, or no ranks, where the pool shall choose.

    Raises:
        InvalidRequestError: they do not fit each other.
        PreconditionError: the pool or the model cannot do it.
    """
    ranks, asked = tuple(start.ranks), start.layout
    layout = None
    refuse(_group_problems(start))
    if start.HasField("layout"):
        layout = Layout(asked.cfg_size, asked.ulysses_degree, asked.ring_degree)
        if layout.size > num_ranks:
            raise PreconditionError(
                f"layout: {layout} needs {layout.size} ranks, this pool has {num_ranks}"
            )
        if num_heads % layout.ulysses_degree:
            raise PreconditionError(
                f"layout.ulysses_degree: {layout.ulysses_degree}: must divide the model's "
                f"{num_heads} heads"
            )
    beyond = [rank for rank in ranks if not 0 <= rank < num_ranks]
    if beyond:
        raise PreconditionError(f"ranks: {beyond}: this pool has ranks 0 to {num_ranks - 1}")
    return layout, ranks


def _group_problems(start: dit_pb2.DenoiseStart) -> Iterator[Violation]:
    ranks, layout = list(start.ranks), start.layout
    if len(set(ranks)) < len(ranks):
        yield Violation("ranks", f"{ranks}: must be different")
    if not start.HasField("layout"):
        return
    for name in ("cfg_size", "ulysses_degree", "ring_degree"):
        if getattr(layout, name) < 1:
            yield Violation(f"layout.{name}", f"{getattr(layout, name)}: must be >= 1")
    if layout.cfg_size > 2:
        yield Violation("layout.cfg_size", f"{layout.cfg_size}: must be 1 or 2")
    size = layout.cfg_size * layout.ulysses_degree * layout.ring_degree
    if ranks and len(ranks) != size:
        yield Violation("ranks", f"{len(ranks)} ranks: must be {size}, as layout says")


def _range_problems(start: dit_pb2.DenoiseStart) -> Iterator[Violation]:
    steps = start.params.num_inference_steps
    if not start.task_id:
        yield Violation("task_id", "must not be empty")
    if not 0 <= start.first_step < steps:
        yield Violation("first_step", f"{start.first_step}: must be 0 to {steps - 1}")
    if not start.first_step < start.end_step <= steps:
        yield Violation("end_step", f"{start.end_step}: must be {start.first_step + 1} to {steps}")
    if not (math.isfinite(start.checkpoint_interval_s) and start.checkpoint_interval_s >= 0):
        yield Violation(
            "checkpoint_interval_s", f"{start.checkpoint_interval_s}: must be >= 0 and finite"
        )
    if start.preview_interval < 0:
        yield Violation("preview_interval", f"{start.preview_interval}: must be >= 0")


def _source_problems(start: dit_pb2.DenoiseStart) -> Iterator[Violation]:
    source = _SOURCES.get(start.source)
    if source is None:
        yield Violation("source", f"{start.source}: must be NOISE, HELD or CHECKPOINT")
    if source is Source.NOISE and start.first_step != 0:
        yield Violation("first_step", f"{start.first_step}: must be 0 when source is NOISE")
    if source is not Source.CHECKPOINT:
        if start.HasField("solver_state"):
            yield Violation("solver_state", "must be set exactly when source is CHECKPOINT")
        return
    state, solver = start.solver_state, start.params.solver
    if not start.HasField("solver_state"):
        yield Violation("solver_state", "must be set when source is CHECKPOINT")
        return
    if state.solver != solver:
        yield Violation("solver_state.solver", f"{state.solver!r}: params.solver is {solver!r}")
    if state.step != start.first_step:
        yield Violation("solver_state.step", f"{state.step}: first_step is {start.first_step}")
    expected = remembered(solver, state.step)
    if sorted(state.tensors) != sorted(expected):
        yield Violation(
            "solver_state.tensors", f"{list(state.tensors)}: must be {expected} at this step"
        )
    if not 0 <= state.order <= 2 or (state.order == 0) != (state.step == 0):
        yield Violation("solver_state.order", f"{state.order}: must be 1 or 2, 0 before step 0")


def expected_tensors(start: dit_pb2.DenoiseStart, plan: Plan) -> list[str]:
    """Name every tensor that must follow the opening message."""
    names = ["prompt_embeds"]
    if plan.is_guided(start.first_step, start.end_step):
        names.append("negative_prompt_embeds")
    if start.source == dit_pb2.LATENT_SOURCE_CHECKPOINT:
        names += ["latents", *start.solver_state.tensors]
    return names


def parse_tensors(
    payloads: Mapping[str, Payload], expected: Iterable[str], plan: Plan, model: ModelConfig
) -> dict[str, torch.Tensor]:
    """Check that all tensors came, with their shapes and types, and hold finite values."""
    missing = [name for name in expected if name not in payloads]
    refuse(Violation(name, "tensor is missing") for name in missing)
    latents_shape = (1, model.transformer.in_channels, *plan.params.grid)
    refuse(
        problem
        for name, payload in payloads.items()
        for problem in _tensor_problems(name, payload, latents_shape, model)
    )
    tensors = {name: payload.to_torch() for name, payload in payloads.items()}
    refuse(not_finite(tensors))
    return tensors


def _tensor_problems(
    name: str, payload: Payload, latents_shape: tuple[int, ...], model: ModelConfig
) -> Iterator[Violation]:
    if name.endswith("prompt_embeds"):
        rows, width = model.transformer.text_len, model.transformer.text_dim
        shape = payload.shape
        if len(shape) != 2 or not 1 <= shape[0] <= rows or shape[1] != width:
            yield Violation(name, f"shape {list(shape)}: must be [1 to {rows}, {width}]")
        if payload.dtype_name not in FLOATS:
            yield Violation(name, f"type {payload.dtype_name}: must be one of {listed(FLOATS)}")
        return
    if payload.shape != latents_shape:
        yield Violation(name, f"shape {list(payload.shape)}: must be {list(latents_shape)}")
    if payload.dtype_name != "float32":
        yield Violation(name, f"type {payload.dtype_name}: must be float32")


def make_slice(order: Order, number: int = 0) -> Slice:
    """Put a checked request together.

    Args:
        order: of the slice; a rank that is not the leader of its group has no tensors.
        number: of the slice in its pool.
    """
    start, tensors = order.start, order.tensors
    checkpoint = None
    if start.source == dit_pb2.LATENT_SOURCE_CHECKPOINT and tensors:
        state = start.solver_state
        kept = {name: tensors[name] for name in state.tensors}
        solver = SolverState(state.solver, state.step, state.order, kept)
        checkpoint = Checkpoint(start.first_step, tensors["latents"], solver)
    return Slice(
        task_id=start.task_id,
        number=number,
        plan=order.plan,
        first_step=start.first_step,
        end_step=start.end_step,
        source=_SOURCES[start.source],
        prompt_embeds=tensors.get("prompt_embeds"),
        negative_prompt_embeds=tensors.get("negative_prompt_embeds"),
        checkpoint=checkpoint,
        attn_type=start.params.attn_type,
        keep_state=start.keep_state,
        return_latents=start.return_latents,
        return_checkpoint=start.return_checkpoint,
        checkpoint_interval_s=start.checkpoint_interval_s,
    )

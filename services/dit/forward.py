"""The door of Forward: what one run of a transformer must be, checked before any work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from chitu_diffusion.config.schema import Config, ModelConfig
from chitu_diffusion.errors import NotFoundError, Violation
from chitu_diffusion.v1 import dit_pb2
from chitu_diffusion.wire import Payload, tensor_parts
from services.dit.attention import ATTN_TYPES
from services.dit.experts import hosted
from services.dit.jobs import Forward, ForwardDone
from services.dit.rules import FLOATS, listed, not_finite, refuse
from services.dit.solvers.grid import TRAIN_TIMESTEPS


def parse_forward(
    start: dit_pb2.ForwardStart, payloads: Mapping[str, Payload], config: Config
) -> Forward:
    """Check a forward's opening message and its tensors.

    Raises:
        InvalidRequestError: names every field and tensor that breaks a rule.
        NotFoundError: the pool has no such transformer.
    """
    names = hosted(config)
    if start.component not in names:
        raise NotFoundError(f"no component {start.component!r}: there are {', '.join(names)}")
    refuse([*_forward_problems(start, payloads, config.models)])
    tensors = {name: payload.to_torch() for name, payload in payloads.items()}
    refuse(not_finite(tensors))
    return Forward(
        expert=names[start.component],
        hidden_states=tensors["hidden_states"],
        timestep=start.timestep,
        prompt_embeds=tensors["encoder_hidden_states"][0],
        attn_type=start.attn_type,
    )


def forward_responses(done: ForwardDone) -> Iterator[dit_pb2.ForwardResponse]:
    """Make the messages of a result, one at a time."""
    for part in tensor_parts("velocity", done.velocity):
        yield dit_pb2.ForwardResponse(tensor=part)
    yield dit_pb2.ForwardResponse(
        done=dit_pb2.ForwardDone(attn_type=done.attn_type, report=done.report)
    )


def _forward_problems(
    start: dit_pb2.ForwardStart, payloads: Mapping[str, Payload], model: ModelConfig
) -> Iterator[Violation]:
    if not 0 <= start.timestep <= TRAIN_TIMESTEPS:
        yield Violation("timestep", f"{start.timestep}: must be 0 to {TRAIN_TIMESTEPS}")
    if start.attn_type and start.attn_type not in ATTN_TYPES:
        yield Violation("attn_type", f"{start.attn_type!r}: must be one of {listed(ATTN_TYPES)}")
    yield from (
        Violation(name, "tensor is missing") for name in FORWARD_TENSORS if name not in payloads
    )
    for name, payload in payloads.items():
        if payload.dtype_name not in FLOATS:
            yield Violation(name, f"type {payload.dtype_name}: must be one of {listed(FLOATS)}")
        problem = _SHAPE_RULES[name](payload.shape, model)
        if problem is not None:
            yield Violation(name, f"shape {list(payload.shape)}: must be {problem}")


def _wrong_latents(shape: tuple[int, ...], model: ModelConfig) -> str | None:
    channels, patch = model.transformer.in_channels, model.transformer.patch_size
    sizes = shape[2:]
    fits = len(shape) == 5 and shape[:2] == (1, channels) and all(sizes)
    if fits and not any(size % unit for size, unit in zip(sizes, patch, strict=True)):
        return None
    return f"[1, {channels}, F, H, W] with F, H, W multiples of {list(patch)}"


def _wrong_text(shape: tuple[int, ...], model: ModelConfig) -> str | None:
    rows, width = model.transformer.text_len, model.transformer.text_dim
    if len(shape) == 3 and shape[0] == 1 and 1 <= shape[1] <= rows and shape[2] == width:
        return None
    return f"[1, 1 to {rows}, {width}]"


_SHAPE_RULES = {"hidden_states": _wrong_latents, "encoder_hidden_states": _wrong_text}
FORWARD_TENSORS = tuple(_SHAPE_RULES)

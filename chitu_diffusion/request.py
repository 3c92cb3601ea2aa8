"""What a person asks for: `GenerationRequest`, checked, and to and from its proto.

The rules are written once, here. The Python client applies those that need no server before it
sends anything; the orchestrator applies all of them at its door, with the model's defaults and
limits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from chitu_diffusion.config.schema import (
    ATTN_TYPES,
    OUTPUT_FORMATS,
    SOLVERS,
    LimitsConfig,
    ModelConfig,
)
from chitu_diffusion.errors import InvalidRequestError, Violation
from chitu_diffusion.v1 import generation_pb2

# VAE stride 8 x patch 2, and VAE temporal stride.
SIZE_MULTIPLE = 16
FRAME_STRIDE = 4

MAX_SEED = 2**63 - 1
MAX_INT32 = 2**31 - 1
MAX_GUIDANCE_SCALE = 100.0
MAX_FLOW_SHIFT = 100.0
MAX_FPS = 120

_TEXTS = ("prompt", "negative_prompt", "model", "solver", "output_format", "attn_type")
_INTEGERS = ("num_frames", "height", "width", "num_inference_steps", "seed", "fps")
_NUMBERS = ("guidance_scale", "guidance_scale_high", "boundary_ratio", "flow_shift")
# Of the proto, not yet of this server: set values are refused, never ignored.
_UNSUPPORTED = ("flexcache", "preview_interval")


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A video to generate. `None` means the server's default for the model.

    Raises:
        InvalidRequestError: on construction, for a value that no server would take. It is a
            `ValueError`, and names each field, its value and the rule.
    """

    prompt: str = ""
    """What the video shows."""
    negative_prompt: str | None = None
    """What it should not show; "" for none."""
    model: str | None = None
    """Name of the model."""
    num_frames: int | None = None
    """Frames, 4n+1."""
    height: int | None = None
    """Pixels, a multiple of 16."""
    width: int | None = None
    """Pixels, a multiple of 16."""
    num_inference_steps: int | None = None
    """Denoise steps, >= 1."""
    guidance_scale: float | None = None
    """0 to 100; at <= 1 the negative prompt has no effect. On two experts, the low-noise one's."""
    guidance_scale_high: float | None = None
    """0 to 100; the high-noise expert's."""
    boundary_ratio: float | None = None
    """0 to 1; timestep >= boundary_ratio x 1000 is the high-noise expert's."""
    flow_shift: float | None = None
    """> 0 to 100; shift of the noise grid."""
    solver: str | None = None
    """"unipc", "dpm++" or "euler"."""
    seed: int | None = None
    """0 to 2^63 - 1; None = drawn by the server and reported."""
    fps: int | None = None
    """1 to 120; frames per second of the file."""
    output_format: str | None = None
    """"mp4"."""
    attn_type: str | None = None
    """Attention back end."""

    def __post_init__(self) -> None:
        _raise_any(_static_violations(self))

    @classmethod
    def from_proto(cls, params: generation_pb2.GenerationParams) -> GenerationRequest:
        """The request in a message.

        Raises:
            InvalidRequestError: as the constructor, and for fields this server does not support.
        """
        _raise_any(
            Violation(f"params.{name}", "is not supported by this server: leave it out")
            for name in _UNSUPPORTED
            if params.HasField(name)  # type: ignore[arg-type]
        )
        values: dict[str, Any] = {
            field.name: getattr(params, field.name)
            for field in dataclasses.fields(cls)
            if field.name != "prompt" and params.HasField(field.name)  # type: ignore[arg-type]
        }
        return cls(prompt=params.prompt, **values)

    def to_proto(self) -> generation_pb2.GenerationParams:
        """The message of this request; fields that are `None` stay unset."""
        values = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        return generation_pb2.GenerationParams(**values)

    def resolve(self, model: ModelConfig, *, seed: int, attn_type: str) -> GenerationRequest:
        """Fill in every default and check against the model.

        Args:
            model: the model that is served.
            seed: used if the request has none.
            attn_type: back end of the server.

        Returns:
            A request without `None`, but for `guidance_scale_high` and `boundary_ratio` of a model
            with one expert.

        Raises:
            InvalidRequestError: a value breaks a rule or a limit of the model.
        """
        _raise_any(_expert_violations(self, model))
        defaults = {
            **dataclasses.asdict(model.request_defaults),
            "model": model.name,
            "boundary_ratio": model.boundary_ratio,
            "seed": seed,
            "output_format": OUTPUT_FORMATS[0],
            "attn_type": attn_type,
        }
        given = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        resolved = GenerationRequest(**{**defaults, **given})
        _raise_any(_limit_violations(resolved, model.limits))
        if self.attn_type not in (None, "auto", attn_type):
            raise InvalidRequestError.of(
                "params.attn_type", f"{self.attn_type!r}: this server runs {attn_type!r}"
            )
        return dataclasses.replace(resolved, attn_type=attn_type)


DiffusionUserParams = GenerationRequest


def _raise_any(violations: Iterator[Violation]) -> None:
    found = tuple(violations)
    if found:
        raise InvalidRequestError(found)


def _static_violations(request: GenerationRequest) -> Iterator[Violation]:
    """Rules that hold on every server."""
    wrong_types = tuple(_type_violations(request))
    yield from wrong_types
    if wrong_types:
        return
    for name, rule, holds in (
        ("num_frames", "must be 4n+1 and >= 1", lambda v: v >= 1 and v % FRAME_STRIDE == 1),
        ("height", "must be a positive multiple of 16", _is_size),
        ("width", "must be a positive multiple of 16", _is_size),
        ("num_inference_steps", "must be >= 1", lambda v: v >= 1),
        ("guidance_scale", "must be between 0 and 100", _is_guidance),
        ("guidance_scale_high", "must be between 0 and 100", _is_guidance),
        ("boundary_ratio", "must be between 0 and 1", lambda v: 0 <= v <= 1),
        ("flow_shift", "must be > 0 and <= 100", lambda v: 0 < v <= MAX_FLOW_SHIFT),
        ("seed", "must be between 0 and 2^63 - 1", lambda v: 0 <= v <= MAX_SEED),
        ("fps", f"must be between 1 and {MAX_FPS}", lambda v: 1 <= v <= MAX_FPS),
        ("solver", f"must be one of {', '.join(SOLVERS)}", SOLVERS.__contains__),
        (
            "output_format",
            f"must be one of {', '.join(OUTPUT_FORMATS)}",
            OUTPUT_FORMATS.__contains__,
        ),
        ("attn_type", f"must be one of {', '.join(ATTN_TYPES)}", ATTN_TYPES.__contains__),
    ):
        value = getattr(request, name)
        if value is not None and not holds(value):
            yield Violation(f"params.{name}", f"{value!r}: {rule}")


def _type_violations(request: GenerationRequest) -> Iterator[Violation]:
    for name in _TEXTS:
        value = getattr(request, name)
        if value is None and name != "prompt":
            continue
        if not isinstance(value, str):
            yield Violation(f"params.{name}", f"{value!r}: must be text")
        elif not _is_utf8(value):
            yield Violation(f"params.{name}", f"{value[:40]!r}: must be valid Unicode (UTF-8)")
    for name in _INTEGERS:
        value = getattr(request, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            yield Violation(f"params.{name}", f"{value!r}: must be an integer")
        elif value is not None and name != "seed" and abs(value) > MAX_INT32:
            yield Violation(f"params.{name}", f"{value!r}: at most {MAX_INT32}")
    for name in _NUMBERS:
        value = getattr(request, name)
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool):
            yield Violation(f"params.{name}", f"{value!r}: must be a number")
        elif not math.isfinite(value):
            yield Violation(f"params.{name}", f"{value!r}: must be finite")


def _expert_violations(request: GenerationRequest, model: ModelConfig) -> Iterator[Violation]:
    if model.boundary_ratio is not None:
        return
    for name in ("guidance_scale_high", "boundary_ratio"):
        value = getattr(request, name)
        if value is not None:
            yield Violation(
                f"params.{name}",
                f"{value!r}: only for models with two experts, and {model.name} has one",
            )


def _limit_violations(request: GenerationRequest, limits: LimitsConfig) -> Iterator[Violation]:
    for name in ("prompt", "negative_prompt"):
        length = len(getattr(request, name))
        if length > limits.max_prompt_chars:
            yield Violation(
                f"params.{name}", f"{length} characters: at most {limits.max_prompt_chars}"
            )
    frames, steps = request.num_frames or 0, request.num_inference_steps or 0
    pixels = (request.height or 0) * (request.width or 0)
    if frames > limits.max_num_frames:
        yield Violation("params.num_frames", f"{frames}: at most {limits.max_num_frames}")
    if steps > limits.max_num_inference_steps:
        yield Violation(
            "params.num_inference_steps", f"{steps}: at most {limits.max_num_inference_steps}"
        )
    if pixels > limits.max_pixels:
        yield Violation(
            "params.height", f"height x width = {pixels} pixels: at most {limits.max_pixels}"
        )
    elif pixels * frames > limits.max_pixel_frames:
        yield Violation(
            "params.num_frames",
            f"height x width x num_frames = {pixels * frames}: at most {limits.max_pixel_frames}",
        )


def _is_size(value: int) -> bool:
    return value > 0 and value % SIZE_MULTIPLE == 0


def _is_guidance(value: float) -> bool:
    return 0 <= value <= MAX_GUIDANCE_SCALE


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True

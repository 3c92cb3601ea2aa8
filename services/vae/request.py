"""What the caller of Decode sends, checked as it arrives."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import torch

from chitu_diffusion.config.schema import LimitsConfig
from chitu_diffusion.errors import InvalidRequestError, Violation
from chitu_diffusion.v1 import tensor_pb2, vae_pb2
from chitu_diffusion.wire import Payload, TensorReceiver

LATENTS = "latents"
FORMATS = ("mp4", "tensor")
MAX_FPS = 120

# How long a refused caller may go on sending before it is cut off.

_FLOATS = (
    tensor_pb2.DATA_TYPE_FLOAT16,
    tensor_pb2.DATA_TYPE_BFLOAT16,
    tensor_pb2.DATA_TYPE_FLOAT32,
    tensor_pb2.DATA_TYPE_FLOAT64,
    tensor_pb2.DATA_TYPE_FLOAT8_E4M3FN,
    tensor_pb2.DATA_TYPE_FLOAT8_E5M2,
)


@dataclass(frozen=True)
class LatentRules:
    """Which latents are taken."""

    channels: int
    """Channels of the model's latents."""
    spatial_stride: int
    """Pixels for a latent row or column."""
    temporal_stride: int
    """Frames for each latent frame after the first."""
    limits: LimitsConfig
    """Largest video."""

    def problems(self, shape: Sequence[int]) -> Iterator[str]:
        """Say what is wrong with a shape."""
        if len(shape) != 5 or shape[0] != 1 or min(shape) < 1:
            yield (
                f"shape {list(shape)}: must be "
                "(1, channels, latent_frames, latent_height, latent_width), each >= 1"
            )
            return
        if shape[1] != self.channels:
            yield f"shape {list(shape)}: {shape[1]} channels, the model has {self.channels}"
        frames = 1 + self.temporal_stride * (shape[2] - 1)
        pixels = shape[3] * shape[4] * self.spatial_stride**2
        for what, value, most in (
            ("frames", frames, self.limits.max_num_frames),
            ("pixels a frame", pixels, self.limits.max_pixels),
            ("pixels in all", pixels * frames, self.limits.max_pixel_frames),
        ):
            if value > most:
                yield f"shape {list(shape)}: {value} {what}: at most {most}"


async def read_request(
    requests: AsyncIterator[vae_pb2.DecodeRequest], rules: LatentRules
) -> tuple[vae_pb2.DecodeStart, torch.Tensor]:
    """Read a whole call.

    Returns:
        The first message, and the latents (1, channels, F, H, W) float32 on the CPU, finite.

    Raises:
        InvalidRequestError: something is missing, surplus, out of order, or breaks a rule. Found
            before memory is taken for it.
        DataLossError: the checksum of the latents does not match.
    """
    start: vae_pb2.DecodeStart | None = None
    payload: Payload | None = None
    receiver = TensorReceiver()
    async for request in requests:
        kind = request.WhichOneof("request")
        if (kind == "start") != (start is None) or kind is None:
            raise InvalidRequestError.of("request", f"{kind}: must be start once, then tensor")
        if kind == "start":
            start = request.start
            check_start(start)
            continue
        if payload is not None:
            raise InvalidRequestError.of("tensor", f"only {LATENTS!r} is taken, once")
        if request.tensor.WhichOneof("part") == "header":
            check_header(request.tensor.header, rules)
        payload = receiver.feed(request.tensor)
    if start is None:
        raise InvalidRequestError.of("start", "missing")
    if payload is None:
        raise InvalidRequestError.of(LATENTS, "missing or incomplete")
    # Casting and scanning megabytes would hold up the event loop.
    return start, await asyncio.to_thread(to_latents, payload)


def check_start(start: vae_pb2.DecodeStart) -> None:
    """Refuse a DecodeStart that breaks a rule.

    Raises:
        InvalidRequestError: names each field.
    """
    violations = [*_start_problems(start)]
    if violations:
        raise InvalidRequestError(violations)


def _start_problems(start: vae_pb2.DecodeStart) -> Iterator[Violation]:
    if start.output_format not in FORMATS:
        yield Violation(
            "start.output_format",
            f"{start.output_format!r}: must be one of {', '.join(map(repr, FORMATS))}",
        )
    # A tensor has no frame rate, so there 0 (left out) is no mistake.
    if not (start.output_format == "tensor" and start.fps == 0) and not 1 <= start.fps <= MAX_FPS:
        yield Violation("start.fps", f"{start.fps}: must be 1 to {MAX_FPS}")
    for key, value in start.metadata.items():
        if not key or "\0" in key + value:
            yield Violation(
                f"start.metadata[{key!r}]", "key must not be empty, nor either hold NUL characters"
            )


def check_header(header: tensor_pb2.TensorHeader, rules: LatentRules) -> None:
    """Refuse an announced tensor before memory is taken for it.

    Raises:
        InvalidRequestError: another name, type or shape.
    """
    if header.name != LATENTS:
        raise InvalidRequestError.of("tensor", f"{header.name!r}: only {LATENTS!r} is taken")
    violations = [Violation(LATENTS, problem) for problem in rules.problems(header.shape)]
    if header.data_type not in _FLOATS:
        name = tensor_pb2.DataType.Name(header.data_type)
        violations.append(Violation(LATENTS, f"{name}: must be a floating-point type"))
    if violations:
        raise InvalidRequestError(violations)


def to_latents(payload: Payload) -> torch.Tensor:
    """Cast to float32, whatever came.

    Raises:
        InvalidRequestError: a value is not finite (or too large for float32).
    """
    latents = payload.to_torch().float()
    wrong = math.prod(latents.shape) - int(torch.isfinite(latents).sum())
    if wrong:
        raise InvalidRequestError.of(LATENTS, f"{wrong} values are not finite")
    return latents

"""What the doors of Denoise and Forward share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from chitu_diffusion.errors import InvalidRequestError, Violation

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""Types of tensors that are taken in any precision."""


def check_header(payload_name: str, expected: Iterable[str], received: Iterable[str]) -> None:
    """Refuse a tensor that was not announced or has come before."""
    if payload_name not in expected:
        raise InvalidRequestError.of(
            payload_name, f"unexpected tensor: must be one of {listed(expected)}"
        )
    if payload_name in received:
        raise InvalidRequestError.of(payload_name, "was sent twice")


def not_finite(tensors: Mapping[str, torch.Tensor]) -> Iterator[Violation]:
    """Find the tensors that hold NaN or infinity."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            yield Violation(name, "holds values that are not finite")


def refuse(problems: Iterable[Violation]) -> None:
    """Raise `InvalidRequestError` with all problems, if there are any."""
    violations = list(problems)
    if violations:
        raise InvalidRequestError(violations)


def listed(names: Iterable[str]) -> str:
    """Write names for a message."""
    return ", ".join(map(repr, names))

"""What a rank is asked to do, and what it gives back."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from chitu_diffusion.v1 import component_pb2, dit_pb2
from services.dit.denoiser import Checkpoint, Plan, StepDone


class Source(enum.Enum):
    """Where a slice's first latents come from."""

    NOISE = enum.auto()
    HELD = enum.auto()
    CHECKPOINT = enum.auto()


@dataclass(frozen=True)
class Order:
    """A slice as a caller asked for it, checked."""

    start: dit_pb2.DenoiseStart
    plan: Plan
    """Of the whole task."""
    tensors: Mapping[str, torch.Tensor]
    """Named as in dit.proto."""


@dataclass(frozen=True)
class Slice:
    """Steps [first_step, end_step) of one task, and what to give back, as a rank sees it."""

    task_id: str
    plan: Plan
    first_step: int
    end_step: int
    source: Source
    prompt_embeds: torch.Tensor | None
    """(length, text_dim), any float type: true rows only. None on ranks other than the leader."""
    negative_prompt_embeds: torch.Tensor | None = None
    checkpoint: Checkpoint | None = None
    """Set when source is CHECKPOINT, on the leader."""
    number: int = 0
    """Of the slice in its pool."""
    attn_type: str = ""
    """Empty = the rank's own."""
    keep_state: bool = False
    return_latents: bool = False
    return_checkpoint: bool = False
    checkpoint_interval_s: float = 0.0
    """0 = none between steps."""


@dataclass(frozen=True)
class SliceDone:
    """The slice has ended."""

    next_step: int
    attn_type: str
    report: component_pb2.StageReport
    """Time and memory, without the time it waited."""
    latents: torch.Tensor | None
    """On the CPU, if asked for."""
    checkpoint: Checkpoint | None
    """If asked for."""


Event = StepDone | Checkpoint | SliceDone


@dataclass(frozen=True)
class Forward:
    """One run of one transformer."""

    expert: int
    """Position in the list of experts."""
    hidden_states: torch.Tensor
    """(1, C, F, H, W), any float type."""
    timestep: float
    prompt_embeds: torch.Tensor
    """(length, text_dim), any float type."""
    attn_type: str = ""
    """Empty = the rank's own."""


@dataclass(frozen=True)
class ForwardDone:
    """What came of a `Forward`."""

    velocity: torch.Tensor
    """(1, C, F, H, W) float32 on the CPU."""
    attn_type: str
    report: component_pb2.StageReport
    """Time and memory, without the time it waited."""

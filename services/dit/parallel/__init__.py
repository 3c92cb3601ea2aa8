"""How the ranks of a slice share its work.

`Group` is what the ranks of a slice do together between forwards, `Parallel` what they do within
one. Both have one implementation for a single rank, here, and one over process groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from services.dit.attention import Attention
from services.dit.parallel.layout import Layout, Place, auto_layout, configured, offered

__all__ = [
    "ALONE",
    "Alone",
    "Group",
    "Layout",
    "Parallel",
    "Place",
    "SequenceParallel",
    "auto_layout",
    "configured",
    "offered",
]


class SequenceParallel(Protocol):
    """Splits the tokens of a forward over ranks and joins them again."""

    def shard(self, tokens: torch.Tensor, dim: int) -> torch.Tensor:
        """Take this rank's part of `tokens` along `dim`, padded to the same length on all ranks."""

    def gather(self, tokens: torch.Tensor, dim: int) -> torch.Tensor:
        """Join the parts of all ranks along `dim`, without padding; the inverse of `shard`."""

    def attend(
        self, attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attend over the whole sequence from this rank's q, k, v (B, S, H, D)."""


class Parallel(SequenceParallel, Protocol):
    """One rank's share of a forward: its tokens, and its branches of the guidance."""

    @property
    def branches(self) -> tuple[int, ...]:
        """What it computes of a guided step: 0 is the positive branch, 1 the negative one."""

    def gather_branches(self, velocities: torch.Tensor) -> torch.Tensor:
        """Join what the ranks computed of `branches`, (n, C, F, H, W), to (2, C, F, H, W)."""


class Group(Protocol):
    """The ranks of one slice."""

    @property
    def layout(self) -> Layout:
        """How they share a forward."""

    @property
    def position(self) -> int:
        """Which of them this one is; 0 is the leader, to whom the caller speaks."""

    def tell(self, facts: Sequence[int]) -> list[list[int]]:
        """Give every rank the integers of all, by position; the same number from each."""

    def share(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite `tensor` with that of the rank at position `source`, of the same shape."""

    def parallel(self, num_tokens: int) -> Parallel:
        """Take this rank's share of forwards over so many tokens."""


class Alone:
    """A single rank has the whole sequence and both branches, and nobody to ask."""

    layout = Layout()
    position = 0
    branches = (0, 1)

    def tell(self, facts: Sequence[int]) -> list[list[int]]:
        """Hear oneself."""
        return [list(facts)]

    def share(self, tensor: torch.Tensor, source: int) -> None:
        """Leave it as it is."""

    def parallel(self, num_tokens: int) -> Alone:
        """All of it."""
        return self

    def shard(self, tokens: torch.Tensor, dim: int) -> torch.Tensor:
        """Return all tokens."""
        return tokens

    def gather(self, tokens: torch.Tensor, dim: int) -> torch.Tensor:
        """Return all tokens."""
        return tokens

    def attend(
        self, attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Call the kernel."""
        return attention(q, k, v)

    def gather_branches(self, velocities: torch.Tensor) -> torch.Tensor:
        """Return them."""
        return velocities


ALONE = Alone()

"""How the ranks of a slice share one sequence of tokens."""

from __future__ import annotations

from typing import Protocol

import torch

from services.dit.attention import Attention


class SequenceParallel(Protocol):
    """Splits the tokens of a forward over ranks and joins them again."""

    def shard(self, tokens: torch.Tensor, dim: int) -> torch.Tensor:
        """Take this rank's part of `tokens` along `dim`."""

    def gather(self, tokens: torch.Tensor, dim: int) -> torch.Tensor:
        """Join the parts of all ranks along `dim`; the inverse of `shard`."""

    def attend(
        self, attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attend over the whole sequence from this rank's q, k, v (B, S, H, D)."""


class OneRank:
    """A single rank has the whole sequence."""

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

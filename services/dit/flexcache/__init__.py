"""Feature reuse between denoise steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class BlockCache(Protocol):
    """Decides at each step whether the blocks run. One object belongs to one task and expert."""

    def run(
        self,
        step_index: int,
        hidden: torch.Tensor,
        blocks: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return what the blocks make of `hidden` (B, S, dim) float32, or a stand-in for it.

        `blocks` overwrites its argument.
        """


class NoCache:
    """Every step is computed."""

    def run(
        self,
        step_index: int,
        hidden: torch.Tensor,
        blocks: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Run the blocks."""
        return blocks(hidden)

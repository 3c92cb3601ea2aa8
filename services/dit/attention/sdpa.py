"""Exact attention by torch, on any device and in any type."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Sdpa:
    """`torch.nn.functional.scaled_dot_product_attention`."""

    name = "sdpa"

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend: q (B, S, H, D); k, v (B, L, H, D), where L may differ from S."""
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        )
        return attended.transpose(1, 2)

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

    def with_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend, and return also the log-sum-exp (B, S, H) float32.

        torch tells it only through the operators behind its attention.
        """
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        ops = torch.ops.aten
        if q.device.type == "cpu":
            attended, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        elif q.dtype == torch.float32:
            attended, lse, *_ = ops._scaled_dot_product_efficient_attention(q, k, v, None, True)
            lse = lse[..., : q.shape[2]]  # comes padded
        else:
            attended, lse, *_ = ops._scaled_dot_product_flash_attention(q, k, v)
        return attended.transpose(1, 2), lse.transpose(1, 2)

"""FlashAttention-2 (Dao, 2023), from the optional package flash-attn: exact, half types, CUDA."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import cast

import torch

from services.common.placement import dtype_name

_MAX_HEAD_DIM = 256


def obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Say why the kernel cannot run for such tensors; None if it can."""
    if device.type != "cuda":
        return f"runs on CUDA only, not on {device}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16, not {dtype_name(dtype)}"
    if head_dim > _MAX_HEAD_DIM or head_dim % 8:
        return f"needs a head_dim that is a multiple of 8 up to {_MAX_HEAD_DIM}, not {head_dim}"
    if find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    return None


class FlashAttention:
    """`flash_attn_func`, which takes (B, S, H, D) as it is."""

    name = "flash_attn"

    def __init__(self) -> None:
        """Load the kernel."""
        self._kernel = import_module("flash_attn").flash_attn_func

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend: q, k, v (B, S, H, D), float16 or bfloat16."""
        return cast(torch.Tensor, self._kernel(q, k, v))

    def with_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend, and return also the log-sum-exp (B, S, H) float32."""
        attended, lse, _ = self._kernel(q, k, v, return_attn_probs=True)
        return attended, lse.transpose(1, 2)

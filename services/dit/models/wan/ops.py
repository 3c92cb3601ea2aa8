"""Element-wise parts of the transformer, in the form that is fastest on each device."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

_TWICE_ROOT = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Apply GELU in its tanh form (Hendrycks & Gimpel, 2016).

    torch's kernel is slow on the CPU, where tanh costs five times as much as silu. With
    u = sqrt(8 / pi) (1 + 0.044715 x^2) the same function is silu(u x) / u.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return F.gelu(x, approximate="tanh")
    u = torch.addcmul(x.new_tensor(_TWICE_ROOT), x, x, value=_TWICE_ROOT * _CUBIC)
    return F.silu(u * x, inplace=True).div_(u)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide by the root of the mean square of the last dimension, in float32 (..., dim)."""
    if x.device.type != "cpu":
        return F.rms_norm(x.float(), x.shape[-1:], weight, eps)
    x = x.float()
    return (x * _inverse_rms(x, eps)).mul_(weight)


def rms_norm_rotate(
    x: torch.Tensor, weight: torch.Tensor, eps: float, rope: torch.Tensor
) -> torch.Tensor:
    """Normalise over all heads, then turn each pair of channels; in float32.

    Args:
        x: (B, S, H * D).
        weight: (H * D,) float32.
        eps: added to the mean square.
        rope: (S, 1, D / 2) complex64.

    Returns:
        (B, S, H, D) in the type of `x`.
    """
    heads = (*x.shape[:-1], -1, rope.shape[-1], 2)
    if x.device.type != "cpu":
        pairs = F.rms_norm(x.float(), x.shape[-1:], weight, eps).view(heads)
    else:
        # The norm of a token is one number: it rides on the rotation instead of a pass of its own.
        rope = rope * _inverse_rms(x, eps).unsqueeze(-1)
        pairs = (x * weight).view(heads)
    turned = torch.view_as_complex(pairs).mul_(rope)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps))

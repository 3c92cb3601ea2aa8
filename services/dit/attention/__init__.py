"""Kernels for self-attention, behind one signature, and the choice between them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from chitu_diffusion.errors import ConfigError, PreconditionError
from services.dit.attention import flash_attn, sdpa

NOT_BUILT = ("sage", "sparge")
"""Kernels that this version knows by name and cannot run."""
ATTN_TYPES = ("sdpa", "flash_attn", *NOT_BUILT)
"""Kernels that a request may name; `select` says whether they run here."""


class Attention(Protocol):
    """Exact or approximate softmax(q k^T / sqrt(D)) v over the whole sequence, not causal."""

    @property
    def name(self) -> str:
        """Name in configurations and reports, e.g. "sdpa"."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend: q, k, v and the result are (B, S, H, D) in the compute dtype."""


@runtime_checkable
class AttentionWithLse(Attention, Protocol):
    """A kernel whose results over parts of the keys can be merged, as ring attention does."""

    def with_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend, and return also log(sum(exp(q k^T / sqrt(D)))), (B, S, H) float32."""


def needs_lse(attention: Attention) -> AttentionWithLse:
    """See a kernel as one that ring attention can use.

    Raises:
        PreconditionError: it is none.
    """
    if not isinstance(attention, AttentionWithLse):
        raise PreconditionError(
            f"attention back end {attention.name!r} does not tell its log-sum-exp: "
            "it cannot run with ring_degree > 1"
        )
    return attention


def select(
    attn_type: str, device: torch.device, dtype: torch.dtype, head_dim: int, key: str = "attn_type"
) -> Attention:
    """Make the kernel that a configuration or a request names.

    `auto` takes the fastest exact kernel that can run here; the result's `name` says which.

    Args:
        attn_type: one of the configuration's choices.
        device: where q, k and v will be.
        dtype: their type.
        head_dim: their D.
        key: where the name was read, for messages.

    Raises:
        ConfigError: the kernel is unknown or cannot run here; says why.
    """
    if attn_type == "sdpa":
        return sdpa.Sdpa()
    if attn_type in NOT_BUILT:
        raise ConfigError(
            f"{key}={attn_type!r}: this back end is not built yet, "
            "there are 'auto', 'sdpa' and 'flash_attn'"
        )
    if attn_type not in ("auto", "flash_attn"):
        raise ConfigError(f"{key}={attn_type!r}: must be one of 'auto', 'sdpa', 'flash_attn'")
    obstacle = flash_attn.obstacle(device, dtype, head_dim)
    if obstacle is None:
        return flash_attn.FlashAttention()
    if attn_type == "auto":
        return sdpa.Sdpa()
    raise ConfigError(f"{key}='flash_attn': {obstacle}")

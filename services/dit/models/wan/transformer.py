"""The Wan diffusion transformer: latents and prompt embeddings to the velocity of the flow.

Architecture: "Wan: Open and Advanced Large-Scale Video Generative Models" (Wan team, 2025).
Everything that stays the same over the steps of a task is computed once, by `prepare`; a step
computes only what depends on the latents. How attention is computed, how tokens are spread over
ranks and whether blocks are reused are arguments. Module names are those of the diffusers layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from chitu_diffusion.config.schema import TransformerConfig
from services.dit.attention import Attention
from services.dit.attention.sdpa import Sdpa
from services.dit.flexcache import BlockCache
from services.dit.models.family import Transformer
from services.dit.models.wan.ops import gelu_tanh, rms_norm, rms_norm_rotate
from services.dit.parallel import SequenceParallel

_ROPE_THETA = 10000.0
_TIME_PERIOD = 10000.0
# Rows of a block's modulation.
_SHIFT, _SCALE, _GATE, _FFN_SHIFT, _FFN_SCALE, _FFN_GATE = range(6)

_exact_attention = Sdpa()


@dataclass(frozen=True)
class Constants:
    """What a task needs at every step and no step changes. B is the number of guidance branches."""

    rope: torch.Tensor
    """(S, 1, head_dim / 2) complex64: the rotation of each token and pair."""
    modulation: torch.Tensor
    """(N, 6, dim) float32: what the timesteps add to every block's table."""
    head_modulation: torch.Tensor
    """(N, 2, dim) float32: shift and scale + 1 of the head."""
    cross: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Keys and values of every block's cross-attention, (B, text_len, H, head_dim)."""

    @property
    def num_tokens(self) -> int:
        """S."""
        return self.rope.shape[0]

    def branch(self, index: int) -> Constants:
        """Return the constants of one branch, B = 1, without copying."""
        row = slice(index, index + 1)
        cross = tuple((k[row], v[row]) for k, v in self.cross)
        return Constants(self.rope, self.modulation, self.head_modulation, cross)


class SelfAttention(nn.Module):
    """Attention among tokens, with RMS-normed and rotated queries and keys."""

    def __init__(self, dim: int, num_heads: int, eps: float) -> None:
        super().__init__()
        self.num_heads, self.eps = num_heads, eps
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])
        self.norm_q, self.norm_k = (nn.RMSNorm(dim, eps) for _ in range(2))

    def fuse(self) -> None:
        """Make one matrix product of the three projections."""
        parts = (self.to_q, self.to_k, self.to_v)
        self.qkv_weight = _constant(torch.cat([part.weight for part in parts]))
        self.qkv_bias = _constant(torch.cat([part.bias for part in parts]))
        del self.to_q, self.to_k, self.to_v

    def forward(
        self,
        tokens: torch.Tensor,
        rope: torch.Tensor,
        attention: Attention,
        parallel: SequenceParallel,
    ) -> torch.Tensor:
        """Map tokens (B, S, dim) in the compute dtype to the same shape and type."""
        q, k, v = F.linear(tokens, self.qkv_weight, self.qkv_bias).chunk(3, dim=-1)
        q = rms_norm_rotate(q, self.norm_q.weight, self.eps, rope)
        k = rms_norm_rotate(k, self.norm_k.weight, self.eps, rope)
        attended = parallel.attend(attention, q, k, _split_heads(v, self.num_heads))
        out: torch.Tensor = self.to_out[0](attended.flatten(2))
        return out


class CrossAttention(nn.Module):
    """Attention from tokens to the rows of the text, zero rows included."""

    def __init__(self, dim: int, num_heads: int, eps: float) -> None:
        super().__init__()
        self.num_heads, self.eps = num_heads, eps
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])
        self.norm_q, self.norm_k = (nn.RMSNorm(dim, eps) for _ in range(2))

    def keys_values(self, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Project text rows (B, L, dim) to keys and values (B, L, H, head_dim)."""
        k = rms_norm(self.to_k(text), self.norm_k.weight, self.eps).to(text.dtype)
        return _split_heads(k, self.num_heads), _split_heads(self.to_v(text), self.num_heads)

    def forward(self, tokens: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Map tokens (B, S, dim) in the compute dtype to the same shape and type."""
        q = rms_norm(self.to_q(tokens), self.norm_q.weight, self.eps).to(tokens.dtype)
        attended = _exact_attention(_split_heads(q, self.num_heads), k, v)
        out: torch.Tensor = self.to_out[0](attended.flatten(2))
        return out


class Projection(nn.Module):
    """The first half of the feed-forward layer; exists for the published names."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, ffn_dim)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (B, S, dim) to (B, S, ffn_dim)."""
        return gelu_tanh(self.proj(tokens))


class FeedForward(nn.Module):
    """Linear, GELU, Linear."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        # The middle entry is dropout in training.
        self.net = nn.ModuleList([Projection(dim, ffn_dim), nn.Identity(), nn.Linear(ffn_dim, dim)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens (B, S, dim) to the same shape and type."""
        out: torch.Tensor = self.net[2](self.net[0](tokens))
        return out


class Block(nn.Module):
    """Self-attention, cross-attention and feed-forward, each added to a float32 residual stream."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.eps
        self.eps = eps
        self.attn1 = SelfAttention(dim, config.num_heads, eps)
        self.norm2 = nn.LayerNorm(dim, eps)
        self.attn2 = CrossAttention(dim, config.num_heads, eps)
        self.ffn = FeedForward(dim, config.ffn_dim)
        self.scale_shift_table = nn.Parameter(torch.empty(1, 6, dim))

    def forward(
        self,
        hidden: torch.Tensor,
        modulation: torch.Tensor,
        cross: tuple[torch.Tensor, torch.Tensor],
        rope: torch.Tensor,
        dtype: torch.dtype,
        attention: Attention,
        parallel: SequenceParallel,
    ) -> torch.Tensor:
        """Update `hidden` (B, S, dim) float32 in place; `modulation` (6, dim) float32."""
        m = (self.scale_shift_table[0] + modulation).unbind()
        tokens = _modulate(hidden, m[_SHIFT], m[_SCALE], self.eps).to(dtype)
        hidden.addcmul_(self.attn1(tokens, rope, attention, parallel), m[_GATE])
        hidden.add_(self.attn2(self.norm2(hidden).to(dtype), *cross))
        tokens = _modulate(hidden, m[_FFN_SHIFT], m[_FFN_SCALE], self.eps).to(dtype)
        return hidden.addcmul_(self.ffn(tokens), m[_FFN_GATE])


class Mlp(nn.Module):
    """Two linear layers, published as `linear_1` and `linear_2`."""

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(width, dim)
        self.linear_2 = nn.Linear(dim, dim)


class ConditionEmbedder(nn.Module):
    """Timesteps and text rows to the width of a token."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        dim = config.hidden_size
        self.freq_dim = config.freq_dim
        self.time_embedder = Mlp(config.freq_dim, dim)
        self.time_proj = nn.Linear(dim, 6 * dim)
        self.text_embedder = Mlp(config.text_dim, dim)

    def embed_text(self, text: torch.Tensor) -> torch.Tensor:
        """Map rows (B, L, text_dim) to (B, L, dim)."""
        mlp = self.text_embedder
        rows: torch.Tensor = mlp.linear_2(gelu_tanh(mlp.linear_1(text)))
        return rows

    def embed_time(self, timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map timesteps (N,) float64 to (N, dim) for the head and (N, 6, dim) for the blocks."""
        mlp = self.time_embedder
        wave = sinusoid(timesteps, self.freq_dim).to(mlp.linear_1.weight.dtype)
        time = mlp.linear_2(F.silu(mlp.linear_1(wave)))
        return time, self.time_proj(F.silu(time)).view(*time.shape[:-1], 6, -1)


class WanTransformer(Transformer):
    """Predicts the velocity of noisy latents.

    Call `fuse` after the weights are loaded, `prepare` once a task, and the module once a step.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        dim = config.hidden_size
        self.patch_size = (config.patch_size[0], config.patch_size[1], config.patch_size[2])
        self.patch_embedding = nn.Conv3d(
            config.in_channels, dim, self.patch_size, stride=self.patch_size
        )
        self.condition_embedder = ConditionEmbedder(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.proj_out = nn.Linear(dim, config.out_channels * math.prod(self.patch_size))
        self.scale_shift_table = nn.Parameter(torch.empty(1, 2, dim))

    def fuse(self) -> None:
        """Merge projections that share their input. Names of the weights change by this."""
        for block in self._typed_blocks():
            block.attn1.fuse()

    def compile_blocks(self) -> None:
        """Compile every block; all of them share their code."""
        for block in self._typed_blocks():
            block.compile()

    def prepare(
        self, prompt_embeds: torch.Tensor, grid: tuple[int, int, int], timesteps: Sequence[float]
    ) -> Constants:
        """Compute a task's constants.

        Args:
            prompt_embeds: (B, text_len, text_dim), zero rows after each prompt's true length.
            grid: latent frames, height and width.
            timesteps: of all steps of the plan, 0 to 1000.
        """
        weight = self.proj_out.weight
        text = self.condition_embedder.embed_text(prompt_embeds.to(weight.device, weight.dtype))
        steps = torch.tensor(timesteps, dtype=torch.float64, device=weight.device)
        time, modulation = self.condition_embedder.embed_time(steps)
        head = self.scale_shift_table + time.unsqueeze(1)
        # Scales are used as 1 + scale.
        modulation[:, [_SCALE, _FFN_SCALE]] += 1
        head[:, 1] += 1
        tokens = tuple(size // patch for size, patch in zip(grid, self.patch_size, strict=True))
        rope = rotations(tokens, self.config.hidden_size // self.config.num_heads)
        cross = tuple(block.attn2.keys_values(text) for block in self._typed_blocks())
        return Constants(rope.to(weight.device), modulation, head, cross)

    def forward(
        self,
        latents: torch.Tensor,
        step_index: int,
        constants: Constants,
        *,
        attention: Attention,
        parallel: SequenceParallel,
        cache: BlockCache,
    ) -> torch.Tensor:
        """Return the velocity (B, out_channels, F, H, W) float32 of latents (B, C, F, H, W).

        Args:
            latents: any float type; F, H and W are multiples of the patch size.
            step_index: position in the timesteps given to `prepare`.
            constants: of this task, with the same B.
            attention: kernel of the self-attention.
            parallel: how the tokens are spread.
            cache: whether the blocks run.
        """
        dtype = self.proj_out.weight.dtype
        rope = parallel.shard(constants.rope, 0)
        modulation = constants.modulation[step_index]

        def run_blocks(hidden: torch.Tensor) -> torch.Tensor:
            for block, cross in zip(self._typed_blocks(), constants.cross, strict=True):
                hidden = block(hidden, modulation, cross, rope, dtype, attention, parallel)
            return hidden

        hidden = self._embed(parallel.shard(self._patchify(latents.to(dtype)), 1)).float()
        hidden = cache.run(step_index, hidden, run_blocks)
        shift, scale = constants.head_modulation[step_index]
        patches = self.proj_out(_modulate(hidden, shift, scale, self.config.eps).to(dtype))
        return self._unpatchify(parallel.gather(patches, 1), latents.shape[2:]).float()

    def _typed_blocks(self) -> Iterable[Block]:
        return cast(Iterable[Block], self.blocks)

    def _patchify(self, latents: torch.Tensor) -> torch.Tensor:
        """Cut (B, C, F, H, W) into patches (B, S, C * f * h * w)."""
        (b, c, *size), (f, h, w) = latents.shape, self.patch_size
        patches = latents.reshape(b, c, size[0] // f, f, size[1] // h, h, size[2] // w, w)
        return patches.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(b, -1, c * f * h * w)

    def _embed(self, patches: torch.Tensor) -> torch.Tensor:
        """Project patches (B, S, C * f * h * w) to tokens (B, S, dim)."""
        return F.linear(patches, self.patch_embedding.weight.flatten(1), self.patch_embedding.bias)

    def _unpatchify(self, patches: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
        """Lay patches (B, S, f * h * w * C) out as (B, C, F, H, W)."""
        counts = [whole // part for whole, part in zip(size, self.patch_size, strict=True)]
        laid = patches.view(-1, *counts, *self.patch_size, self.config.out_channels)
        return laid.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(patches.shape[0], -1, *size)


def sinusoid(timesteps: torch.Tensor, width: int) -> torch.Tensor:
    """Embed timesteps (N,) as cosines and then sines (N, width), in the type of `timesteps`."""
    steps = torch.arange(width // 2, dtype=timesteps.dtype, device=timesteps.device)
    angles = timesteps[:, None] * torch.exp(-math.log(_TIME_PERIOD) * steps / (width // 2))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rotations(grid: Sequence[int], head_dim: int) -> torch.Tensor:
    """Make rotary position factors (S, 1, head_dim / 2), complex64, for a grid of tokens.

    RoPE (Su et al., 2021) in three directions: heights and widths get 2 * (head_dim // 6) channels
    each, frames the rest.
    """
    side = 2 * (head_dim // 6)
    parts = []
    for axis, (count, width) in enumerate(
        zip(grid, (head_dim - 2 * side, side, side), strict=True)
    ):
        rates = _ROPE_THETA ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.outer(torch.arange(count, dtype=torch.float64), rates)
        shape = [1, 1, 1, width // 2]
        shape[axis] = count
        parts.append(angles.view(shape).expand(*grid, -1))
    angles = torch.cat(parts, dim=-1).flatten(0, 2)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).unsqueeze(1)


def _modulate(
    hidden: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float
) -> torch.Tensor:
    """Normalise and modulate in one pass; `scale` has its 1 added already."""
    return F.layer_norm(hidden, hidden.shape[-1:], scale, shift, eps)


def _split_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """View (B, S, dim) as (B, S, H, head_dim)."""
    return x.view(*x.shape[:-1], num_heads, -1)


def _constant(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)

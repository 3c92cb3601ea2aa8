"""A forward that several ranks share: guidance, Ulysses and ring, in any product.

Tokens are padded at their end to a multiple of cp_size and cut into equal parts, in the order of
the ranks. Ulysses (Jacobs et al., 2023) turns a part of the tokens with all heads into a longer
part with some of them, so that its ring_degree ranks of equal heads each have one unbroken segment.
Ring attention (Liu et al., 2023) passes keys and values of the segments round. Padding is never
masked: keys and values end where the sequence does, and rows of padding are dropped at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from services.dit.attention import Attention, needs_lse
from services.dit.parallel.layout import Layout
from services.dit.parallel.peers import Peers, Pending


class SharedForward:
    """One rank's share of forwards over `num_tokens` tokens."""

    def __init__(
        self, layout: Layout, position: int, peers: Callable[[str], Peers], num_tokens: int
    ) -> None:
        """Take what is this rank's.

        Args:
            layout: of the group.
            position: of this rank in it.
            peers: the ranks of a direction: "cfg", "cp", "ulysses" or "ring".
            num_tokens: of the whole sequence.
        """
        self._layout, self._peers, self._num_tokens = layout, peers, num_tokens
        self._place = layout.place(position)
        self._cp_rank = position % layout.cp_size
        self._part = -(-num_tokens // layout.cp_size)
        """Tokens of each rank, padding included."""

    @property
    def branches(self) -> tuple[int, ...]:
        """Both, or the one of this rank."""
        return (0, 1) if self._layout.cfg_size == 1 else (self._place.cfg_rank,)

    def gather_branches(self, velocities: torch.Tensor) -> torch.Tensor:
        """Exchange the branches, if they are on different ranks."""
        if self._layout.cfg_size == 1:
            return velocities
        return self._peers("cfg").all_gather(velocities).flatten(0, 1)

    def shard(self, tokens: torch.Tensor, dim: int) -> torch.Tensor:
        """Take this rank's part; what is beyond the last token is zero."""
        if self._layout.cp_size == 1:
            return tokens
        first = min(self._cp_rank * self._part, self._num_tokens)
        part = tokens.narrow(dim, first, min(self._part, self._num_tokens - first))
        missing = self._part - part.shape[dim]
        if not missing:
            return part
        return F.pad(part, [0, 0] * (part.ndim - 1 - dim) + [0, missing])

    def gather(self, tokens: torch.Tensor, dim: int) -> torch.Tensor:
        """Join the parts and drop the padding."""
        if self._layout.cp_size == 1:
            return tokens
        parts = self._peers("cp").all_gather(tokens.movedim(dim, 0))
        return parts.flatten(0, 1)[: self._num_tokens].movedim(0, dim)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # no graph can hold a collective
    def attend(
        self, attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attend from q, k, v (B, S, H, D), where S is this rank's part with its padding."""
        if self._layout.ulysses_degree == 1:
            return self._over_ring(attention, q, k, v)
        # v is sent first: it is ready before the others. All three are under way together.
        arriving = [self._to_heads(x) for x in (v, q, k)]
        v, q, k = (_as_segment(buffer, pending) for buffer, pending in arriving)
        return self._to_tokens(self._over_ring(attention, q, k, v))

    def _to_heads(self, x: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        """Begin to exchange (B, S, H, D) for (U, B, S, H / U, D): some heads of U parts."""
        degree = self._layout.ulysses_degree
        b, s, heads, d = x.shape
        parts = x.reshape(b, s, degree, heads // degree, d).movedim(2, 0).contiguous()
        return self._peers("ulysses").exchange(parts)

    def _to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange (B, U * S, H / U, D) for (B, S, H, D)."""
        degree = self._layout.ulysses_degree
        b, s, heads, d = x.shape
        parts = x.reshape(b, degree, s // degree, heads, d).movedim(1, 0).contiguous()
        received, pending = self._peers("ulysses").exchange(parts)
        pending.wait()
        return received.movedim(0, 2).flatten(2, 3)

    def _valid(self, ring_rank: int) -> int:
        """Tokens of a segment that are no padding."""
        segment = self._part * self._layout.ulysses_degree
        return max(0, min(segment, self._num_tokens - ring_rank * segment))

    def _over_ring(
        self, attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attend from this rank's segment to those of all ranks of the ring."""
        degree, mine = self._layout.ring_degree, self._place.ring_rank
        if degree == 1:
            valid = self._valid(0)
            return attention(q, k[:, :valid], v[:, :valid])
        kernel = needs_lse(attention)
        passing = torch.stack((k, v))
        attended, lse = None, None
        for turn in range(degree):
            last = turn == degree - 1
            arriving = None if last else self._peers("ring").pass_on(passing, mine)
            valid = self._valid((mine - turn) % degree)
            if valid:
                k, v = passing[:, :, :valid]
                part, part_lse = kernel.with_lse(q, k, v)
                attended, lse = _merge(attended, lse, part, part_lse)
            if arriving is not None:
                received, pending = arriving
                pending.wait()
                passing = received
        assert attended is not None  # the first segment always has a token
        return attended.to(q.dtype)


def _as_segment(received: torch.Tensor, pending: Pending) -> torch.Tensor:
    """Wait for (U, B, S, h, D) and see it as (B, U * S, h, D); without a copy when B is 1."""
    pending.wait()
    return received.movedim(0, 1).flatten(1, 2)


def _merge(
    total: torch.Tensor | None,
    total_lse: torch.Tensor | None,
    part: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join attention over two sets of keys, in float32; (B, S, H, D) with (B, S, H)."""
    part = part.float()
    if total is None or total_lse is None:
        return part, lse
    # total e^a + part e^b over e^a + e^b = total + (part - total) sigmoid(b - a)
    weight = torch.sigmoid(lse - total_lse).unsqueeze(-1)
    return torch.lerp(total, part, weight), torch.logaddexp(total_lse, lse)

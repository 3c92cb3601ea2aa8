"""How the ranks of a slice share its work: cfg_size x ulysses_degree x ring_degree ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from chitu_diffusion.config.schema import DistributedConfig


@dataclass(frozen=True)
class Place:
    """Where a rank of a group stands."""

    cfg_rank: int
    """Guidance branch."""
    ring_rank: int
    ulysses_rank: int


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism. Their product is the number of ranks."""

    cfg_size: int = 1
    """1, or 2: the guidance branches on different ranks."""
    ulysses_degree: int = 1
    """Ranks that exchange heads for sequence around attention; divides the number of heads."""
    ring_degree: int = 1
    """Ranks that pass keys and values round."""

    def __str__(self) -> str:
        return f"cfg {self.cfg_size} x ulysses {self.ulysses_degree} x ring {self.ring_degree}"

    @property
    def cp_size(self) -> int:
        """Ranks that share a sequence."""
        return self.ulysses_degree * self.ring_degree

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.cfg_size * self.cp_size

    def place(self, position: int) -> Place:
        """Where the rank at a position of the group stands.

        Neighbours have the heaviest traffic, the exchange of heads; then the ring, then guidance.
        """
        cfg_rank, cp_rank = divmod(position, self.cp_size)
        ring_rank, ulysses_rank = divmod(cp_rank, self.ulysses_degree)
        return Place(cfg_rank, ring_rank, ulysses_rank)

    def position(self, place: Place) -> int:
        """The inverse of `place`."""
        cp_rank = place.ring_rank * self.ulysses_degree + place.ulysses_rank
        return place.cfg_rank * self.cp_size + cp_rank


def auto_layout(num_ranks: int, num_heads: int, *, cfg: bool = True) -> Layout:
    """Choose the layout that moves the fewest bytes over `num_ranks` ranks.

    Guidance first, as one small exchange a step is all it costs; then as many ranks as divide the
    heads; the ring takes what is left (USP, Fang & Zhao, 2024).

    Args:
        num_ranks: ranks to use, all of them.
        num_heads: attention heads of the model.
        cfg: whether the task has a negative branch.
    """
    return _filled(num_ranks, num_heads, (0 if cfg else 1, 0, 0))


def configured(distributed: DistributedConfig, num_heads: int) -> tuple[int, Layout]:
    """The number of ranks of a pool, and the layout of a slice that names none."""
    degrees = (distributed.cfg_size, distributed.ulysses_degree, distributed.ring_degree)
    world_size = distributed.world_size or math.prod(degree or 1 for degree in degrees)
    return world_size, _filled(world_size, num_heads, degrees)


def _filled(num_ranks: int, num_heads: int, degrees: tuple[int, int, int]) -> Layout:
    """Choose the degrees that are 0, one after the other."""
    cfg_size, ulysses, ring = degrees
    left = num_ranks // math.prod(degree or 1 for degree in degrees)
    if not cfg_size:
        cfg_size = 2 if left % 2 == 0 else 1
        left //= cfg_size
    if not ulysses:
        ulysses = math.gcd(left, num_heads)
        left //= ulysses
    return Layout(cfg_size, ulysses, ring or left)


def offered(world_size: int, num_heads: int, default: Layout) -> list[tuple[Layout, range]]:
    """The groups that a pool prepares: the default, and `auto` for every size that divides it.

    Each is a block of neighbours, so that groups of one layout fill the pool side by side.
    """
    layouts = [default]
    for size in range(world_size, 0, -1):
        if world_size % size == 0:
            layouts += [auto_layout(size, num_heads, cfg=cfg) for cfg in (True, False)]
    return [
        (layout, range(first, first + layout.size))
        for layout in dict.fromkeys(layouts)
        for first in range(0, world_size, layout.size)
    ]

"""The parallel groups that this process belongs to, if it is a rank of a DiT pool.

Process-wide, as torch.distributed's default group is: a process is a rank of at most one pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chitu_diffusion.errors import PreconditionError


@dataclass(frozen=True)
class ParallelGroups:
    """Sizes of the groups, this process's place in them, and torch's objects for them."""

    cp_size: int
    """Ranks that share a sequence."""
    cfg_size: int
    """Ranks that share the guidance branches: 1 or 2."""
    cp_rank: int
    """-1 in a process that is no rank."""
    cfg_rank: int
    cp_group: Any = None
    """A `torch.distributed.ProcessGroup`, as the next two; None in a process that is no rank."""
    cfg_group: Any = None
    world_group: Any = None


_joined: ParallelGroups | None = None


def join(groups: ParallelGroups) -> None:
    """Make this process a rank with these groups.

    Raises:
        PreconditionError: it is one already.
    """
    global _joined
    if _joined is not None:
        raise PreconditionError("this process is a rank of a pool already")
    _joined = groups


def leave() -> None:
    """Make this process no rank; no effect when it is none."""
    global _joined
    _joined = None


def current() -> ParallelGroups | None:
    """The groups of this process; None when it is no rank."""
    return _joined

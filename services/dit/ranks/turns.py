"""Whose turn it is, on which ranks of the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(eq=False)
class Turn:
    """A job that waits for ranks."""

    size: int
    """How many."""
    begin: Callable[[tuple[int, ...]], None]
    """Called once, with the ranks."""
    ranks: tuple[int, ...] = ()
    """Those that must do it; empty = any block of neighbours."""
    near: Iterable[int] = ()
    """Ranks of which one should be among them: they hold the task's state."""


class Turns:
    """First come, first served, on each rank.

    A job that has to wait keeps the ranks that it waits for: smaller ones behind it may use others,
    but cannot hold it up for ever.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._waiting: list[Turn] = []

    def add(self, turn: Turn) -> None:
        """Let a job wait, behind all others."""
        self._waiting.append(turn)

    def remove(self, turn: Turn) -> bool:
        """Forget a job; False if it has begun."""
        if turn not in self._waiting:
            return False
        self._waiting.remove(turn)
        return True

    def clear(self) -> None:
        """Forget all."""
        self._waiting.clear()

    def advance(self, free: Iterable[int]) -> None:
        """Begin all that can begin on ranks that do nothing."""
        left, beginning = set(free), []
        idle = frozenset(left)
        for turn in list(self._waiting):
            ranks = self._choose(turn, left)
            if idle.issuperset(ranks) and left.issuperset(ranks):
                self._waiting.remove(turn)
                beginning.append((turn, ranks))
            left.difference_update(ranks)
        for turn, ranks in beginning:
            turn.begin(ranks)

    def _choose(self, turn: Turn, left: set[int]) -> tuple[int, ...]:
        """The ranks that the job begins on, or waits for."""
        if turn.ranks:
            return turn.ranks
        near = set(turn.near)
        blocks = [
            range(first, first + turn.size)
            for first in range(0, self._world_size - turn.size + 1, turn.size)
        ]
        with_state = [block for block in blocks if near.intersection(block)]
        return tuple(max(with_state or blocks, key=lambda block: len(left.intersection(block))))

"""Real processes that are the ranks of one group after another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from services.dit.parallel import Alone, Group, Layout
from services.dit.parallel.groups import GroupBook
from tests.dit.conftest import CPU

LAYOUTS = [
    Layout(*degrees)
    for degrees in (
        (1, 1, 1),
        (2, 1, 1),
        (1, 2, 1),
        (1, 1, 2),
        (1, 1, 3),
        (2, 2, 1),
        (2, 1, 2),
        (1, 4, 1),
        (1, 2, 2),
        (1, 1, 4),
    )
]
"""All of up to four ranks, for a model of four heads."""
OF_SIX_HEADS = [Layout(1, 3, 1), Layout(1, 1, 3)]


class World:
    """One rank among them."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size = rank, size
        store = dist.FileStore(str(folder / "store"), size)
        self.book = GroupBook(store, rank, CPU)

    def group(self, layout: Layout, first: int = 0, epoch: int = 0) -> Group | None:
        """The group of the ranks from `first` on; None for a rank outside of it."""
        ranks = range(first, first + layout.size)
        if self.rank not in ranks:
            return None
        return Alone() if layout.size == 1 else self.book.group(ranks, layout, epoch)


def _begin(rank: int, size: int, folder: Path, work: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    torch.save(work(World(rank, size, folder), *args), folder / f"{rank}.pt")


def spread(folder: Path, size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `work(world, *args)` on every rank; what each returned, in order."""
    folder.mkdir(exist_ok=True)
    mp.spawn(_begin, args=(size, folder, work, args), nprocs=size)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]

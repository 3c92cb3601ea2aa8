"""Ranks as threads of one process: every layout on a single device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from services.dit.parallel import Layout
from services.dit.parallel.groups import directions
from services.dit.parallel.shared import SharedForward


class _Arrived:
    def wait(self) -> None:
        """It is there."""


class ThreadPeers:
    """Stands in for `Peers`: what threads leave in a list for each other."""

    def __init__(self, size: int) -> None:
        self._left: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def of(self, rank: int) -> ThreadPeers:
        """One thread's view."""
        view = object.__new__(ThreadPeers)
        view._left, view._barrier, view._rank = self._left, self._barrier, rank
        return view

    def _swap(self, tensor: torch.Tensor, take: Callable[[list[Any]], torch.Tensor]) -> Any:
        self._left[self._rank] = tensor
        self._barrier.wait()
        taken = take(self._left)
        self._barrier.wait()
        return taken

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._swap(tensor, torch.stack)

    def exchange(self, parts: torch.Tensor) -> tuple[torch.Tensor, _Arrived]:
        mine = self._rank
        return self._swap(parts, lambda left: torch.stack([p[mine] for p in left])), _Arrived()

    def pass_on(self, tensor: torch.Tensor, rank: int) -> tuple[torch.Tensor, _Arrived]:
        return self._swap(tensor, lambda left: left[rank - 1].clone()), _Arrived()

    _rank: int


def in_threads(
    layout: Layout, num_tokens: int, work: Callable[[SharedForward], torch.Tensor]
) -> list[torch.Tensor]:
    """What `work` gives for each rank of a layout."""
    groups: dict[tuple[str, tuple[int, ...]], ThreadPeers] = {}
    shares = []
    for position in range(layout.size):
        peers = {}
        for name, members in directions(layout, position).items():
            group = groups.setdefault((name, tuple(members)), ThreadPeers(len(members)))
            peers[name] = group.of(members.index(position))
        shares.append(SharedForward(layout, position, peers.__getitem__, num_tokens))  # type: ignore[arg-type]

    def run(share: SharedForward) -> torch.Tensor:
        with torch.inference_mode():  # which is each thread's own
            return work(share)

    with ThreadPoolExecutor(layout.size) as threads:
        return list(threads.map(run, shares))

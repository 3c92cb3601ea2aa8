"""Collectives among some ranks. An error of one of them means that a rank has left."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from chitu_diffusion.errors import UnavailableError

_TIMEOUT = timedelta(minutes=30)
"""Of every wait. A pool's front ends ranks that are stuck long before."""


class PeersLeftError(UnavailableError):
    """Another rank of the group failed, so this one could not go on."""


class Pending:
    """A collective under way."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """Wait for it; on CUDA, let later kernels wait for it.

        Raises:
            PeersLeftError: a rank has left.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeersLeftError(f"another rank left the slice: {error}") from None


class Peers:
    """A process group that only its members know of."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        """Find the other members; over NCCL for a CUDA device, gloo for the CPU.

        Raises:
            PeersLeftError: one did not come.
        """
        self._size, self._device = size, device
        self._group: Any
        try:
            if device.type == "cpu":
                self._group = dist.ProcessGroupGloo(store, rank, size, _TIMEOUT)
            else:
                options = dist.ProcessGroupNCCL.Options()
                self._group = dist.ProcessGroupNCCL(store, rank, size, options)
                self._group.eager_connect_single_device(device)
        except RuntimeError as error:
            raise PeersLeftError(f"the ranks of the slice did not meet: {error}") from None

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack a tensor of every rank: (size, ...)."""
        parts = tensor.new_empty((self._size, *tensor.shape))
        self._begin("_allgather_base", parts.view(-1), tensor.contiguous().view(-1)).wait()
        return parts

    def exchange(self, parts: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        """Begin to give `parts[n]` to rank n; what comes from it will be in `received[n]`."""
        received = torch.empty_like(parts)
        return received, self._begin("alltoall_base", received, parts, [], [])

    def pass_on(self, tensor: torch.Tensor, rank: int) -> tuple[torch.Tensor, Pending]:
        """Begin to send a tensor to the next rank and to receive one from the rank before.

        An all-to-all with one full and otherwise empty parts: unlike a pair of sends and receives
        it cannot be entered in an order that blocks.
        """
        received = torch.empty_like(tensor)
        to_next, from_before = [0] * self._size, [0] * self._size
        to_next[(rank + 1) % self._size] = tensor.numel()
        from_before[(rank - 1) % self._size] = tensor.numel()
        flat = received.view(-1), tensor.view(-1)
        return received, self._begin("alltoall_base", *flat, from_before, to_next)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite a contiguous tensor with that of the rank `source`."""
        self._begin("broadcast", tensor, source).wait()

    def abort(self) -> None:
        """End collectives that this rank waits in; from any thread."""
        group = self._group
        if self._device.type == "cuda" and group is not None:  # gloo notices by itself
            group.abort()

    def close(self) -> None:
        """Let go of the connections: members that wait in a collective get an error."""
        self._group = None

    def _begin(self, collective: str, *arguments: torch.Tensor | int | Sequence[int]) -> Pending:
        try:
            return Pending(getattr(self._group, collective)(*arguments))
        except RuntimeError as error:
            raise PeersLeftError(f"another rank left the slice: {error}") from None

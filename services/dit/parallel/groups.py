"""The process groups of a rank: those of its slices, and those that the whole pool has.

A slice's group is opened by its members alone, through the pool's store, and kept for later slices
on the same ranks. After an error the members let go of it: whoever still waits in a collective gets
an error at once, and the next slice opens another one, in the next epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import init_device_mesh

from chitu_diffusion.errors import ConfigError
from chitu_diffusion.parallel import ParallelGroups
from services.dit.parallel.layout import Layout
from services.dit.parallel.peers import Peers
from services.dit.parallel.shared import SharedForward


class RankGroup:
    """The ranks of one slice, over process groups."""

    def __init__(self, store: Store, layout: Layout, position: int, device: torch.device) -> None:
        """Find the other members, who do the same.

        Args:
            store: of this group alone.
            layout: of as many ranks as there are members.
            position: of this rank among them.
            device: where the tensors are.

        Raises:
            PeersLeftError: a member did not come.
        """
        self.layout, self.position = layout, position
        self._peers = _open_all(store, layout, position, device)

    def tell(self, facts: Sequence[int]) -> list[list[int]]:
        """Give every rank the integers of all, by position."""
        told = self._peers["told"].all_gather(torch.tensor(facts, dtype=torch.int64))
        rows: list[list[int]] = told.tolist()
        return rows

    def share(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite `tensor`, which is contiguous, with that of the rank at `source`."""
        self._peers["all"].broadcast(tensor, source)

    def parallel(self, num_tokens: int) -> SharedForward:
        """Take this rank's share of forwards over so many tokens."""
        return SharedForward(self.layout, self.position, self._peers.__getitem__, num_tokens)

    def abort(self) -> None:
        """End collectives that this rank waits in; from any thread. Gloo notices by itself."""
        for peers in list(self._peers.values()):
            peers.abort()

    def close(self) -> None:
        """Let go of the connections."""
        for peers in self._peers.values():
            peers.close()


def _open_all(
    store: Store, layout: Layout, position: int, device: torch.device
) -> dict[str, Peers]:
    """Open a process group for each direction; those of equal members are one."""
    opened: dict[tuple[str, tuple[int, ...]], Peers] = {}

    def peers(members: Sequence[int], kind: str) -> Peers:
        key = (kind, tuple(members))
        if key not in opened:
            own = PrefixStore(f"{kind} {'-'.join(map(str, members))}", store)
            opened[key] = Peers(own, members.index(position), len(members), torch.device(kind))
        return opened[key]

    found = {"told": peers(range(layout.size), "cpu")}
    for name, members in directions(layout, position).items():
        if len(members) > 1:
            found[name] = peers(members, str(device))
    return found


def directions(layout: Layout, position: int) -> dict[str, list[int]]:
    """Positions of the members that this rank has in each direction, itself included."""
    place = layout.place(position)
    first = place.cfg_rank * layout.cp_size
    return {
        "all": list(range(layout.size)),
        "cp": list(range(first, first + layout.cp_size)),
        "cfg": [layout.position(replace(place, cfg_rank=n)) for n in range(layout.cfg_size)],
        "ulysses": [
            layout.position(replace(place, ulysses_rank=n)) for n in range(layout.ulysses_degree)
        ],
        "ring": [layout.position(replace(place, ring_rank=n)) for n in range(layout.ring_degree)],
    }


class GroupBook:
    """The groups that a rank has open."""

    def __init__(self, store: Store, rank: int, device: torch.device) -> None:
        self._store, self._rank, self._device = store, rank, device
        self._epoch = 0
        self._open: dict[tuple[tuple[int, ...], Layout], RankGroup] = {}

    def group(self, ranks: Sequence[int], layout: Layout, epoch: int) -> RankGroup:
        """The group of these ranks of the pool, in their order; opened if it is not.

        Args:
            ranks: this one among them.
            layout: of as many ranks.
            epoch: rises; groups of older ones are closed.

        Raises:
            PeersLeftError: a member did not come.
        """
        if epoch > self._epoch:
            self.close()
            self._epoch = epoch
        key = (tuple(ranks), layout)
        if key not in self._open:
            members = "-".join(map(str, ranks))
            degrees = f"{layout.cfg_size}.{layout.ulysses_degree}.{layout.ring_degree}"
            store = PrefixStore(f"slice {members} {degrees} {epoch}", self._store)
            position = list(ranks).index(self._rank)
            self._open[key] = RankGroup(store, layout, position, self._device)
        return self._open[key]

    def drop(self, group: RankGroup) -> None:
        """Close a group in which something went wrong."""
        group.close()
        self._open = {key: kept for key, kept in self._open.items() if kept is not group}

    def close(self) -> None:
        """Close all."""
        for group in self._open.values():
            group.close()
        self._open.clear()


def build_groups(layout: Layout) -> ParallelGroups:
    """Make the named groups of this process; every process of the world must call it alike.

    The world is cut into blocks of `layout.size` neighbours. torch.distributed must be initialised,
    with NCCL on CUDA devices.

    Raises:
        ConfigError: the blocks do not fill the world.
    """
    world = dist.get_world_size()
    if world % layout.size:
        raise ConfigError(f"{layout}: needs a multiple of {layout.size} ranks, there are {world}")
    device = "cuda" if dist.get_backend() == dist.Backend.NCCL else "cpu"
    sizes = (world // layout.size, layout.cfg_size, layout.cp_size)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("block", "cfg", "cp"))
    return ParallelGroups(
        cp_size=layout.cp_size,
        cfg_size=layout.cfg_size,
        cp_rank=mesh.get_local_rank("cp"),
        cfg_rank=mesh.get_local_rank("cfg"),
        cp_group=mesh.get_group("cp"),
        cfg_group=mesh.get_group("cfg"),
        world_group=dist.group.WORLD,
    )

"""The process groups of a rank: which ranks share a sequence, and which the guidance branches."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from chitu_diffusion.errors import ConfigError
from chitu_diffusion.parallel import ParallelGroups


def build_groups(cfg_size: int, cp_size: int) -> ParallelGroups:
    """Make the groups of this process; every process of the world must call it alike.

    Neighbours share a sequence, which is the heavier traffic: rank = cfg_rank x cp_size + cp_rank.
    torch.distributed must be initialised, with NCCL on CUDA devices.

    Args:
        cfg_size: `distributed.cfg_size`.
        cp_size: `distributed.ulysses_degree` x `distributed.ring_degree`.

    Raises:
        ConfigError: the world has another number of ranks.
    """
    world = dist.get_world_size()
    if world != cfg_size * cp_size:
        raise ConfigError(
            f"distributed.cfg_size={cfg_size} x ulysses_degree x ring_degree={cp_size}: "
            f"needs {cfg_size * cp_size} ranks, there are {world}"
        )
    device = "cuda" if dist.get_backend() == dist.Backend.NCCL else "cpu"
    mesh = init_device_mesh(device, (cfg_size, cp_size), mesh_dim_names=("cfg", "cp"))
    return ParallelGroups(
        cp_size=cp_size,
        cfg_size=cfg_size,
        cp_rank=mesh.get_local_rank("cp"),
        cfg_rank=mesh.get_local_rank("cfg"),
        cp_group=mesh.get_group("cp"),
        cfg_group=mesh.get_group("cfg"),
        world_group=dist.group.WORLD,
    )

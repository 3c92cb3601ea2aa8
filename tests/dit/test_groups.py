"""The groups of four real processes, two branches by two parts of a sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from chitu_diffusion import parallel
from chitu_diffusion.backend import DiffusionBackend
from chitu_diffusion.errors import ConfigError
from services.dit.parallel import Layout
from services.dit.parallel.groups import build_groups

CFG_SIZE, CP_SIZE = 2, 2
WORLD = CFG_SIZE * CP_SIZE


def connect(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
    )


def gathered(group: Any) -> list[int]:
    """The world's ranks of a group's members, told by each of them."""
    mine = torch.tensor([dist.get_rank()])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return [int(part) for part in parts]


def work(rank: int, folder: Path) -> None:
    """A rank: joins, and writes down what it sees."""
    connect(rank, WORLD, folder)
    parallel.join(build_groups(Layout(CFG_SIZE, CP_SIZE)))
    seen = {
        "cp_rank": DiffusionBackend.get_cp_rank(),
        "cfg_rank": DiffusionBackend.get_cfg_rank(),
        "cp_size": DiffusionBackend.get_cp_size(),
        "cfg_size": DiffusionBackend.get_cfg_size(),
        "cp_group": gathered(DiffusionBackend.cp_group),
        "cfg_group": gathered(DiffusionBackend.cfg_group),
        "world_group": gathered(DiffusionBackend.world_group),
    }
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    parallel.leave()
    assert DiffusionBackend.cp_group is None
    dist.destroy_process_group()


def test_four_processes(tmp_path: Path) -> None:
    mp.spawn(work, args=(tmp_path,), nprocs=WORLD)
    for rank in range(WORLD):
        cfg_rank, cp_rank = divmod(rank, CP_SIZE)
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {
            "cp_rank": cp_rank,
            "cfg_rank": cfg_rank,
            "cp_size": CP_SIZE,
            "cfg_size": CFG_SIZE,
            "cp_group": [cfg_rank * CP_SIZE, cfg_rank * CP_SIZE + 1],
            "cfg_group": [cp_rank, cp_rank + CP_SIZE],
            "world_group": [0, 1, 2, 3],
        }


def test_world_of_another_size(tmp_path: Path) -> None:
    connect(0, 1, tmp_path)
    try:
        with pytest.raises(
            ConfigError,
            match=r"cfg 2 x ulysses 3 x ring 1: needs a multiple of 6 ranks, there are 1",
        ):
            build_groups(Layout(2, 3))
    finally:
        dist.destroy_process_group()

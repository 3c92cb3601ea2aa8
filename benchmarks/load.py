"""Reading weights: the DiT service's loader against diffusers' `from_pretrained`.

A random checkpoint of Wan2.1-T2V-1.3B's shapes in diffusers' layout, float32 (5.7 GB, as it is
published) and bfloat16 (2.8 GB), is read to bfloat16 on the CPU. Each side is a process of its own,
in turn; imports are left out. Time is until every page of the weights was touched, memory is the
peak of the process. The files are in the page cache, so this measures work, not the disk.

Limit: a weight of the right type stays in the mapped file with diffusers on the CPU. That copies
nothing, and whoever changes the file later changes the model; we always copy. `disable_mmap` is
diffusers' way to a model of its own, so for the bfloat16 file it is the side that does our work.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16")
THEIRS = {"diffusers": False, "diffusers, disable_mmap": True}
SIDES = ("ours", *THEIRS)
UNITS = {"seconds": "s", "gigabytes": "GB peak"}

Cost = dict[str, float]


def run(rounds: int) -> tuple[dict[str, Any], str]:
    """Figures and a Markdown table."""
    files = {dtype: measure(dtype, rounds) for dtype in DTYPES}
    figures = {"rounds": rounds, "files": files}
    return figures, table(figures)


def measure(dtype: str, rounds: int) -> dict[str, Any]:
    """Costs of every side for a file of `dtype`, and the medians of our share of the others'."""
    costs: dict[str, list[Cost]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        in_process("write", folder, dtype)
        for _ in range(rounds):
            for side in SIDES:
                warm(folder)
                costs[side].append(json.loads(in_process("read", folder, side)))
    return {"costs": costs, "ratio": {side: ratios(costs["ours"], costs[side]) for side in THEIRS}}


def ratios(ours: list[Cost], theirs: list[Cost]) -> Cost:
    pairs = list(zip(ours, theirs, strict=True))
    return {key: statistics.median(a[key] / b[key] for a, b in pairs) for key in UNITS}


def warm(folder: str) -> None:
    """Bring the files into the page cache: a side that takes much memory pushes them out."""
    for file in Path(folder).rglob("*.safetensors"):
        with file.open("rb", buffering=0) as opened:
            while opened.read(16 << 20):
                pass


def in_process(*arguments: str) -> str:
    """Run a part of this file; its last line."""
    command = [sys.executable, "-m", "benchmarks.load", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip().rpartition("\n")[2]


def write(folder: str, dtype: str) -> None:
    import torch
    from diffusers import WanTransformer3DModel

    from chitu_diffusion import config

    torch.set_default_dtype(getattr(torch, dtype))
    sizes = config.load(["models=wan2.1-t2v-1.3b"]).models.transformer
    model = WanTransformer3DModel(
        num_attention_heads=sizes.num_heads,
        attention_head_dim=sizes.hidden_size // sizes.num_heads,
        ffn_dim=sizes.ffn_dim,
        num_layers=sizes.depth,
        text_dim=sizes.text_dim,
        freq_dim=sizes.freq_dim,
    )
    model.save_pretrained(Path(folder) / "transformer")


def read_ours(folder: str) -> Cost:
    from chitu_diffusion import config
    from services.dit.rank import Rank

    settings = (f"models.ckpt_dir={folder}", "infer.device=cpu", "infer.dtype=bfloat16")
    rank = Rank(config.load(["models=wan2.1-t2v-1.3b", *settings]))
    began = time.perf_counter()
    rank.load()
    return cost(began, rank.experts[0].parameters())


def read_theirs(folder: str, disable_mmap: bool) -> Cost:
    import torch
    from diffusers import WanTransformer3DModel

    began = time.perf_counter()
    model = WanTransformer3DModel.from_pretrained(
        folder, subfolder="transformer", torch_dtype=torch.bfloat16, disable_mmap=disable_mmap
    )
    return cost(began, model.parameters())


def cost(began: float, parameters: Iterable[Any]) -> Cost:
    """Touch every page of the weights, then tell the time and the memory."""
    from chitu_diffusion.memory import peak_rss_bytes

    for parameter in parameters:
        parameter.detach().flatten()[::1024].sum()
    return {"seconds": time.perf_counter() - began, "gigabytes": peak_rss_bytes() / 1e9}


def table(figures: dict[str, Any]) -> str:
    """Medians and ranges, two rows a file."""

    def cell(costs: list[Cost], key: str) -> str:
        values = [cost[key] for cost in costs]
        return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"

    lines = [["file", "", *SIDES, *(f"ratio to {side}" for side in THEIRS)]]
    lines.append(["---"] * len(lines[0]))
    for dtype, file in figures["files"].items():
        for key, unit in UNITS.items():
            costs = [cell(file["costs"][side], key) for side in SIDES]
            lines.append([dtype, unit, *costs, *(f"{file['ratio'][s][key]:.2f}" for s in THEIRS)])
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"Wan2.1-T2V-1.3B to bfloat16 on the CPU, {figures['rounds']} rounds in turn; "
        f"median (range)\n\n{rows}\n"
    )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", folder, dtype]:
            write(folder, dtype)
        case ["read", folder, "ours"]:
            print(json.dumps(read_ours(folder)))
        case ["read", folder, side]:
            print(json.dumps(read_theirs(folder, THEIRS[side])))

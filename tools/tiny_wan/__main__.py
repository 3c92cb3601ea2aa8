"""`python -m tools.tiny_wan train|evaluate`: see the options with `--help`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from . import evaluate
from .export import export_all
from .train_dit import train_dit, train_experts
from .train_vae import train_vae

STAGES = ("vae", "dit", "experts", "export")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.tiny_wan", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train, or go on training, and export")
    train.add_argument("--out", type=Path, default=Path("assets"), help="where checkpoints go")
    train.add_argument("--work", type=Path, required=True, help="states, latents and sheets")
    train.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--threads", type=int, default=1)
    train.add_argument("--vae-steps", type=int, default=4800)
    train.add_argument("--dit-steps", type=int, default=4000)
    train.add_argument("--expert-steps", type=int, default=120)
    judge = commands.add_parser("evaluate", help="generate held-out prompts and judge the pixels")
    judge.add_argument("folders", type=Path, nargs="+", help="checkpoints in diffusers' layout")
    judge.add_argument("--report", type=Path, help="write the Markdown table there, too")
    judge.add_argument("--sheets", type=Path, help="folder for contact sheets (PNG)")
    judge.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Run the command line."""
    options = _arguments()
    torch.set_num_threads(options.threads)
    if options.command == "evaluate":
        evaluate.run(options.folders, options.report, options.sheets)
        return
    options.work.mkdir(parents=True, exist_ok=True)
    if "vae" in options.stages:
        train_vae(options.work, options.vae_steps, options.seed)
    if "dit" in options.stages:
        train_dit(options.work, options.dit_steps, options.seed)
    if "experts" in options.stages:
        train_experts(options.work, options.expert_steps, options.seed)
    if "export" in options.stages:
        for folder, size in export_all(options.work, options.out, options.seed):
            print(f"{folder}: {size / 1e6:.2f} MB")


main()

"""`python -m benchmarks [CASE ...]`: run the cases and write their results."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from pathlib import Path

from benchmarks import load, pipeline, pool

CASES = {"load": load.run, "pipeline": pipeline.run, "pool": pool.run}
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Run the named cases, or all; print and keep a table for each."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), choices=[*CASES, []])
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds of each side")
    arguments = parser.parse_args()
    folder = RESULTS / f"{datetime.date.today():%Y-%m-%d}-{hardware()}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.cases:
        figures, table = CASES[name](arguments.rounds)
        print(table)
        (folder / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n")
        (folder / f"{name}.md").write_text(table)


def hardware() -> str:
    """What the figures were measured on, as a folder name."""
    import os

    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name().replace(" ", "-").lower()
    return f"cpu-{platform.machine()}-{os.cpu_count()}cores"


if __name__ == "__main__":
    main()

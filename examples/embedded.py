"""A program with a backend of its own: a video from a prompt, without a server.

python examples/embedded.py "a red circle moving left on a black background" out/embedded.mp4
"""

from __future__ import annotations

import sys
from pathlib import Path

from hydra import compose, initialize

from chitu_diffusion.backend import BackendState, DiffusionBackend


def main(prompt: str, output: Path) -> None:
    """Make the backend, run one task by hand, save its file."""
    initialize(config_path="config", version_base=None)
    args = compose(config_name="wan")

    backend = DiffusionBackend(args)
    print(f"{len(backend.model_pool)} transformer(s), attention {backend.attn_backend.type}")
    backend.state = BackendState.Running
    task = backend.submit(prompt=prompt, seed=7)
    while not task.ended:
        backend.step()  # one stage, or one slice of denoise steps
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(backend.result(task))
    print(backend.memory_report())
    backend.state = BackendState.Terminated


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

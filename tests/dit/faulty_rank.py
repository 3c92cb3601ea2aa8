"""A rank that misbehaves when a file tells it to: `<rank> <step> <fault>`, each fault once."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from services.dit import denoiser
from services.dit.ranks import process

FOLDER = "CHITU_TEST_FAULTS"
"""Environment variable: where the files "fault" and "pace" may be."""

_real = denoiser.guided_velocity


def _step(model: Any, latents: torch.Tensor, step: int, *rest: Any) -> torch.Tensor:
    folder = Path(os.environ[FOLDER])
    fault, pace = folder / "fault", folder / "pace"
    if pace.exists():
        time.sleep(float(pace.read_text()))
    if fault.exists():
        rank, at, what = fault.read_text().split()
        if (int(rank), int(at)) == (int(os.environ["RANK"]), step):
            fault.unlink()
            _misbehave(what)
    return _real(model, latents, step, *rest)


def _misbehave(what: str) -> None:
    if what == "raise":
        raise ValueError("a fault of the test's own")
    if what == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory")
    if what == "hang":
        time.sleep(3600)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what])
    time.sleep(3600)  # a signal is not always there at once


if __name__ == "__main__":
    denoiser.guided_velocity = _step
    sys.exit(process.main())

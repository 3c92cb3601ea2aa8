"""The system under test: the services as processes on free ports."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def serving(*overrides: str) -> Iterator[str]:
    """Start all four; gives the orchestrator's address."""
    listens = [f"services.{name}.listen=127.0.0.1:0" for name in ("encoder", "dit", "vae")]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "chitu_diffusion.cli", "serve"),
            *listens,
            "orchestrator.listen=127.0.0.1:0",
            "orchestrator.results_url=memory://results",
            *overrides,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        address = ""
        for line in process.stdout:
            if line.startswith("orchestrator"):
                address = line.split()[1]
            if line.strip() == "ready":
                break
        else:
            raise RuntimeError(f"the services did not start: code {process.wait()}")
        yield address
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()

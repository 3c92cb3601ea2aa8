"""The four services as four processes, on the shipped tiny models."""

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = [sys.executable, "-m", "chitu_diffusion.cli"]


@dataclass
class Serving:
    """A running `chitu-diffusion serve`."""

    process: subprocess.Popen
    addresses: dict[str, str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def pids(self) -> list[int]:
        """The service processes."""
        output = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True
        ).stdout
        return [int(pid) for pid in output.split()]

    def pid_of(self, module: str) -> int:
        """The process of one service."""
        for pid in self.pids():
            if module in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                return pid
        raise LookupError(module)


@contextlib.contextmanager
def serving(folder, *overrides: str) -> Iterator[Serving]:
    """Start the system on free ports; results go to `folder`."""
    listens = [f"services.{name}.listen=127.0.0.1:0" for name in ("encoder", "dit", "vae")]
    process = subprocess.Popen(
        [
            *COMMAND,
            "serve",
            *listens,
            "orchestrator.listen=127.0.0.1:0",
            f"orchestrator.results_url={folder}",
            *overrides,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    system = Serving(process)
    reader = threading.Thread(target=lambda: system.log.extend(process.stderr))
    reader.start()
    try:
        for line in process.stdout:
            if line.strip() == "ready":
                break
            name, address = line.split()
            system.addresses[name] = address
        else:
            process.wait()
            reader.join()
            raise AssertionError("".join(system.log))
        yield system
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()
        reader.join()
        process.stderr.close()


@pytest.fixture(scope="session")
def tiny_wan(tmp_path_factory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("results")) as system:
        yield system


@pytest.fixture(scope="session")
def tiny_wan22(tmp_path_factory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("results22"), "models=tiny-wan2.2") as system:
        yield system

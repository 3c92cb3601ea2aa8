"""Programs with a backend of their own, as processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import av
import pytest

from tests.e2e.conftest import ROOT

RUNNING = """
import sys
from chitu_diffusion import config
from chitu_diffusion.backend import DiffusionBackend
backend = DiffusionBackend(config.load(["orchestrator.results_url=memory://x"]))
backend.start()
task = backend.submit(prompt="x", num_inference_steps=1000)
print("running", flush=True)
"""


def processes_of(group: int) -> list[int]:
    """Every process of a process group that is not a zombie."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(") ")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.fixture
def start(tmp_path):
    started = []

    def start(code: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout.readline() == "running\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_example_makes_a_video(tmp_path):
    video = tmp_path / "out.mp4"
    script = ROOT / "examples" / "embedded.py"
    process = subprocess.run(
        [sys.executable, str(script), "a red circle", str(video)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert process.returncode == 0, process.stderr
    assert "orchestrator" in process.stdout
    with av.open(str(video)) as container:
        assert len(list(container.decode(video=0))) == 9


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_no_process_behind(start, number):
    process = start(RUNNING + "while True: backend.step()")
    time.sleep(0.5)
    process.send_signal(number)
    process.wait(10)
    deadline = time.monotonic() + 10
    while processes_of(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(process.pid) == []


def test_a_program_that_just_ends_cancels_and_cleans_up(start, tmp_path):
    process = start(RUNNING + "print(task.id)")
    assert process.wait(30) == 0
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("chitu-")] == []

"""Processes: none outlives its parent, and a lost one is noticed."""

import os
import signal
import time
from pathlib import Path

import pytest

from chitu_diffusion.client import Client
from tests.e2e.conftest import serving


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids, within_s: float) -> bool:
    until = time.monotonic() + within_s
    while any(map(alive, pids)):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_sigterm_ends_everything_with_code_0(tmp_path):
    with serving(tmp_path) as system:
        pids = system.pids()
        assert len(pids) == 4
        with Client(system.addresses["orchestrator"]) as client:
            assert client.generate("x", num_inference_steps=1).data
        system.process.send_signal(signal.SIGTERM)
        assert system.process.wait(30) == 0
        assert gone(pids, 1)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_kill_9_of_the_parent_leaves_no_process(tmp_path, busy):
    with serving(tmp_path) as system:
        pids = system.pids()
        if busy:
            with Client(system.addresses["orchestrator"]) as client:
                task = client.submit("x", num_inference_steps=1000)
                for event in client.watch(task.id):
                    if event.denoising.step >= 2:
                        break
        os.kill(system.process.pid, signal.SIGKILL)
        assert gone(pids, 10)


def test_a_service_that_dies_ends_the_system_and_is_named(tmp_path):
    with serving(tmp_path) as system:
        pids = system.pids()
        os.kill(system.pid_of("services.vae"), signal.SIGKILL)
        assert system.process.wait(30) == 1
        assert gone(pids, 1)
    assert any("vae ended with code -9" in line for line in system.log)

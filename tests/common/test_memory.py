"""Memory of this process as it is reported."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys

import torch

from chitu_diffusion import memory as process
from services.common import memory

CPU = torch.device("cpu")


def test_resident_memory_follows_allocations() -> None:
    before = process.rss_bytes()
    # Not from the allocator, which may have as much to spare.
    with mmap.mmap(-1, 50_000_000) as block:
        block.write(b"x" * len(block))
        assert process.rss_bytes() - before > 40_000_000
        assert process.peak_rss_bytes() >= process.rss_bytes() * 0.95


def test_process_memory_without_accelerator() -> None:
    report = memory.process_memory("dit rank 0", CPU)
    assert (report.process, report.pid, report.host) == (
        "dit rank 0",
        os.getpid(),
        socket.gethostname(),
    )
    assert 0 < report.rss_bytes <= report.peak_rss_bytes * 1.05
    assert (report.allocated_bytes, report.reserved_bytes, report.max_allocated_bytes) == (0, 0, 0)


def test_stage_report() -> None:
    report = memory.stage_report(CPU, torch.bfloat16, seconds=1.5, waited_seconds=0.25)
    assert (report.seconds, report.waited_seconds) == (1.5, 0.25)
    assert (report.device, report.dtype) == ("cpu", "bfloat16")
    assert report.peak_memory_bytes == process.peak_rss_bytes()


def test_the_peak_does_not_count_the_parent() -> None:
    block = torch.ones(300_000_000, dtype=torch.uint8)
    code = "from chitu_diffusion.memory import peak_rss_bytes; print(peak_rss_bytes())"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert int(output) < 200_000_000 < len(block)

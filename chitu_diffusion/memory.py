"""Resident memory of this process, as every service reports it. Loads no torch."""

from __future__ import annotations

import os
import resource
import socket
import sys
from pathlib import Path

from chitu_diffusion.v1 import component_pb2

# Linux counts the peak in KiB, macOS in bytes.
_PEAK_UNIT = 1 if sys.platform == "darwin" else 1024


def rss_bytes() -> int:
    """Return the resident set size now; the peak where the system has no /proc."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return peak_rss_bytes()
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes() -> int:
    """Return the highest resident set size so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT


def process_memory(process: str) -> component_pb2.ProcessMemory:
    """Count this process's memory under a name, without an accelerator's part."""
    return component_pb2.ProcessMemory(
        process=process,
        rss_bytes=rss_bytes(),
        peak_rss_bytes=peak_rss_bytes(),
        pid=os.getpid(),
        host=socket.gethostname(),
    )

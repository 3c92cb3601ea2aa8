"""Resident memory of this process, as every service reports it. Loads no torch."""

from __future__ import annotations

import os
import re
import resource
import socket
import sys
from pathlib import Path

from chitu_diffusion.v1 import component_pb2

_HIGH_WATER = re.compile(r"^VmHWM:\s+(\d+) kB$", re.M)


def rss_bytes() -> int:
    """Return the resident set size now; the peak where the system has no /proc."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return peak_rss_bytes()
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes() -> int:
    """Return the highest resident set size so far."""
    status = Path("/proc/self/status")
    if status.exists() and (found := _HIGH_WATER.search(status.read_text())):
        return int(found[1]) * 1024
    # On Linux this would count what the parent had when it started this process.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def process_memory(process: str) -> component_pb2.ProcessMemory:
    """Count this process's memory under a name, without an accelerator's part."""
    return component_pb2.ProcessMemory(
        process=process,
        rss_bytes=rss_bytes(),
        peak_rss_bytes=peak_rss_bytes(),
        pid=os.getpid(),
        host=socket.gethostname(),
    )

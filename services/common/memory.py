"""Memory of this process, as services report it."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

from chitu_diffusion.v1 import component_pb2
from services.common.placement import dtype_name

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


def process_memory(process: str, device: torch.device) -> component_pb2.ProcessMemory:
    """Count the memory of this process; the accelerator's part is 0 when `device` is the CPU."""
    memory = component_pb2.ProcessMemory(
        process=process, rss_bytes=rss_bytes(), peak_rss_bytes=peak_rss_bytes()
    )
    if device.type == "cuda":
        memory.allocated_bytes = torch.cuda.memory_allocated(device)
        memory.reserved_bytes = torch.cuda.memory_reserved(device)
        memory.max_allocated_bytes = torch.cuda.max_memory_allocated(device)
    return memory


def peak_bytes(device: torch.device) -> int:
    """Return the highest memory so far, of the accelerator if the model runs there."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_rss_bytes()


def stage_report(
    device: torch.device, dtype: torch.dtype, seconds: float, waited_seconds: float
) -> component_pb2.StageReport:
    """Report a stage that worked `seconds` after waiting `waited_seconds` for its turn."""
    return component_pb2.StageReport(
        seconds=seconds,
        waited_seconds=waited_seconds,
        peak_memory_bytes=peak_bytes(device),
        device=str(device),
        dtype=dtype_name(dtype),
    )

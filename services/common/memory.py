"""Memory of this process, as services report it."""

from __future__ import annotations

import torch

from chitu_diffusion import memory
from chitu_diffusion.v1 import component_pb2
from services.common.placement import dtype_name


def process_memory(process: str, device: torch.device) -> component_pb2.ProcessMemory:
    """Count the memory of this process; the accelerator's part is 0 when `device` is the CPU."""
    counted = memory.process_memory(process)
    if device.type == "cuda":
        counted.allocated_bytes = torch.cuda.memory_allocated(device)
        counted.reserved_bytes = torch.cuda.memory_reserved(device)
        counted.max_allocated_bytes = torch.cuda.max_memory_allocated(device)
    return counted


def peak_bytes(device: torch.device) -> int:
    """Return the highest memory so far, of the accelerator if the model runs there."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return memory.peak_rss_bytes()


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

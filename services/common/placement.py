"""Where a model runs and in which type: names from the configuration to torch's objects."""

from __future__ import annotations

import re

import torch
from torch import nn

from chitu_diffusion.errors import ConfigError, OutOfMemoryError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(name: str, key: str = "infer.device") -> torch.device:
    """Find the device that a configuration names; `auto` is the first CUDA device if there is one.

    Args:
        name: "auto", "cpu", "cuda" (the first device) or "cuda:N".
        key: where the name was read, for messages.

    Raises:
        ConfigError: the name is none of these, or this host has no such device.
    """
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda", 0) if count else torch.device("cpu")
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise ConfigError(f"{key}={name!r}: must be 'auto', 'cpu', 'cuda' or 'cuda:N'")
    index = int(match[1] or 0)
    if index >= count:
        raise ConfigError(f"{key}={name!r}: this host has {count} CUDA devices")
    return torch.device("cuda", index)


def resolve_dtype(name: str, device: torch.device, key: str = "infer.dtype") -> torch.dtype:
    """Find the type that a configuration names; `auto` is bfloat16 on CUDA, float32 on the CPU.

    Args:
        name: "auto", "float32" or "bfloat16".
        device: where the model will run.
        key: where the name was read, for messages.

    Raises:
        ConfigError: the name is none of these.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in _DTYPES:
        raise ConfigError(f"{key}={name!r}: must be one of 'auto', {', '.join(map(repr, _DTYPES))}")
    return _DTYPES[name]


def is_out_of_memory(error: Exception) -> bool:
    """Say whether an error of torch means that memory ran out, of a device or of the host."""
    # The CPU allocator has no error type of its own.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAlloc" in str(
        error
    )


def move_module(module: nn.Module, device: torch.device) -> None:
    """Move a module's weights; memory that it leaves on an accelerator is given back.

    Raises:
        OutOfMemoryError: it does not fit there; it is back where it was.
    """
    before = next(module.parameters()).device
    failure = ""
    try:
        module.to(device)
    except Exception as error:
        module.to(before)
        if not is_out_of_memory(error):
            raise
        failure = str(error) or type(error).__name__  # a bare MemoryError has no text
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if failure:
        raise OutOfMemoryError(f"{type(module).__name__} does not fit on {device}: {failure}")


def dtype_name(dtype: torch.dtype) -> str:
    """Name a type as configurations and reports do, e.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")

"""Weights from a checkpoint into a module that was built on the meta device.

Reading is strict: every tensor the module expects arrives with its shape, and no other. Memory
stays near the size of the weights, because files are mapped and copied tensor by tensor.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import nn

from chitu_diffusion.errors import CheckpointError
from services.common.weight_files import Header, headers, locate, read, release, some

log = logging.getLogger(__name__)

# Left by tools that wrap a model before they save it: in front of all names, or anywhere inside.
_WRAPPERS = frozenset({"model", "module", "diffusion_model"})
_INNER_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"})
# Marks of tools that hold no weight.
_IGNORED = frozenset({"scaled_fp8"})
# Two spellings of the factor that a float8 weight was divided by.
_SCALES = (".scale_weight", ".weight_scale")

# Bytes that are copied at once: more of the file need not be in memory.
_PART = 16 << 20
_REPORT_EVERY_S = 3.0


def load_weights(
    module: nn.Module,
    path: Path,
    *,
    rename: Callable[[str], str] | None = None,
    dtype: torch.dtype | Callable[[str], torch.dtype],
    device: torch.device,
    tied: Mapping[str, str] | None = None,
) -> None:
    """Fill `module` with the weights at `path`.

    Args:
        module: built on the meta device; its parameters and persistent buffers are replaced.
        path: a folder with a single file, an index or numbered shards; or such a file.
        rename: from a name in the file, its wrappers removed, to a name in the module.
        dtype: type of floating-point tensors in memory, one for all or by name in the module. Other
            tensors keep theirs. Float8 weights are multiplied by their scales.
        device: where the weights go.
        tied: names that share one tensor with another name; either may be missing from the files.

    Raises:
        CheckpointNotFoundError: the folder, its weights or some shards do not exist.
        CheckpointError: a file is corrupt, an index points outside the folder, or tensors are
            missing, unexpected, repeated, of another shape, quantised to integers, or of a float8
            type without a scale.
    """
    expected = module.state_dict(keep_vars=True)
    roots = {name.partition(".")[0] for name in expected}
    where = {k: f for k, f in locate(path).items() if unwrap(k, roots) not in _IGNORED}
    described = headers(where)
    scales = _scales(where, described)
    weights = {key: file for key, file in where.items() if key not in scales.values()}
    names = {key: (rename or str)(unwrap(key, roots)) for key in weights}
    pairs = dict(tied or {})
    _check_names(names, set(expected), pairs, path)
    _check_shapes(described, names, expected, scales, path)
    _check_types(described, names, expected, scales, path)
    factors = _factors(scales, where)
    progress = _Progress(path, sum(expected[name].numel() for name in names.values()))
    for key, tensor in read(weights):
        name = names[key]
        kind = dtype(name) if callable(dtype) else dtype
        placed = _place(tensor, factors.get(key), kind, device)
        _assign(module, name, placed)
        progress.add(placed)
    _tie(module, pairs, set(names.values()), path)
    progress.finish()


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shape of every tensor at `path`, by its name without wrappers.

    Raises:
        CheckpointNotFoundError, CheckpointError: as `load_weights`.
    """
    return {unwrap(key): header.shape for key, header in headers(locate(path)).items()}


def unwrap(name: str, roots: Collection[str] = ()) -> str:
    """Remove what wrapping tools put into a name, save first parts that are among `roots`."""
    parts = [part for part in name.split(".") if part not in _INNER_WRAPPERS]
    while parts and parts[0] in _WRAPPERS and parts[0] not in roots:
        del parts[0]
    return ".".join(parts)


def _scales(where: Mapping[str, Path], described: Mapping[str, Header]) -> dict[str, str]:
    """Find the scale of each float8 weight, by the names in the files."""
    found = {}
    for key in where:
        for suffix in _SCALES:
            weight = f"{key.removesuffix(suffix)}.weight"
            if key.endswith(suffix) and weight in described and described[weight].is_float8:
                found[weight] = key
    return found


def _factors(scales: Mapping[str, str], where: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    """Read the scales as float32."""
    files = {key: where[key] for key in scales.values()}
    values = {key: tensor.float() for key, tensor in read(files)}
    return {weight: values[key] for weight, key in scales.items()}


def _check_names(
    names: Mapping[str, str], expected: set[str], tied: Mapping[str, str], path: Path
) -> None:
    twice = sorted(name for name, count in Counter(names.values()).items() if count > 1)
    if twice:
        raise CheckpointError(f"{path}: two tensors become the same: {some(twice)}")
    given = set(names.values())
    reachable = set(given)
    for name, source in tied.items():
        if name in given or source in given:
            reachable |= {name, source}
    missing = sorted(expected - reachable)
    extra = sorted(key for key, name in names.items() if name not in expected)
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing: {some(missing)}")
    if extra:
        problems.append(f"{len(extra)} unexpected: {some(extra)}")
    if problems:
        raise CheckpointError(f"{path} does not fit the model; tensors {'; '.join(problems)}")


def _check_shapes(
    described: Mapping[str, Header],
    names: Mapping[str, str],
    expected: Mapping[str, torch.Tensor],
    scales: Mapping[str, str],
    path: Path,
) -> None:
    problems = []
    for key, name in names.items():
        shape, want = described[key].shape, tuple(expected[name].shape)
        if shape != want:
            problems.append(f"{key} is {list(shape)}, the model has {list(want)}")
    for weight, scale in scales.items():
        shape, rows = described[scale].shape, described[weight].shape[:1]
        if shape not in ((), (1,), rows, (*rows, 1)):
            problems.append(f"{scale} is {list(shape)}: must be one value, or one for each row")
    if problems:
        raise CheckpointError(f"{path} does not fit the model; shapes: {some(problems)}")


def _check_types(
    described: Mapping[str, Header],
    names: Mapping[str, str],
    expected: Mapping[str, torch.Tensor],
    scales: Mapping[str, str],
    path: Path,
) -> None:
    """Refuse what would lose its meaning: quantised weights whose scales are not known."""
    other_kind = [
        f"{key} is {described[key].dtype}, the model has {expected[name].dtype}"
        for key, name in names.items()
        if described[key].is_floating_point != expected[name].is_floating_point()
    ]
    if other_kind:
        raise CheckpointError(f"{path} does not fit the model; types: {some(other_kind)}")
    float8 = [key for key in names if described[key].is_float8 and key not in scales]
    if float8:
        raise CheckpointError(
            f"{path}: float8 weights without a scale ({' or '.join(_SCALES)}) cannot be loaded: "
            f"{some(float8)}"
        )


@torch.no_grad()
def _place(
    tensor: torch.Tensor, factor: torch.Tensor | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Copy a tensor part by part, so that it no longer depends on the file."""
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    placed = torch.empty(tensor.shape, dtype=kind, device=device)
    source = tensor.reshape(tensor.shape or (1,))
    target = placed.view(source.shape)
    rows = max(1, _PART * len(source) // max(1, source.nbytes))
    if factor is not None:
        factor = factor.to(device).reshape(-1, *[1] * (source.ndim - 1)).expand(source.shape)
    for first in range(0, len(source), rows):
        part = source[first : first + rows]
        scaled = part
        if factor is not None:
            scaled = part.to(device, torch.float32) * factor[first : first + rows]
        target[first : first + rows].copy_(scaled)
        release(part)
    return placed


def _assign(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor


def _tie(module: nn.Module, tied: Mapping[str, str], given: set[str], path: Path) -> None:
    """Make each pair one tensor; two different copies in the files are an error."""
    for name, source in tied.items():
        if source not in given:
            name, source = source, name
        shared = module.get_parameter(source)
        if name in given and not torch.equal(module.get_parameter(name), shared):
            raise CheckpointError(f"{path}: {name} and {source} must be equal")
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._parameters[leaf] = shared


class _Progress:
    """Tells how far reading is, every few seconds, and how fast it was."""

    def __init__(self, path: Path, total: int) -> None:
        self.total = total
        """Values to read."""
        self._path = path
        self._values = self._bytes = 0
        self._began = self._told = time.monotonic()

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor that has arrived."""
        self._values += tensor.numel()
        self._bytes += tensor.nbytes
        if time.monotonic() - self._told >= _REPORT_EVERY_S:
            self._told = time.monotonic()
            self._tell(f"reading {self._path}: {self._values / max(self.total, 1):.0%}")

    def finish(self) -> None:
        """Tell the whole."""
        self._tell(f"read {self._path}")

    def _tell(self, what: str) -> None:
        seconds = time.monotonic() - self._began
        rate = self._bytes / 1e9 / max(seconds, 1e-9)
        log.info("%s, %.2f GB in %.1f s (%.2f GB/s)", what, self._bytes / 1e9, seconds, rate)

"""Weights from a checkpoint folder into a module that was built on the meta device.

Reading is strict: every tensor the module expects arrives with its shape, and no other. Memory
stays near the size of the weights, because files are mapped and copied tensor by tensor.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from chitu_diffusion.errors import CheckpointError, CheckpointNotFoundError

_SHOWN = 5
_PICKLED = (".bin", ".pth", ".pt")
# Safetensors first: a folder with both formats never falls back to the pickled one.
_PATTERNS = ("*.safetensors.index.json", "*.safetensors", "*.bin.index.json", "*.bin", "*.pth")
_USUAL_STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")


def load_weights(
    module: nn.Module,
    folder: Path,
    *,
    rename: Callable[[str], str] | None = None,
    dtype: torch.dtype | Callable[[str], torch.dtype],
    device: torch.device,
    tied: Mapping[str, str] | None = None,
) -> None:
    """Fill `module` with the weights in `folder`.

    Args:
        module: built on the meta device; its parameters and persistent buffers are replaced.
        folder: holds one safetensors file, or an index with its shards; else the same as `.bin` or
            `.pth`. May also be such a file itself.
        rename: from a name in the file to a name in the module.
        dtype: type of floating-point tensors in memory, one for all or by name in the module. Other
            tensors keep theirs.
        device: where the weights go.
        tied: names that share one tensor with another name; either may be missing from the files.

    Raises:
        CheckpointNotFoundError: the folder, its weights or some shards do not exist.
        CheckpointError: a file is corrupt, an index points outside the folder, or tensors are
            missing, unexpected, repeated, of another shape or of a float8 type.
    """
    where = _locate(folder)
    expected = module.state_dict(keep_vars=True)
    names = _module_names(where, rename, folder)
    pairs = dict(tied or {})
    _check_names(set(names.values()), set(expected), pairs, folder)
    _check_shapes(where, names, expected, folder)
    for file, keys in _by_file(where).items():
        for key, tensor in _read(file, keys):
            name = names[key]
            kind = dtype(name) if callable(dtype) else dtype
            _assign(module, name, _place(tensor, kind, device))
    _tie(module, pairs, set(names.values()), folder)


def _locate(folder: Path) -> dict[str, Path]:
    """Find every tensor name and the file it is in."""
    file = folder if folder.is_file() else _weights_file(folder)
    if file.name.endswith(".index.json"):
        return _read_index(file)
    return dict.fromkeys(_keys(file), file)


def _weights_file(folder: Path) -> Path:
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"checkpoint folder {folder} does not exist")
    for pattern in _PATTERNS:
        found = sorted(path for path in folder.glob(pattern) if path.is_file())
        usual = [path for path in found if path.name.split(".")[0] in _USUAL_STEMS]
        plain = [path for path in usual if path.name == f"{path.name.split('.')[0]}{pattern[1:]}"]
        for candidates in (plain, usual, found):
            if len(candidates) == 1:
                return candidates[0]
        if found:
            raise CheckpointError(
                f"{folder} holds several weight files and no index: {_some(p.name for p in found)}"
            )
    raise CheckpointNotFoundError(f"{folder} holds no weights (none of {', '.join(_PATTERNS)})")


def _read_index(index: Path) -> dict[str, Path]:
    try:
        shards = json.loads(index.read_text("utf-8"))["weight_map"]
        where = {str(key): index.parent / str(shard) for key, shard in shards.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a weight index: {error!r}") from error
    root = index.parent.resolve()
    outside = sorted({str(s) for s in shards.values() if (root / str(s)).parent.resolve() != root})
    if outside:
        raise CheckpointError(f"{index} points outside its folder: {_some(outside)}")
    missing = sorted({file.name for file in where.values() if not file.is_file()})
    if missing:
        raise CheckpointNotFoundError(f"{index} names files that are missing: {', '.join(missing)}")
    _check_index(index, where)
    return where


def _check_index(index: Path, where: Mapping[str, Path]) -> None:
    """Require that the shards hold what the index says, and nothing that it leaves out."""
    held = {file: set(_keys(file)) for file in sorted(set(where.values()))}
    absent = sorted(key for key, file in where.items() if key not in held[file])
    if absent:
        raise CheckpointError(f"{index} names tensors its shards lack: {_some(absent)}")
    extra = sorted(set().union(*held.values()) - set(where))
    if extra:
        raise CheckpointError(f"{index} leaves out tensors of its shards: {_some(extra)}")


def _module_names(
    where: Mapping[str, Path], rename: Callable[[str], str] | None, folder: Path
) -> dict[str, str]:
    names = {key: rename(key) if rename else key for key in where}
    twice = sorted(name for name, count in Counter(names.values()).items() if count > 1)
    if twice:
        raise CheckpointError(f"{folder}: two tensors become the same: {_some(twice)}")
    return names


def _check_names(
    given: set[str], expected: set[str], tied: Mapping[str, str], folder: Path
) -> None:
    reachable = set(given)
    for name, source in tied.items():
        if name in given or source in given:
            reachable |= {name, source}
    missing, extra = sorted(expected - reachable), sorted(given - expected)
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing: {_some(missing)}")
    if extra:
        problems.append(f"{len(extra)} unexpected: {_some(extra)}")
    if problems:
        raise CheckpointError(f"{folder} does not fit the model; tensors {'; '.join(problems)}")


def _check_shapes(
    where: Mapping[str, Path],
    names: Mapping[str, str],
    expected: Mapping[str, torch.Tensor],
    folder: Path,
) -> None:
    problems, float8 = [], []
    for file, keys in _by_file(where).items():
        for key, shape, kind in _headers(file, keys):
            want = tuple(expected[names[key]].shape)
            if shape != want:
                problems.append(f"{key} is {list(shape)}, the model has {list(want)}")
            if "F8" in kind.upper() or "float8" in kind:
                float8.append(key)
    if problems:
        raise CheckpointError(f"{folder} does not fit the model; shapes: {_some(problems)}")
    if float8:
        raise CheckpointError(f"{folder}: float8 weights cannot be loaded: {_some(float8)}")


def _by_file(where: Mapping[str, Path]) -> dict[Path, list[str]]:
    files: dict[Path, list[str]] = {}
    for key, file in where.items():
        files.setdefault(file, []).append(key)
    return files


def _keys(file: Path) -> list[str]:
    if file.suffix in _PICKLED:
        return list(_unpickle(file))
    try:
        with safe_open(file, "pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is corrupt: {error}") from error


def _headers(file: Path, keys: Iterable[str]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield name, shape and element type of tensors, without reading their data."""
    if file.suffix in _PICKLED:
        tensors = _unpickle(file)
        for key in keys:
            yield key, tuple(tensors[key].shape), str(tensors[key].dtype)
        return
    with safe_open(file, "pt") as opened:
        for key in keys:
            part = opened.get_slice(key)
            yield key, tuple(part.get_shape()), part.get_dtype()


def _read(file: Path, keys: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors that may lie in the mapped file: copy each before the next."""
    if file.suffix in _PICKLED:
        tensors = _unpickle(file)
        for key in keys:
            yield key, tensors[key]
        return
    for key in keys:
        # Opened anew for each tensor: pages of an open mapping would count as resident memory.
        try:
            with safe_open(file, "pt") as opened:
                tensor = opened.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: tensor {key!r} is corrupt: {error}") from error
        yield key, tensor


def _unpickle(file: Path) -> dict[str, torch.Tensor]:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{file} is corrupt or more than tensors: {error}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in tensors.items()
    ):
        raise CheckpointError(f"{file} is not a mapping of names to tensors")
    return tensors


def _place(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy a tensor, so that it no longer depends on the file."""
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(device=device, dtype=kind, copy=True).contiguous()


def _assign(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor


def _tie(module: nn.Module, tied: Mapping[str, str], given: set[str], folder: Path) -> None:
    """Make each pair one tensor; two different copies in the files are an error."""
    for name, source in tied.items():
        if source not in given:
            name, source = source, name
        shared = module.get_parameter(source)
        if name in given and not torch.equal(module.get_parameter(name), shared):
            raise CheckpointError(f"{folder}: {name} and {source} must be equal")
        path, _, leaf = name.rpartition(".")
        module.get_submodule(path)._parameters[leaf] = shared


def _some(items: Iterable[str]) -> str:
    listed = list(items)
    rest = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + rest

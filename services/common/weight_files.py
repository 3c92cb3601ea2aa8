"""The files of a checkpoint: which tensors they hold, and their values one by one.

A checkpoint is a single file, an index with its shards, or shards that are numbered by their names,
in safetensors or, with `torch.load(weights_only=True)`, as `.bin`, `.pth` or `.pt`.
"""

from __future__ import annotations

import json
import logging
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from chitu_diffusion.errors import CheckpointError, CheckpointNotFoundError

log = logging.getLogger(__name__)

_PICKLED = (".bin", ".pth", ".pt")
# Safetensors first: a folder with both formats never falls back to the pickled one.
_PATTERNS = ("*.safetensors.index.json", "*.safetensors", "*.bin.index.json", "*.bin", "*.pth")
_USUAL_STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})(?P<suffix>\.\w+)")
# Bytes of an index or of the description of tensors in a file; safetensors has the same limit.
_MAX_HEADER = 100_000_000
_SHOWN = 5


@dataclass(frozen=True)
class Header:
    """What a file says about a tensor before its data."""

    shape: tuple[int, ...]
    dtype: str
    """As the file names it: "F32", "F8_E4M3", "torch.bfloat16", ..."""

    @property
    def is_floating_point(self) -> bool:
        """Whether it is of a floating-point type, 8-bit ones included."""
        return "float" in self.dtype or self.dtype.removeprefix("B").startswith("F")

    @property
    def is_float8(self) -> bool:
        """Whether it is one of the 8-bit floating-point types."""
        return "F8" in self.dtype or "float8" in self.dtype


def locate(path: Path) -> dict[str, Path]:
    """Find every tensor of a checkpoint, by name, and the file that it is in.

    Args:
        path: a folder, or a file in it.

    Raises:
        CheckpointNotFoundError: the folder, its weights or some shards do not exist.
        CheckpointError: a file is corrupt, an index points outside its folder, or it is not clear
            which files belong together.
    """
    files = [path] if path.is_file() else _weight_files(path)
    if files[0].name.endswith(".index.json"):
        return _read_index(files[0])
    held = [(key, file) for file in files for key in _keys(file)]
    twice = sorted(key for key, count in Counter(key for key, _ in held).items() if count > 1)
    if twice:
        raise CheckpointError(f"{path}: tensors are in two shards: {some(twice)}")
    return dict(held)


def _weight_files(folder: Path) -> list[Path]:
    """The index, the only file, or all numbered shards."""
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"checkpoint {folder} does not exist")
    found = {p: sorted(f for f in folder.glob(p) if not f.is_dir()) for p in _PATTERNS}
    pattern = next((p for p, files in found.items() if files), None)
    if pattern is None:
        raise CheckpointNotFoundError(f"{folder} holds no weights (none of {', '.join(_PATTERNS)})")
    chosen = _choose(folder, pattern, found[pattern])
    _require(folder, [path.name for path in chosen], "has links to files that are gone")
    if "safetensors" in pattern and (found["*.bin"] or found["*.bin.index.json"]):
        log.info("%s: reading %s, not the .bin files beside it", folder, chosen[0].name)
    return chosen


def _choose(folder: Path, pattern: str, found: list[Path]) -> list[Path]:
    usual = [path for path in found if path.name.split(".")[0] in _USUAL_STEMS]
    for candidates in (usual, found):
        if len(candidates) == 1 and not _SHARD.fullmatch(candidates[0].name):
            return candidates
    shards = [match for match in (_SHARD.fullmatch(path.name) for path in found) if match]
    sets = {(match["stem"], match["total"], match["suffix"]) for match in shards}
    if len(shards) != len(found) or len(sets) != 1:
        raise CheckpointError(
            f"{folder} holds several weight files and no index: {some(p.name for p in found)}"
        )
    stem, total, suffix = sets.pop()
    names = [f"{stem}-{number:05}-of-{total}{suffix}" for number in range(1, int(total) + 1)]
    _require(folder, names, "holds part of a numbered set")
    return [folder / name for name in names]


def _require(folder: Path, names: Iterable[str], what: str) -> None:
    missing = sorted({name for name in names if not (folder / name).is_file()})
    if missing:
        raise CheckpointNotFoundError(f"{folder} {what}; missing: {', '.join(missing)}")


def _read_index(index: Path) -> dict[str, Path]:
    """Read which shard has which tensor. The text decides: a shard may be a link elsewhere."""
    _check_size(index, index.stat().st_size)
    try:
        shards = json.loads(index.read_text("utf-8"))["weight_map"]
        where = {str(key): index.parent / str(shard) for key, shard in shards.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a weight index: {error!r}") from error
    outside = sorted({str(s) for s in shards.values() if Path(str(s)).name != str(s)})
    if outside:
        raise CheckpointError(f"{index} points outside its folder: {some(outside)}")
    _require(index.parent, map(str, shards.values()), f"lacks files that {index.name} names")
    held = {file: set(_keys(file)) for file in sorted(set(where.values()))}
    absent = sorted(key for key, file in where.items() if key not in held[file])
    if absent:
        raise CheckpointError(f"{index} names tensors its shards lack: {some(absent)}")
    extra = sorted(set().union(*held.values()) - set(where))
    if extra:
        raise CheckpointError(f"{index} leaves out tensors of its shards: {some(extra)}")
    return where


def headers(where: Mapping[str, Path]) -> dict[str, Header]:
    """Read the shape and type of each tensor, without its data."""
    found: dict[str, Header] = {}
    for file, keys in _by_file(where).items():
        if file.suffix in _PICKLED:
            tensors = _unpickle(file)
            for key in keys:
                found[key] = Header(tuple(tensors[key].shape), str(tensors[key].dtype))
            continue
        with safe_open(file, "pt") as opened:
            for key in keys:
                part = opened.get_slice(key)
                found[key] = Header(tuple(part.get_shape()), part.get_dtype())
    return found


def read(where: Mapping[str, Path], budget: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors that lie in the mapped file: copy each before asking for the next.

    Args:
        where: the tensors to read, and their files.
        budget: bytes that may be read before a file is mapped anew. Pages of a mapping that were
            read count as resident memory until it is closed.
    """
    for file, keys in _by_file(where).items():
        read_one = _read_pickled if file.suffix in _PICKLED else _read_safetensors
        rest = keys
        while rest:
            spent = done = 0
            for key, tensor in read_one(file, rest):
                yield key, tensor
                spent, done = spent + tensor.nbytes, done + 1
                if spent >= budget:
                    break
            rest = rest[done:]


def _read_safetensors(file: Path, keys: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(file, "pt") as opened:
            for key in keys:
                yield key, opened.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: corrupt near tensor {key!r}: {error}") from error


def _read_pickled(file: Path, keys: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = _unpickle(file)
    for key in keys:
        yield key, tensors[key]


def _by_file(where: Mapping[str, Path]) -> dict[Path, list[str]]:
    files: dict[Path, list[str]] = {}
    for key, file in where.items():
        files.setdefault(file, []).append(key)
    return files


def _check_size(what: Path, size: int) -> None:
    if size > _MAX_HEADER:
        raise CheckpointError(f"{what} has {size} bytes: must be at most {_MAX_HEADER}")


def _keys(file: Path) -> list[str]:
    if file.suffix in _PICKLED:
        _check_archive(file)
        return list(_unpickle(file))
    try:
        with safe_open(file, "pt") as opened:
            return list(opened.offset_keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is corrupt: {error}") from error


def _check_archive(file: Path) -> None:
    """Refuse what is no archive of torch's, or has a pickle that would unpack to any size."""
    try:
        with zipfile.ZipFile(file) as archive:
            pickles = [r for r in archive.infolist() if r.filename.endswith("/data.pkl")]
    except Exception as error:
        # A damaged list of records is a BadZipFile, UnicodeDecodeError, NotImplementedError, ...
        raise CheckpointError(
            f"{file} is corrupt, or of torch.save's format before 1.6: {error!r}"
        ) from error
    for record in pickles:
        _check_size(file / record.filename, record.file_size)


def _unpickle(file: Path) -> dict[str, torch.Tensor]:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # Damage shows in any step of a pickle: KeyError, TypeError, AssertionError, ...
        raise CheckpointError(f"{file} is corrupt or more than tensors: {error!r}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in tensors.items()
    ):
        raise CheckpointError(f"{file} is not a mapping of names to tensors")
    return tensors


def some(items: Iterable[str]) -> str:
    """List a few names, and how many more there are."""
    listed = list(items)
    rest = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + rest

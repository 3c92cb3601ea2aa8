"""The files of a checkpoint: which tensors they hold, and their values one by one.

A checkpoint is a single file, an index with its shards, or shards that are numbered by their names,
in safetensors or, with `torch.load(weights_only=True)`, as `.bin`, `.pth` or `.pt`.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import re
import sys
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
SUFFIXES = (".safetensors", *_PICKLED)
"""Of files with weights."""

# Safetensors first: a folder with both formats never falls back to the pickled one.
_PATTERNS = ("*.safetensors.index.json", "*.safetensors", "*.bin.index.json", "*.bin", "*.pth")
_USUAL_STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})(?P<suffix>\.\w+)")
# Bytes of an index or of the description of tensors in a file; safetensors has the same limit.
_MAX_HEADER = 100_000_000
_SHOWN = 5
_libc = ctypes.CDLL(None)


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
    chosen = _choose(folder, found[pattern])
    _require(folder, [path.name for path in chosen], "has links to files that are gone")
    if "safetensors" in pattern and (found["*.bin"] or found["*.bin.index.json"]):
        log.info("%s: reading %s, not the .bin files beside it", folder, chosen[0].name)
    return chosen


def _choose(folder: Path, found: list[Path]) -> list[Path]:
    """The only file or the only numbered set, of those with usual names if there are any."""
    found = [path for path in found if _stem(path) in _USUAL_STEMS] or found
    if len(found) == 1 and not _SHARD.fullmatch(found[0].name):
        return found
    shards = [match for match in (_SHARD.fullmatch(path.name) for path in found) if match]
    sets = {(match["stem"], match["total"], match["suffix"]) for match in shards}
    if len(shards) != len(found) or len(sets) != 1:
        raise CheckpointError(
            f"{folder} holds several weight files: must be one, one index or one numbered set: "
            f"{some(path.name for path in found)}"
        )
    stem, total, suffix = sets.pop()
    names = [f"{stem}-{number:05}-of-{total}{suffix}" for number in range(1, int(total) + 1)]
    _require(folder, names, "holds part of a numbered set")
    return [folder / name for name in names]


def _stem(path: Path) -> str:
    shard = _SHARD.fullmatch(path.name)
    return shard["stem"] if shard else path.name.partition(".")[0]


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
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not a weight index: {error!r}") from error
    outside = sorted({str(s) for s in shards.values() if Path(str(s)).name != str(s)})
    if outside:
        raise CheckpointError(f"{index} points outside its folder: {some(outside)}")
    _require(index.parent, map(str, shards.values()), f"lacks files that {index.name} names")
    held = {file: dict.fromkeys(_keys(file)) for file in sorted(set(where.values()))}
    absent = sorted(key for key, file in where.items() if key not in held[file])
    if absent:
        raise CheckpointError(f"{index} names tensors its shards lack: {some(absent)}")
    extra = sorted(set().union(*held.values()) - set(where))
    if extra:
        raise CheckpointError(f"{index} leaves out tensors of its shards: {some(extra)}")
    # In the order of the files, not of the index: a disk reads ahead.
    return {key: file for file, keys in held.items() for key in keys if where[key] == file}


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


def read(where: Mapping[str, Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors that lie in the mapped file: copy each, and `release` what was copied."""
    for file, keys in _by_file(where).items():
        read_one = _read_pickled if file.suffix in _PICKLED else _read_safetensors
        yield from read_one(file, keys)


def release(part: torch.Tensor) -> None:
    """Give back the memory of a part of a mapped file; it may be read again.

    Pages of a mapping that were read count as resident until they are given back. Those that a
    neighbour may share are kept.
    """
    if not part.is_contiguous():
        return
    first = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (part.data_ptr() + part.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0:
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


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
        sizes = _check_archive(file)
        tensors = _unpickle(file)
        _check_storages(file, tensors, sizes)
        return list(tensors)
    try:
        with safe_open(file, "pt") as opened:
            return list(opened.offset_keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is corrupt: {error}") from error


def _check_archive(file: Path) -> Counter[int]:
    """Refuse what is no archive of torch's or cannot be mapped; the sizes of its data in bytes."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            orders = [archive.open(r).read(8) for r in records if r.filename.endswith("/byteorder")]
    except Exception as error:
        # A damaged list of records is a BadZipFile, UnicodeDecodeError, NotImplementedError, ...
        raise CheckpointError(
            f"{file} is corrupt, or of torch.save's format before 1.6: {error!r}"
        ) from error
    data = [record for record in records if "/data/" in record.filename]
    for record in records:
        if "/data/" not in record.filename:
            _check_size(file / record.filename, record.file_size)
    stored = all(record.compress_type == zipfile.ZIP_STORED for record in data)
    if not stored or any(order != sys.byteorder.encode() for order in orders):
        raise CheckpointError(
            f"{file} cannot be mapped: its data must be uncompressed and {sys.byteorder}-endian"
        )
    return Counter(record.file_size for record in data)


def _check_storages(file: Path, tensors: Mapping[str, torch.Tensor], sizes: Counter[int]) -> None:
    """Refuse data that ends early: a mapped tensor would go on with what comes after."""
    storages = [tensor.untyped_storage() for tensor in tensors.values()]
    needed = {storage.data_ptr(): storage.nbytes() for storage in storages}
    if lacking := Counter(needed.values()) - sizes:
        raise CheckpointError(f"{file} is corrupt: no data of {some(map(str, lacking))} bytes")


def _unpickle(file: Path) -> dict[str, torch.Tensor]:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # Damage shows in any step of a pickle: KeyError, TypeError, AssertionError, ...
        raise CheckpointError(f"{file} is corrupt or more than tensors: {error!r}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(key, str) and _is_plain(value) for key, value in tensors.items()
    ):
        raise CheckpointError(f"{file} is not a mapping of names to dense tensors")
    return tensors


def _is_plain(value: object) -> bool:
    """Whether it is a tensor with values of its own: neither sparse nor on the meta device."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta


def some(items: Iterable[str]) -> str:
    """List a few names, and how many more there are."""
    listed = list(items)
    rest = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + rest

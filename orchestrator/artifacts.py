"""Finished videos, in a folder or behind any URL that fsspec knows."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import fsspec

from chitu_diffusion.errors import ConfigError, NotFoundError, OffsetError

CHUNK_BYTES = 1 << 20


class ArtifactStore:
    """Files by task id."""

    def __init__(self, url: str) -> None:
        """Find the file system; nothing is written yet.

        Args:
            url: a folder or fsspec URL; made at the first write.

        Raises:
            ConfigError: there is no such protocol, or its library is not installed.
        """
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except Exception as error:  # each file system has errors of its own for a bad URL
            raise ConfigError(f"orchestrator.results_url={url!r}: {error}") from error

    def path(self, task_id: str) -> str:
        """Where a task's file lies."""
        return f"{self._root}/{task_id}.mp4"

    def writer(self, task_id: str) -> ArtifactWriter:
        """A new file, visible under its name once it is complete."""
        return ArtifactWriter(self._fs, self.path(task_id))

    def delete(self, task_id: str) -> None:
        """Remove a file, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self.path(task_id))

    async def read(self, task_id: str, offset: int) -> AsyncIterator[tuple[int, bytes]]:
        """(offset, bytes) from `offset` to the end, at most 1 MiB each.

        Raises:
            NotFoundError: there is no such file.
            OffsetError: negative, or past the end.
        """
        path = self.path(task_id)
        try:
            size = (await asyncio.to_thread(self._fs.info, path))["size"]
        except FileNotFoundError:
            raise NotFoundError(f"the result of task {task_id} is gone") from None
        if not 0 <= offset <= size:
            raise OffsetError(f"offset {offset}: must be between 0 and {size}, the file's size")
        while offset < size:
            end = min(offset + CHUNK_BYTES, size)
            data: bytes = await asyncio.to_thread(self._fs.cat_file, path, offset, end)
            yield offset, data
            offset = end


class ArtifactWriter:
    """Writes a file piece by piece; leaving the context by an error removes it."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path, self._part = fs, path, f"{path}.part"
        self._file: Any = None
        self._hash = hashlib.sha256()
        self.size = 0
        """Bytes written."""

    @property
    def sha256(self) -> str:
        """Of the bytes written, in hexadecimal."""
        return self._hash.hexdigest()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._open)
        return self

    async def write(self, data: bytes) -> None:
        """Append bytes."""
        await asyncio.to_thread(self._file.write, data)
        self._hash.update(data)
        self.size += len(data)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Shielded: a cancelled task must not leave half a file either.
        await asyncio.shield(asyncio.to_thread(self._close, error is None))

    def _open(self) -> None:
        self._fs.makedirs(self._fs._parent(self._path), exist_ok=True)
        self._file = self._fs.open(self._part, "wb")

    def _close(self, complete: bool) -> None:
        self._file.close()
        if complete:
            self._fs.mv(self._part, self._path)
        else:
            self._fs.rm_file(self._part)

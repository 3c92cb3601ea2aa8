"""Pools of many ranks in tests: with faults on demand, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from chitu_diffusion.config.schema import Config
from services.dit.ranks import launcher
from services.dit.ranks.front import RankPool
from tests.dit.faulty_rank import FOLDER


class Faults:
    """Makes the ranks of the pools that are started under it misbehave."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def at(self, rank: int, step: int, what: str) -> None:
        """Have a rank "raise", go out of memory ("oom"), "hang", or get a "kill" or "stop"."""
        (self._folder / "fault").write_text(f"{rank} {step} {what}")

    def pace(self, seconds: float) -> None:
        """Make each step last longer by so much."""
        (self._folder / "pace").write_text(str(seconds))

    def clear(self) -> None:
        for file in self._folder.iterdir():
            file.unlink()


@contextlib.contextmanager
def faults_in(folder: Path) -> Iterator[Faults]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        patch.setattr(launcher, "RANK_MODULE", "tests.dit.faulty_rank")
        yield Faults(folder)


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[RankPool]:
    """A pool that has loaded; behind it, no process may be left."""
    before = descendants()
    pool = RankPool(config)
    await pool.load()
    try:
        yield pool
    finally:
        await pool.close()
        assert await gone(descendants() - before)


def descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


async def gone(processes: set[psutil.Process], within_s: float = 10.0) -> bool:
    """Whether processes have ended, or end in time; a zombie is no process any more."""
    deadline = time.monotonic() + within_s
    while any(is_alive(process) for process in processes):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def pids(pool: RankPool) -> list[int]:
    """Process ids of the ranks, in order."""
    return [rank.pid for rank in pool.describe().ranks]


async def until(what: str, holds: Callable[[], bool], within_s: float = 30.0) -> None:
    """Wait until `holds()` is true."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)

"""The groups of a rank are its process's, once."""

from collections.abc import Iterator

import pytest

from chitu_diffusion import parallel
from chitu_diffusion.errors import PreconditionError
from chitu_diffusion.parallel import ParallelGroups

GROUPS = ParallelGroups(cp_size=2, cfg_size=1, cp_rank=1, cfg_rank=0)


@pytest.fixture(autouse=True)
def _no_rank() -> Iterator[None]:
    parallel.leave()
    yield
    parallel.leave()


def test_join_and_leave() -> None:
    assert parallel.current() is None
    parallel.join(GROUPS)
    assert parallel.current() is GROUPS
    parallel.leave()
    parallel.leave()
    assert parallel.current() is None


def test_a_process_is_a_rank_once() -> None:
    parallel.join(GROUPS)
    with pytest.raises(PreconditionError, match="a rank of a pool already"):
        parallel.join(ParallelGroups(cp_size=1, cfg_size=1, cp_rank=0, cfg_rank=0))
    assert parallel.current() is GROUPS

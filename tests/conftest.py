"""What all tests share."""

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# A shell starts background jobs with SIGINT ignored, and the processes of the tests inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A folder whose path is short enough for unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="chitu-test-"))
    yield folder
    shutil.rmtree(folder)

"""Contact sheets: many clips in one PNG, to be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def save_sheet(clips: Sequence[NDArray[np.uint8]], path: Path, *, every: int = 4) -> None:
    """Write one row a clip (F, H, W, 3) and one column for every `every`-th frame."""
    rows = [np.concatenate(list(clip[::every]), axis=1) for clip in clips]
    width = max(row.shape[1] for row in rows)
    rows = [np.pad(row, ((0, 2), (0, width - row.shape[1]), (0, 0))) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(rows, axis=0)).save(path)

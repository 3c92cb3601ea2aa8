"""Where a checkpoint keeps its parts, and the names that it has for them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path

from chitu_diffusion.errors import CheckpointError, CheckpointNotFoundError
from services.common.weight_files import SUFFIXES

log = logging.getLogger(__name__)


def find_part(ckpt_dir: Path, part: str, folder: str, files: str) -> Path:
    """Find a part's folder in diffusers' layout, else its file in the original one.

    Args:
        ckpt_dir: the checkpoint.
        part: what it is, for messages.
        folder: its name in diffusers' layout.
        files: the pattern of its name in the original layout.

    Raises:
        CheckpointNotFoundError: there is neither.
        CheckpointError: several files fit the pattern.
    """
    found = sorted(path for path in ckpt_dir.glob(files) if path.suffix in SUFFIXES)
    if (ckpt_dir / folder).is_dir():
        passed_over = f", not {', '.join(path.name for path in found)}" if found else ""
        log.info("%s: %s (diffusers' layout)%s", part, ckpt_dir / folder, passed_over)
        return ckpt_dir / folder
    if len(found) > 1:
        raise CheckpointError(
            f"{ckpt_dir}: several files of the {part}: {', '.join(map(str, found))}"
        )
    if found:
        log.info("%s: %s (original layout)", part, found[0])
        return found[0]
    raise CheckpointNotFoundError(
        f"{ckpt_dir}: no {part}: neither {folder}/ (diffusers' layout) nor {files} (original)"
    )


def translate(name: str, table: Iterable[tuple[str, str]]) -> str:
    """Replace the first pattern of `table` that is in `name`; other names stay as they are."""
    for pattern, replacement in table:
        name, count = re.subn(pattern, replacement, name)
        if count:
            return name
    return name

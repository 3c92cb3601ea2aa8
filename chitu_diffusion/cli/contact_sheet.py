"""All frames of a video side by side, for a person to look at."""

from __future__ import annotations

import math
from pathlib import Path

_GAP = 2
_MIN_SIDE = 128
"""Frames smaller than this are enlarged, in whole multiples."""


def write_contact_sheet(video: Path, sheet: Path) -> None:
    """Write the frames of `video`, row by row, as a PNG."""
    import av
    import numpy as np

    with av.open(str(video)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    scale = max(1, _MIN_SIDE // min(frames[0].shape[:2]))
    frames = [frame.repeat(scale, axis=0).repeat(scale, axis=1) for frame in frames]
    height, width = frames[0].shape[:2]
    columns = math.ceil(math.sqrt(len(frames)))
    rows = math.ceil(len(frames) / columns)
    canvas = np.full(
        (rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3), 128, dtype=np.uint8
    )
    for i, frame in enumerate(frames):
        top, left = (i // columns) * (height + _GAP), (i % columns) * (width + _GAP)
        canvas[top : top + height, left : left + width] = frame
    encoder = av.CodecContext.create("png", "w")
    encoder.height, encoder.width = canvas.shape[:2]
    encoder.pix_fmt = "rgb24"
    packets = encoder.encode(av.VideoFrame.from_ndarray(canvas, format="rgb24"))
    sheet.write_bytes(b"".join(bytes(packet) for packet in [*packets, *encoder.encode(None)]))

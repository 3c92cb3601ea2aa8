"""Read colour, shape, direction and background off a clip's pixels, knowing no prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import shapes

FAR = 48  # levels from the background, in any channel, that make a pixel foreground
LEAST_AREA = 1 / 100  # of the picture; radius 10 in 64 pixels is 7/100
LEAST_TRAVEL = 1 / 10  # of the picture's width; trained clips move by a third and more
# Area of a shape of radius 1, see `shapes.coverage`.
_AREAS = {"circle": math.pi, "square": 1.8**2, "triangle": 3 * 3**0.5 / 4 * 1.25**2}
_NAMED = shapes.COLOURS | shapes.BACKGROUNDS


@dataclass(frozen=True)
class Verdict:
    """What the pixels show. `None`: it can't be told, for example as there is no object.

    `colour` and `background` are the nearest of all named colours, so that a white blob or a red
    background counts as what it is.
    """

    colour: str | None
    direction: str | None
    background: str
    shape: str | None
    travel: tuple[float, float]  # pixels (x, y) from the first to the last frame, y downwards


def _nearest(rgb: NDArray[np.floating]) -> str:
    """Return the name of the nearest colour or background."""
    return min(_NAMED, key=lambda name: float(np.linalg.norm(rgb - np.array(_NAMED[name]))))


def _shape_scores(mask: NDArray[np.bool_], x: float, y: float) -> dict[str, float]:
    """Return, for each shape of the mask's area and centre (x, y), the IoU with the mask."""
    height, width = mask.shape
    dx = np.arange(width)[None, :] + 0.5 - x
    dy = np.arange(height)[:, None] + 0.5 - y
    scores = {}
    for shape, unit in _AREAS.items():
        template = shapes.coverage(shape, math.sqrt(mask.sum() / unit), dx, dy) > 0.5
        scores[shape] = float((mask & template).sum() / (mask | template).sum())
    return scores


def judge(frames: NDArray[np.uint8]) -> Verdict:
    """Judge a clip (F, H, W, 3) of RGB uint8; made for plain backgrounds and one moving shape."""
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8:
        raise ValueError(f"want uint8 frames (F, H, W, 3), got {frames.dtype} {frames.shape}")
    count, _, width, _ = frames.shape
    background = np.median(frames.reshape(-1, 3), axis=0)
    masks = (np.abs(frames.astype(np.int16) - background) > FAR).any(axis=-1)
    seen = [index for index in range(count) if masks[index].mean() >= LEAST_AREA]
    if len(seen) < max(1, count // 2):
        return Verdict(None, None, _nearest(background), None, (0.0, 0.0))
    colour = _nearest(np.median(frames[seen][masks[seen]], axis=0))
    centres = []
    totals = dict.fromkeys(shapes.SHAPES, 0.0)
    for index in seen:
        rows, columns = np.nonzero(masks[index])
        x, y = columns.mean() + 0.5, rows.mean() + 0.5
        centres.append((x, y))
        for shape, score in _shape_scores(masks[index], x, y).items():
            totals[shape] += score
    # A line through all centres: one bad frame does not decide.
    travel = (0.0, 0.0)
    if len(seen) > 1:
        slopes = np.polyfit(seen, np.array(centres), deg=1)[0] * (count - 1)
        travel = (float(slopes[0]), float(slopes[1]))
    axis = int(abs(travel[1]) > abs(travel[0]))
    direction = None
    if abs(travel[axis]) >= LEAST_TRAVEL * width:
        direction = (("left", "right"), ("up", "down"))[axis][int(travel[axis] > 0)]
    shape = max(totals, key=lambda name: totals[name])
    return Verdict(colour, direction, _nearest(background), shape, travel)

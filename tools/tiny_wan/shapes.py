"""Synthetic clips of one coloured shape moving over a plain background, and their captions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rgb = tuple[int, int, int]

COLOURS: dict[str, Rgb] = {
    "red": (230, 30, 30),
    "green": (30, 190, 50),
    "blue": (40, 70, 235),
    "yellow": (245, 225, 40),
    "magenta": (225, 40, 205),
    "cyan": (40, 215, 230),
}
BACKGROUNDS: dict[str, Rgb] = {
    "black": (0, 0, 0),
    "white": (255, 255, 255),
    "gray": (128, 128, 128),
}
SHAPES: tuple[str, ...] = ("circle", "square", "triangle")
# Unit vectors (x, y); y grows downwards.
DIRECTIONS: dict[str, tuple[int, int]] = {
    "left": (-1, 0),
    "right": (1, 0),
    "up": (0, -1),
    "down": (0, 1),
}

SIZE = 64  # pixels, both sides
FPS = 16

TEMPLATE = "a {colour} {shape} moving {direction} on a {background} background"
PARAPHRASES: tuple[str, ...] = (
    "a {colour} {shape} moves {direction} on a {background} background",
    "{colour} {shape} moving {direction}, {background} background",
    "a {shape} in {colour} moving {direction} over a plain {background} background",
    "on a {background} background, a {colour} {shape} is moving {direction}",
)


@dataclass(frozen=True)
class Take:
    """How long a clip is and how far its shape moves."""

    frames: int
    travel: tuple[float, float]
    """Pixels from the first to the last frame, at least and at most."""
    radius: tuple[float, float]
    """Pixels, at least and at most."""
    lanes: tuple[float, ...] = ()
    """Where the shape may run, in pixels across its path, which is then centred; else anywhere."""


# The VAE learns from parts of long clips with shapes anywhere. The transformer learns from short
# ones on a few lanes: their 48 tokens train in half the time of 80, and what it must find out from
# noise is which of a few paths, not which of thousands.
LONG = Take(17, (20.0, 28.0), (10.0, 15.0))
CLIP = Take(9, (17.0, 19.0), (11.5, 12.5), lanes=(19.0, 32.0, 45.0))
_JITTER = 1.0  # pixels around a lane and around the centre


@dataclass(frozen=True)
class Scene:
    """What a caption says; each field is a key of the tables above."""

    colour: str
    shape: str
    direction: str
    background: str

    def caption(self, template: str = TEMPLATE) -> str:
        """Return this scene in words."""
        return template.format(**self.__dict__)


ALL_SCENES: tuple[Scene, ...] = tuple(
    Scene(*words) for words in itertools.product(COLOURS, SHAPES, DIRECTIONS, BACKGROUNDS)
)


def held_out_scenes() -> list[Scene]:
    """Return the 48 scenes no training clip shows: two for every colour and direction.

    Every single word, and every pair of words, still occurs in training.
    """
    rng = np.random.default_rng(2026)
    pairs = list(itertools.product(SHAPES, BACKGROUNDS))
    scenes = []
    for colour, direction in itertools.product(COLOURS, DIRECTIONS):
        for index in sorted(rng.choice(len(pairs), size=2, replace=False)):
            shape, background = pairs[index]
            scenes.append(Scene(colour, shape, direction, background))
    return scenes


def training_scenes() -> list[Scene]:
    """Return the 168 scenes that are not held out."""
    held_out = set(held_out_scenes())
    return [scene for scene in ALL_SCENES if scene not in held_out]


def _extent(shape: str, radius: float) -> tuple[float, float, float, float]:
    """Return how far a shape reaches from its centre to the left, right, up and down, in pixels."""
    if shape == "circle":
        return radius, radius, radius, radius
    if shape == "square":
        half = 0.9 * radius
        return half, half, half, half
    outer = 1.25 * radius  # of the equilateral triangle's circumscribed circle
    half_base = outer * 3**0.5 / 2
    return half_base, half_base, outer, outer / 2


def coverage(shape: str, radius: float, dx: NDArray, dy: NDArray) -> NDArray:
    """Return how much of each pixel the shape covers, 0..1, at offsets (dx, dy) from its centre."""
    if shape == "circle":
        distance = np.hypot(dx, dy) - radius
    elif shape == "square":
        distance = np.maximum(np.abs(dx), np.abs(dy)) - 0.9 * radius
    else:
        slanted = np.abs(dx) * 3**0.5 / 2 - dy / 2
        distance = np.maximum(slanted, dy) - 1.25 * radius / 2
    return np.clip(0.5 - distance, 0.0, 1.0)


def render(
    scene: Scene, rng: np.random.Generator, *, take: Take = CLIP, any_colours: bool = False
) -> NDArray[np.uint8]:
    """Draw one clip (take.frames, SIZE, SIZE, 3), uint8, with random size, start and speed.

    The shape stays inside the picture from the first frame to the last. With `any_colours` both
    colours are drawn from all of RGB instead of being the scene's.
    """
    radius = rng.uniform(*take.radius)
    travel = rng.uniform(*take.travel)
    left, right, up, down = _extent(scene.shape, radius)
    step = DIRECTIONS[scene.direction]
    path = np.linspace(0.0, travel, take.frames)
    centres = []
    for axis, (before, after) in enumerate(((left, right), (up, down))):
        offsets = step[axis] * path
        if take.lanes:
            across = step[axis] == 0
            middle = take.lanes[rng.integers(len(take.lanes))] if across else SIZE / 2
            start = middle - offsets.mean() + rng.uniform(-_JITTER, _JITTER)
        else:
            low = before + 1 - offsets.min()
            start = rng.uniform(low, SIZE - after - 1 - offsets.max())
        centres.append(start + offsets)
    pixel = np.arange(SIZE) + 0.5
    dx = pixel[None, None, :] - centres[0][:, None, None]
    dy = pixel[None, :, None] - centres[1][:, None, None]
    alpha = coverage(scene.shape, radius, dx, dy)[..., None]
    front = np.array(COLOURS[scene.colour], dtype=np.float64)
    back = np.array(BACKGROUNDS[scene.background], dtype=np.float64)
    if any_colours:
        front, back = rng.uniform(0, 255, size=(2, 3))
    return np.rint(alpha * front + (1 - alpha) * back).astype(np.uint8)


def random_caption(scene: Scene, rng: np.random.Generator) -> str:
    """Return the template (in half of the cases), a paraphrase, or (1 in 10) no caption at all."""
    draw = rng.uniform()
    if draw < 0.1:
        return ""
    if draw < 0.6:
        return scene.caption()
    return scene.caption(PARAPHRASES[rng.integers(len(PARAPHRASES))])

"""How long steps take, by the shape of the video and the layout."""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from chitu_diffusion.v1 import dit_pb2
from services.dit.denoiser import DenoiseParams
from services.dit.parallel import Layout
from services.dit.replies import layout_message

_KEPT_STEPS = 15
_MAX_KINDS = 256


@dataclass(frozen=True)
class StepKind:
    """What the time of a step depends on."""

    num_frames: int
    height: int
    width: int
    guided: bool
    layout: Layout

    @classmethod
    def of(cls, params: DenoiseParams, guided: bool, layout: Layout) -> StepKind:
        """The kind of a task's steps."""
        return cls(params.num_frames, params.height, params.width, guided, layout)

    def work(self) -> float:
        """An upper bound of how the time grows: with the square of the tokens on one rank."""
        branches = 2 if self.guided and self.layout.cfg_size == 1 else 1
        pixels = float(self.num_frames * self.height * self.width)
        return branches * pixels**2 / self.layout.cp_size


class StepTimes:
    """The last times of each kind."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[StepKind, deque[float]] = OrderedDict()
        self._counts: dict[StepKind, int] = {}

    def add(self, kind: StepKind, seconds: float) -> None:
        """Note a step."""
        self._seconds.setdefault(kind, deque(maxlen=_KEPT_STEPS)).append(seconds)
        self._counts[kind] = self._counts.get(kind, 0) + 1
        self._seconds.move_to_end(kind)
        if len(self._seconds) > _MAX_KINDS:
            dropped, _ = self._seconds.popitem(last=False)
            del self._counts[dropped]

    def expected(self, kind: StepKind) -> float:
        """Seconds of a step, or their upper bound if this kind is new; inf if none was seen."""
        if kind in self._seconds:
            return statistics.median(self._seconds[kind])
        return min(
            (
                statistics.median(seconds) * max(1.0, kind.work() / known.work())
                for known, seconds in self._seconds.items()
            ),
            default=math.inf,
        )

    def messages(self) -> Iterator[dit_pb2.StepTime]:
        """All of them."""
        for kind, seconds in self._seconds.items():
            yield dit_pb2.StepTime(
                num_frames=kind.num_frames,
                height=kind.height,
                width=kind.width,
                guided=kind.guided,
                layout=layout_message(kind.layout),
                seconds=statistics.median(seconds),
                count=self._counts[kind],
            )

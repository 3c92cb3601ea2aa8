"""Whose turn it is. *Scheduler* always means this here; the ODE method is called *solver*.

Each stage is a lane with a few places. Tasks enter a lane in order of acceptance, so a task that
comes back for its next slice goes before younger ones. Lanes are independent: the encode, denoise
and decode of different tasks overlap.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from chitu_diffusion.v1 import generation_pb2 as pb
from orchestrator.task import DECODE, DENOISE, ENCODE, Task

# How many tasks may wait in front of a lane before the lane behind it pauses: bounds the embeddings
# and latents that are held, and is enough that no lane runs dry.
_LOOK_AHEAD = {DENOISE: 2, DECODE: 8}
_NEXT = {ENCODE: DENOISE, DENOISE: DECODE}


@dataclass
class _Lane:
    places: int
    waiting: list[tuple[int, str]] = field(default_factory=list)
    running: set[str] = field(default_factory=set)


class DiffusionScheduler:
    """First come, first served, in each stage."""

    def __init__(self, places: int = 1) -> None:
        """`places`: tasks of one stage that run at the same time."""
        self._lanes = {stage: _Lane(places) for stage in (ENCODE, DENOISE, DECODE)}
        self._order: dict[str, int] = {}
        self._accepted = 0

    def widen(self, stage: pb.Stage.ValueType, places: int) -> None:
        """Let so many tasks be in a stage at the same time."""
        self._lanes[stage].places = places

    def submit(self, task: Task) -> None:
        """Let a task wait for its next stage."""
        if task.id not in self._order:
            self._order[task.id] = self._accepted
            self._accepted += 1
        heapq.heappush(self._lanes[task.stage].waiting, (self._order[task.id], task.id))

    def schedule(self) -> str | None:
        """The id of the task to run next; None when nobody waits or no place is free.

        The task's place is taken until `release`.
        """
        for stage in (DECODE, DENOISE, ENCODE):  # what is nearest to its end first
            lane = self._lanes[stage]
            self._drop_removed(lane)
            if lane.waiting and len(lane.running) < lane.places and not self._blocked(stage):
                _, task_id = heapq.heappop(lane.waiting)
                lane.running.add(task_id)
                return task_id
        return None

    def claim(self, task: Task) -> None:
        """Take a task's place whatever its turn; no effect when `schedule` has given it one."""
        lane = self._lanes[task.stage]
        lane.waiting = [entry for entry in lane.waiting if entry[1] != task.id]
        heapq.heapify(lane.waiting)
        lane.running.add(task.id)

    def release(self, task: Task) -> None:
        """Free the place a task has; `submit` it again for its next stage."""
        for lane in self._lanes.values():
            lane.running.discard(task.id)

    def remove(self, task: Task) -> None:
        """Forget a task that has ended."""
        self.release(task)
        self._order.pop(task.id, None)

    def queue(self) -> list[str]:
        """Ids of the tasks whose first stage has not begun, in their order."""
        lane = self._lanes[ENCODE]
        self._drop_removed(lane)
        return [task_id for _, task_id in sorted(lane.waiting) if task_id in self._order]

    @property
    def queue_length(self) -> int:
        """Number of tasks whose first stage has not begun."""
        return len(self.queue())

    def _blocked(self, stage: pb.Stage.ValueType) -> bool:
        following = _NEXT.get(stage)
        return following is not None and (
            len(self._lanes[following].waiting) >= _LOOK_AHEAD[following]
        )

    def _drop_removed(self, lane: _Lane) -> None:
        while lane.waiting and lane.waiting[0][1] not in self._order:
            heapq.heappop(lane.waiting)

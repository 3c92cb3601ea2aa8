"""What a pool takes in: the state it is in, attempts, and slices that have not ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from chitu_diffusion.errors import AbortedError, UnavailableError
from chitu_diffusion.v1 import component_pb2
from services.dit.stream import SliceStream

_MAX_KNOWN_TASKS = 10_000

LOADING = component_pb2.COMPONENT_STATE_LOADING
READY = component_pb2.COMPONENT_STATE_READY
DRAINING = component_pb2.COMPONENT_STATE_DRAINING
FAILED = component_pb2.COMPONENT_STATE_FAILED


class Intake:
    """The door of a pool, behind the rules for single requests."""

    def __init__(self) -> None:
        self.state: component_pb2.ComponentState.ValueType = LOADING
        self.detail = ""
        """Why the state is FAILED, or LOADING again."""
        self.active: set[SliceStream] = set()
        self._attempts: OrderedDict[str, int] = OrderedDict()

    def check(self) -> None:
        """Raise `UnavailableError` unless slices are taken."""
        if self.state == LOADING:
            raise UnavailableError(self.detail or "weights are loading")
        if self.state == DRAINING:
            raise UnavailableError("the pool is shutting down")
        if self.state == FAILED:
            raise UnavailableError(f"weights could not be loaded: {self.detail}")

    def open(
        self, task_id: str, attempt: int, on_cancel: Callable[[], None] | None = None
    ) -> SliceStream:
        """Take a slice; `active` has its stream until it is discarded there.

        Raises:
            AbortedError: a newer attempt of the task is known.
        """
        newest = self._attempts.get(task_id, attempt)
        if attempt < newest:
            raise AbortedError(f"task {task_id!r}: attempt {attempt} is behind {newest}")
        self._attempts[task_id] = attempt
        self._attempts.move_to_end(task_id)
        if len(self._attempts) > _MAX_KNOWN_TASKS:
            self._attempts.popitem(last=False)
        for stream in self.active:
            if stream.task_id == task_id and stream.attempt < attempt:
                stream.cancel(AbortedError(f"attempt {attempt} has taken over"))
        stream = SliceStream(task_id, attempt, on_cancel)
        self.active.add(stream)
        return stream

    def drain(self) -> None:
        """Take no more slices."""
        if self.state != FAILED:
            self.state = DRAINING

    def cancel_all(self) -> None:
        """End every slice at its next step boundary, as the pool is shutting down."""
        for stream in list(self.active):
            stream.cancel(UnavailableError("the pool is shutting down"))

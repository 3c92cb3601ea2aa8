"""Where tasks are kept: in memory, in order of acceptance. They do not outlive the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from chitu_diffusion.errors import AlreadyExistsError, NotFoundError, PreconditionError
from orchestrator.task import Task


class TaskStore:
    """All tasks by id and by request id."""

    def __init__(self, max_finished: int, on_delete: Callable[[Task], None]) -> None:
        """Keep `max_finished` ended tasks; `on_delete` removes what a task left elsewhere."""
        self._tasks: dict[str, Task] = {}
        self._by_request_id: dict[str, Task] = {}
        self._ended: dict[str, None] = {}
        self._max_finished = max_finished
        self._on_delete = on_delete

    def add(self, task: Task) -> None:
        """Record a new task."""
        self._tasks[task.id] = task
        if task.request_id is not None:
            self._by_request_id[task.request_id] = task

    def existing(self, request_id: str | None, fingerprint: bytes) -> Task | None:
        """The task that already has this request id.

        Raises:
            AlreadyExistsError: it was made from other parameters.
        """
        task = self._by_request_id.get(request_id) if request_id is not None else None
        if task is not None and task.fingerprint != fingerprint:
            raise AlreadyExistsError(
                f"request_id {request_id!r} was used with other parameters, for task {task.id}"
            )
        return task

    def get(self, task_id: str) -> Task:
        """A task.

        Raises:
            NotFoundError: there is none.
        """
        try:
            return self._tasks[task_id]
        except KeyError:
            raise NotFoundError(f"no task {task_id!r}") from None

    def ended(self, task: Task) -> None:
        """Note that a task has ended; the oldest ended ones beyond the limit are deleted."""
        self._ended[task.id] = None
        while len(self._ended) > self._max_finished:
            self.delete(next(iter(self._ended)))

    def delete(self, task_id: str) -> None:
        """Remove an ended task.

        Raises:
            NotFoundError: there is none.
            PreconditionError: it has not ended.
        """
        task = self.get(task_id)
        if not task.ended:
            raise PreconditionError(f"task {task_id} has not ended: cancel it first")
        del self._tasks[task_id]
        self._ended.pop(task_id, None)
        if task.request_id is not None:
            self._by_request_id.pop(task.request_id, None)
        self._on_delete(task)

    def newest_first(self) -> Iterator[Task]:
        """Every task."""
        return reversed(list(self._tasks.values()))

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks.values())

"""Attributes that a class shares with its one live instance, such as `DiffusionBackend.vae`."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar, cast

from chitu_diffusion import parallel
from chitu_diffusion.errors import PreconditionError
from orchestrator.core import BackendState

T = TypeVar("T")


class Mirrored(Generic[T]):
    """An attribute of a backend that its class has too: there it is the live backend's."""

    def __init__(self, empty: Callable[[], T]) -> None:
        self._empty = empty

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Single | None, owner: type[Single]) -> T:
        backend = owner.current if instance is None else instance
        parts = {} if backend is None else backend.parts()
        return cast(T, parts[self._name]) if self._name in parts else self._empty()

    def __set__(self, instance: Single, value: Any) -> None:
        raise AttributeError(f"{self._name} belongs to the backend: it cannot be replaced")


class Group:
    """A process group that this process is a member of, as a rank of the pool; else None."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Single | None, owner: type[Single]) -> Any:
        return getattr(parallel.current(), self._name, None)


class State:
    """The backend's state; assigning one makes the transition."""

    def __get__(self, instance: Single | None, owner: type[Single]) -> BackendState:
        backend = owner.current if instance is None else instance
        return BackendState.Uninitialized if backend is None else backend.current_state()

    def __set__(self, instance: Single, value: BackendState) -> None:
        instance.enter(value)


class _AssignableState(abc.ABCMeta):
    """Lets an assignment to the class's `state` reach the live backend, and guards the rest."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "state":
            backend = cast(type[Single], cls).current
            if backend is None:
                raise PreconditionError(f"there is no backend to become {value}: make one first")
            backend.enter(value)
        elif isinstance(cls.__dict__.get(name), Mirrored):
            raise AttributeError(f"{name} belongs to the live backend: it cannot be replaced")
        else:
            super().__setattr__(name, value)


class Single(metaclass=_AssignableState):
    """A class with one live instance at most."""

    current: ClassVar[Any] = None
    """The live instance, or the last one that lived."""

    state = State()

    @abc.abstractmethod
    def parts(self) -> Mapping[str, Any]:
        """Values of the mirrored attributes; nothing once it has ended."""

    @abc.abstractmethod
    def current_state(self) -> BackendState:
        """What `state` reads."""

    @abc.abstractmethod
    def enter(self, target: BackendState) -> None:
        """What assigning `state` does."""

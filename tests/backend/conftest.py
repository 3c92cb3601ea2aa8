"""A live backend on the shipped tiny models, in this process."""

from collections.abc import Callable, Iterator

import pytest

from chitu_diffusion import config
from chitu_diffusion.backend import BackendState, DiffusionBackend, chitu_terminate

PROMPT = "a red circle moving left on a black background"


def settings(folder, *overrides: str):
    return config.load([f"orchestrator.results_url={folder}", *overrides])


@pytest.fixture(scope="session")
def alive(tmp_path_factory) -> Iterator[Callable[..., DiffusionBackend]]:
    """Gives the live backend if it has these overrides, else makes it."""
    made: dict[tuple[str, ...], DiffusionBackend] = {}

    def alive(*overrides: str) -> DiffusionBackend:
        backend = made.get(overrides)
        if backend is None or backend.state is not BackendState.Running:
            chitu_terminate(cancel=True)
            folder = tmp_path_factory.mktemp("results")
            made[overrides] = backend = DiffusionBackend(settings(folder, *overrides))
            backend.start()
        return backend

    yield alive
    chitu_terminate(cancel=True)


@pytest.fixture
def backend(alive) -> DiffusionBackend:
    """Running, with slices of six steps."""
    return alive("orchestrator.slice_steps=6")


@pytest.fixture
def two_experts(alive) -> DiffusionBackend:
    """Running, on the model with two experts."""
    return alive("models=tiny-wan2.2")


@pytest.fixture
def nobody() -> Iterator[None]:
    """No backend is alive, before and after."""
    chitu_terminate(cancel=True)
    yield
    chitu_terminate(cancel=True)


def run_by_hand(backend: DiffusionBackend, **fields) -> bytes:
    """The video of a request, with a loop of one's own."""
    task = backend.submit(**fields)
    while not task.ended:
        task_id = DiffusionBackend.scheduler.schedule()
        DiffusionBackend.generator.generate_step(backend.task(task_id))
    return backend.result(task)

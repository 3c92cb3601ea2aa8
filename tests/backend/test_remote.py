"""A backend whose services are all elsewhere."""

import subprocess
import sys

import pytest

from chitu_diffusion import config
from chitu_diffusion.backend import BackendState, DiffusionBackend
from chitu_diffusion.errors import ComponentError
from chitu_diffusion.loop import LoopThread
from chitu_diffusion.rpc.server import Server
from tests.orchestrator.stand_ins import (
    Script,
    StandInDit,
    StandInEncoder,
    StandInVae,
    latents_of,
    video_of,
)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def hosts(socket_dir, script):
    """The addresses of stand-in hosts as overrides."""
    loop = LoopThread("hosts")

    async def start():
        servers = []
        for host in (StandInEncoder(script), StandInDit(script), StandInVae(script)):
            servers.append(Server(host, f"unix:{socket_dir}/{host.name}"))
            await servers[-1].start()
        return servers

    async def stop(servers):
        for server in servers:
            await server.stop(0)

    servers = loop.run(start())
    yield [
        f"orchestrator.results_url={socket_dir}/results",
        *(f"services.{n}.address=unix:{socket_dir}/{n}" for n in ("encoder", "dit", "vae")),
    ]
    loop.run(stop(servers))
    loop.close()


@pytest.fixture
def connect(hosts, nobody):
    made = []

    def connect(*overrides):
        made.append(DiffusionBackend(config.load([*hosts, *overrides])))
        return made[-1]

    yield connect
    for backend in made:
        backend.terminate(cancel=True)


def test_a_task_runs_on_remote_services(connect):
    backend = connect()
    backend.start()
    task = backend.submit(prompt="a cat", seed=3, num_inference_steps=2)
    while not task.ended:
        backend.step()
    assert backend.result(task) == video_of(latents_of(3).data)


def test_sizes_are_the_pools_and_this_process_is_no_rank(connect):
    connect()
    assert (DiffusionBackend.get_cfg_size(), DiffusionBackend.get_cp_size()) == (2, 6)
    assert (DiffusionBackend.get_cfg_rank(), DiffusionBackend.get_cp_rank()) == (-1, -1)
    assert DiffusionBackend.cp_group is DiffusionBackend.cfg_group is None


def test_flexcache_manager_tells_what_the_pool_reuses(connect, script):
    script.pool.flexcache.params.strategy = "teacache"
    script.pool.flexcache.params.threshold = 0.2
    backend = connect()
    script.pool.flexcache.memory_bytes = 12
    manager = DiffusionBackend.flexcache_manager
    assert manager is backend.flexcache_manager
    assert (manager.strategy, manager.params.threshold, manager.memory_bytes) == (
        "teacache",
        0.2,
        12,
    )


def test_a_failing_step_fails_the_task_and_the_next_one_works(connect, script):
    backend = connect()
    backend.start()
    script.fail_seeds = {1}
    bad, good = (backend.submit(prompt="x", seed=n, num_inference_steps=1) for n in (1, 2))
    while not (bad.ended and good.ended):
        backend.step()
    with pytest.raises(ComponentError, match="cursed"):
        backend.result(bad)
    assert backend.result(good) == video_of(latents_of(2).data)
    third = backend.submit(prompt="x", seed=1, num_inference_steps=1)
    backend.generator.generate_step(third)
    with pytest.raises(ComponentError, match="cursed"):
        backend.generator.generate_step(third)
    assert third.ended


def test_terminating_closes_the_connections_only(connect, hosts):
    connect().terminate()
    assert DiffusionBackend.state is BackendState.Terminated
    assert connect().state is BackendState.Initialized


def test_no_model_library_is_loaded(hosts):
    code = (
        "import sys\n"
        "from chitu_diffusion import config\n"
        "from chitu_diffusion.backend import chitu_init, chitu_terminate\n"
        f"chitu_init(config.load({hosts!r}))\n"
        "chitu_terminate()\n"
        "print(*[m for m in ('torch', 'numpy', 'diffusers') if m in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert output.strip() == ""

"""Whole videos over pools of several ranks, and over a pool for each expert."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from chitu_diffusion import config
from chitu_diffusion.client import Client
from chitu_diffusion.errors import ConfigError, PreconditionError
from chitu_diffusion.launch import embedded
from chitu_diffusion.rpc.server import Server
from chitu_diffusion.v1 import dit_pb2
from services.dit.host import DitHost
from tests.e2e.conftest import ROOT  # noqa: F401 - the folder that models are relative to

SHAPE = {"num_frames": 5, "height": 32, "width": 48, "num_inference_steps": 6}


def settings(*overrides, model="tiny-wan2.2", folder):
    return config.load(
        [
            f"models={model}",
            "infer.device=cpu",
            "infer.num_threads=1",
            "services.dit.warmup=off",
            f"orchestrator.results_url={folder}",
            *overrides,
        ]
    )


def video(client, seed=1):
    return client.generate("a red circle", seed=seed, **SHAPE)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Videos of one rank, by seed."""
    folder = tmp_path_factory.mktemp("alone")
    with embedded(settings(folder=folder)) as address, Client(address) as client:
        return {seed: video(client, seed) for seed in range(4)}


def layouts(result):
    return {
        (step.layout.cfg_size, step.layout.ulysses_degree, step.layout.ring_degree)
        for step in result.report.steps
    }


def test_several_tasks_side_by_side_on_one_pool(tmp_path, alone):
    wide = settings("distributed.world_size=2", "orchestrator.ranks_per_task=1", folder=tmp_path)
    with embedded(wide) as address, Client(address) as client, ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda seed: video(client, seed), range(4)))
    for seed, result in enumerate(made):
        assert layouts(result) == {(1, 1, 1)}
        assert result.data == alone[seed].data


@pytest.mark.parametrize("slice_steps", [0, 1])
def test_a_task_on_all_ranks(tmp_path, slice_steps):
    wide = settings(
        "distributed.world_size=2", f"orchestrator.slice_steps={slice_steps}", folder=tmp_path
    )
    with embedded(wide) as address, Client(address) as client:
        result = video(client)
        assert layouts(result) == {(2, 1, 1)}
        assert [step.step for step in result.report.steps] == [*range(6)]


@pytest.fixture
async def two_pools(socket_dir, tmp_path):
    """A pool for each expert, and the keys by which an orchestrator finds them."""
    addresses = {}
    servers = []
    for expert in ("high_noise", "low_noise"):
        addresses[expert] = f"unix:{socket_dir}/{expert}"
        host = DitHost(settings(f"services.dit.expert={expert}", folder=tmp_path))
        servers.append(Server(host, addresses[expert]))
        await servers[-1].start()
        await servers[-1].load()
    yield (
        f"services.dit.address={addresses['high_noise']}",
        f"services.dit.low_noise_address={addresses['low_noise']}",
    )
    for server in servers:
        await server.stop(0)


@pytest.mark.parametrize("slice_steps", [0, 2])
async def test_a_pool_for_each_expert(tmp_path, two_pools, alone, slice_steps):
    import asyncio

    def run():
        apart = settings(*two_pools, f"orchestrator.slice_steps={slice_steps}", folder=tmp_path)
        with embedded(apart) as address, Client(address) as client:
            names = [part.name for part in client.backend().components]
            return names, video(client)

    names, result = await asyncio.to_thread(run)
    assert sorted(names) == ["text_encoder", "transformer", "transformer_2", "vae"]
    experts = [step.expert for step in result.report.steps]
    assert set(experts) == {dit_pb2.EXPERT_HIGH_NOISE, dit_pb2.EXPERT_LOW_NOISE}
    assert experts == sorted(experts)
    assert result.data == alone[1].data


def test_more_ranks_a_task_than_the_pool_has(tmp_path):
    wrong = settings("distributed.world_size=2", "orchestrator.ranks_per_task=3", folder=tmp_path)
    with (
        pytest.raises(PreconditionError, match=r"ranks_per_task=3: .* groups of 1, 2 ranks"),
        embedded(wrong),
    ):
        pass


@pytest.mark.parametrize("key", ["expert=low_noise", "low_noise_address=dit:1"])
def test_a_model_of_one_expert_has_no_pool_for_another(tmp_path, key):
    with pytest.raises(ConfigError, match="as tiny-wan has one"):
        settings(f"services.dit.{key}", model="tiny-wan", folder=tmp_path)

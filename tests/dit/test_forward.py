"""Forward and GetPool over real gRPC, against diffusers on the shipped models."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from diffusers import WanTransformer3DModel

from chitu_diffusion import config as configuration
from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import (
    ChituError,
    ComponentError,
    ConfigError,
    InvalidRequestError,
    NotFoundError,
    OutOfMemoryError,
    UnavailableError,
    from_rpc_error,
)
from chitu_diffusion.v1 import dit_pb2, dit_pb2_grpc
from chitu_diffusion.wire import TensorReceiver, tensor_parts
from services.dit import rank as rank_module
from services.dit.forward import parse_forward
from services.dit.pool import LocalPool
from tests.dit.conftest import TEXT_DIM, TEXT_LEN, Gate, serve
from tests.dit.slices import job, run

ASSETS = Path(__file__).parents[2] / "assets"
Tensors = dict[str, torch.Tensor]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def small(**changes: torch.Tensor) -> Tensors:
    """What the small random model takes."""
    return {
        "hidden_states": noise(1, 16, 2, 4, 6),
        "encoder_hidden_states": noise(1, 7, TEXT_DIM),
    } | changes


def messages(opening: dit_pb2.ForwardStart, tensors: Tensors) -> Iterator[dit_pb2.ForwardRequest]:
    yield dit_pb2.ForwardRequest(start=opening)
    for name, tensor in tensors.items():
        for part in tensor_parts(name, tensor):
            yield dit_pb2.ForwardRequest(tensor=part)


def start(**changes: Any) -> dit_pb2.ForwardStart:
    return dit_pb2.ForwardStart(**({"component": "transformer", "timestep": 713.5} | changes))


async def call(
    channel: grpc.aio.Channel, requests: Iterator[dit_pb2.ForwardRequest]
) -> tuple[torch.Tensor, dit_pb2.ForwardDone]:
    """The velocity and what closes the answer; nothing may follow that."""
    receiver, velocity, done = TensorReceiver(), None, None
    async for response in dit_pb2_grpc.DitServiceStub(channel).Forward(requests, timeout=60):
        assert done is None
        if response.WhichOneof("response") == "done":
            done = response.done
        elif (payload := receiver.feed(response.tensor)) is not None:
            assert (payload.name, velocity) == ("velocity", None)
            velocity = payload.to_torch()
    assert velocity is not None
    assert done is not None
    return velocity, done


async def failure(
    channel: grpc.aio.Channel, requests: Iterator[dit_pb2.ForwardRequest]
) -> ChituError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(channel, requests)
    return from_rpc_error(raised.value)


@pytest.fixture
async def channel(
    make_config: Callable[..., Config], socket_dir: Path
) -> AsyncIterator[grpc.aio.Channel]:
    async for opened in serve(make_config("one-diffusers"), f"unix:{socket_dir}/dit"):
        yield opened


@pytest.mark.parametrize(
    ("model", "components"),
    [("tiny-wan", ["transformer"]), ("tiny-wan2.2", ["transformer", "transformer_2"])],
)
async def test_velocity_equals_diffusers(
    model: str, components: list[str], socket_dir: Path
) -> None:
    config = configuration.load([f"models={model}", "infer.device=cpu", "infer.num_threads=1"])
    rows, width = config.models.transformer.text_len, config.models.transformer.text_dim
    latents, text = noise(1, 16, 3, 8, 8), noise(1, 11, width)
    padded = torch.cat([text, torch.zeros(1, rows - 11, width)], 1)
    velocities = []
    async for channel in serve(config, f"unix:{socket_dir}/dit"):
        for component in components:
            # Any order of the tensors is right.
            tensors = {"encoder_hidden_states": text, "hidden_states": latents}
            velocity, done = await call(channel, messages(start(component=component), tensors))
            reference = WanTransformer3DModel.from_pretrained(ASSETS / model / component).eval()
            with torch.no_grad():
                expected = reference(latents, torch.tensor([713.5]), padded).sample
            assert velocity.dtype == torch.float32
            assert (velocity - expected).norm() / expected.norm() < 1e-5
            assert (done.attn_type, done.report.device) == ("sdpa", "cpu")
            assert done.report.seconds > 0
            velocities.append(velocity)
    assert len(velocities) == len(components)
    assert len(components) == 1 or not torch.allclose(*velocities, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
async def test_any_float_type(channel: grpc.aio.Channel, dtype: torch.dtype) -> None:
    given = {name: tensor.to(dtype) for name, tensor in small().items()}
    velocity, _ = await call(channel, messages(start(), given))
    exact = {name: tensor.float() for name, tensor in given.items()}
    assert torch.equal(velocity, (await call(channel, messages(start(), exact)))[0])


@pytest.mark.parametrize(
    ("opening", "tensors", "name"),
    [
        ({"timestep": -0.5}, {}, "timestep"),
        ({"timestep": 1000.5}, {}, "timestep"),
        ({"timestep": float("nan")}, {}, "timestep"),
        ({"attn_type": "cosine"}, {}, "attn_type"),
        ({}, {"hidden_states": noise(16, 2, 4, 6)}, "hidden_states"),
        ({}, {"hidden_states": noise(2, 16, 2, 4, 6)}, "hidden_states"),
        ({}, {"hidden_states": noise(1, 4, 2, 4, 6)}, "hidden_states"),
        ({}, {"hidden_states": noise(1, 16, 2, 5, 6)}, "hidden_states"),
        ({}, {"hidden_states": noise(1, 16, 0, 4, 6)}, "hidden_states"),
        ({}, {"hidden_states": torch.ones(1, 16, 2, 4, 6).int()}, "hidden_states"),
        ({}, {"hidden_states": torch.full((1, 16, 2, 4, 6), torch.inf)}, "hidden_states"),
        ({}, {"encoder_hidden_states": noise(7, TEXT_DIM)}, "encoder_hidden_states"),
        ({}, {"encoder_hidden_states": noise(1, 0, TEXT_DIM)}, "encoder_hidden_states"),
        ({}, {"encoder_hidden_states": noise(1, TEXT_LEN + 1, TEXT_DIM)}, "encoder_hidden_states"),
        ({}, {"encoder_hidden_states": noise(1, 7, TEXT_DIM + 1)}, "encoder_hidden_states"),
        ({}, {"prompt_embeds": noise(7, TEXT_DIM)}, "prompt_embeds"),
    ],
)
async def test_invalid_request(
    channel: grpc.aio.Channel, opening: dict[str, Any], tensors: Tensors, name: str
) -> None:
    error = await failure(channel, messages(start(**opening), small(**tensors)))
    assert isinstance(error, InvalidRequestError)
    assert [violation.field for violation in error.violations] == [name]


async def test_order_of_messages(channel: grpc.aio.Channel) -> None:
    whole = list(messages(start(), small()))
    text_missing = list(messages(start(), {"hidden_states": small()["hidden_states"]}))
    for wrong, field in (
        ([], "start"),
        (whole[1:], "start"),
        ([whole[0], whole[0]], "request"),
        (whole[:-1], "tensor"),
        (whole + whole[1:4], "hidden_states"),
        (text_missing, "encoder_hidden_states"),
    ):
        error = await failure(channel, iter(wrong))
        assert isinstance(error, InvalidRequestError)
        assert error.violations[0].field == field


async def test_component_and_kernel_that_are_not_here(channel: grpc.aio.Channel) -> None:
    error = await failure(channel, messages(start(component="transformer_2"), small()))
    assert isinstance(error, NotFoundError)
    assert "'transformer_2': there are transformer" in str(error)
    for kernel, reason in (
        ("flash_attn", "runs on CUDA only"),
        ("sage", "this back end is not built"),
    ):
        error = await failure(channel, messages(start(attn_type=kernel), small()))
        assert isinstance(error, ConfigError)
        assert str(error).startswith(f"attn_type={kernel!r}: {reason}")


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemoryError),
        (RuntimeError("shape mismatch"), ComponentError),
        (None, ComponentError),
    ],
    ids=["memory", "model", "not finite"],
)
async def test_failure_of_the_model(
    channel: grpc.aio.Channel,
    monkeypatch: pytest.MonkeyPatch,
    raised: Exception | None,
    error: type[ChituError],
) -> None:
    def fail(model: Any, latents: torch.Tensor, *rest: Any) -> torch.Tensor:
        if raised is not None:
            raise raised
        return latents * torch.nan

    with monkeypatch.context() as patch:
        patch.setattr(rank_module, "guided_velocity", fail)
        assert isinstance(await failure(channel, messages(start(), small())), error)
    velocity, _ = await call(channel, messages(start(), small()))
    assert torch.isfinite(velocity).all()


async def test_takes_a_turn_between_slices(make_config: Callable[..., Config], gate: Gate) -> None:
    config = make_config("one-diffusers")
    pool = LocalPool(config)
    await pool.load()
    receiver, payloads = TensorReceiver(), {}
    for name, tensor in small().items():
        for part in tensor_parts(name, tensor):
            if (payload := receiver.feed(part)) is not None:
                payloads[name] = payload
    running = asyncio.create_task(run(pool, job("a")))
    await gate.reached(1)
    forward = asyncio.create_task(pool.forward(parse_forward(start(), payloads, config)))
    await asyncio.sleep(0.1)
    assert not forward.done()
    # No answer waits for the rank's thread.
    assert pool.describe().ranks[0].device == "cpu"
    gate.let(6)
    done = await forward
    assert len(gate.entered) == 6
    assert done.report.waited_seconds > 0.09
    assert done.report.seconds > 0
    await running
    await pool.close()


async def test_the_pool_tells_itself_at_any_time(
    make_config: Callable[..., Config], socket_dir: Path
) -> None:
    async for channel in serve(make_config("one-diffusers"), f"unix:{socket_dir}/dit", load=False):
        error = await failure(channel, messages(start(), small()))
        assert isinstance(error, UnavailableError)
        pool = await dit_pb2_grpc.DitServiceStub(channel).GetPool(dit_pb2.GetPoolRequest())
        layout = pool.layout
        assert (layout.cfg_size, layout.ulysses_degree, layout.ring_degree) == (1, 1, 1)
        (rank,) = pool.ranks
        assert (rank.rank, rank.cfg_rank, rank.cp_rank) == (0, 0, 0)
        assert (rank.host, rank.pid) == (socket.gethostname(), os.getpid())
        assert (rank.device, pool.attn_type) == ("cpu", "sdpa")
        assert not pool.HasField("flexcache")

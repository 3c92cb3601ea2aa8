"""A pool as a process: who ends when another one does, and who is let in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chitu_diffusion.config.schema import Config
from chitu_diffusion.v1 import dit_pb2, dit_pb2_grpc, rank_pb2, rank_pb2_grpc
from chitu_diffusion.wire import tensor_parts
from services.dit.ranks.front import RankPool
from tests.dit.conftest import serve
from tests.dit.pools import Faults, faults_in, gone, running
from tests.dit.slices import job
from tests.dit.test_main import command

DIT = "chitu_diffusion.v1.DitService"


def wait_serving(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=DIT), timeout=60, wait_for_ready=True
        )
        for response in watch:
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                watch.cancel()
                return


@contextlib.contextmanager
def a_pool(*overrides: str, parent: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A pool of two ranks as a process, perhaps with a shell as its parent."""
    arguments = command(
        "distributed.world_size=2", "infer.device=cpu", "services.dit.warmup=off", *overrides
    )
    if parent:
        started = (
            "import os, subprocess, sys; subprocess.run(sys.argv[1:], "
            "env={**os.environ, 'CHITU_PARENT_PID': str(os.getpid())})"
        )
        arguments = [sys.executable, "-c", started, *arguments]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        family = set[psutil.Process]()
        with contextlib.suppress(psutil.NoSuchProcess):
            family.update(psutil.Process(process.pid).children(recursive=True))
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.kill()
        process.wait()


def begin_slice(address: str) -> tuple[grpc.Channel, Any]:
    """Start a slice of many steps and wait for the first; the call stays open."""
    channel = grpc.insecure_channel(address)
    order = job(end_step=6)
    order.start.params.num_inference_steps = 1000
    order.start.end_step = 1000

    def requests() -> Iterator[dit_pb2.DenoiseRequest]:
        yield dit_pb2.DenoiseRequest(start=order.start)
        for name, tensor in order.tensors.items():
            for part in tensor_parts(name, tensor):
                yield dit_pb2.DenoiseRequest(tensor=part)

    call = dit_pb2_grpc.DitServiceStub(channel).Denoise(requests())
    assert next(call).HasField("step")
    return channel, call


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("victim", ["front", "parent"])
async def test_kill_9_leaves_no_process(
    checkpoints: dict[str, Path], socket_dir: Path, victim: str, busy: bool
) -> None:
    listen = f"unix:{socket_dir}/dit"
    overrides = [f"models.ckpt_dir={checkpoints['one-original']}", f"services.dit.listen={listen}"]
    with a_pool(*overrides, parent=victim == "parent") as process:
        await asyncio.to_thread(wait_serving, listen)
        family = set(psutil.Process(process.pid).children(recursive=True))
        assert len(family) >= 3, "torchrun and two ranks"
        calls = await asyncio.to_thread(begin_slice, listen) if busy else None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert await gone(family, within_s=10)
        if calls is not None:
            calls[0].close()


async def test_sigterm_ends_front_and_ranks(checkpoints: dict[str, Path], socket_dir: Path) -> None:
    listen = f"unix:{socket_dir}/dit"
    overrides = [f"models.ckpt_dir={checkpoints['one-original']}", f"services.dit.listen={listen}"]
    with a_pool(*overrides) as process:
        await asyncio.to_thread(wait_serving, listen)
        family = set(psutil.Process(process.pid).children(recursive=True))
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0
        assert await gone(family, within_s=1)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["distributed.ulysses_degree=3"], "must divide models.transformer.num_heads=4"),
        (["distributed.world_size=3", "distributed.cfg_size=2"], "must be a multiple of cfg 2"),
        (["infer.device=cuda"], "need as many CUDA devices"),
        (["services.dit.ranks_listen=127.0.0.1:{port}"], "the address is in use"),
    ],
)
def test_starts_that_fail_before_weights_are_read(
    socket_dir: Path, overrides: list[str], words: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [text.format(port=taken.getsockname()[1]) for text in overrides]
        ended = subprocess.run(
            [
                *command("infer.device=cpu", "distributed.world_size=2"),
                "models.ckpt_dir=nowhere",
                f"services.dit.listen=unix:{socket_dir}/dit",
                *given,
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 2
    assert words in ended.stderr.splitlines()[-1]
    assert "nowhere" not in ended.stderr.splitlines()[-1]


@pytest.fixture
def faults(tmp_path: Path) -> Iterator[Faults]:
    with faults_in(tmp_path) as faults:
        yield faults


async def test_answers_within_a_second_whatever_the_ranks_do(
    make_config: Callable[..., Config], socket_dir: Path, faults: Faults
) -> None:
    config = make_config(
        "one-diffusers", "distributed.world_size=2", "services.dit.stall_timeout_s=4"
    )
    slowest, statuses = 0.0, set[int]()
    faults.at(1, 2, "hang")
    async for channel in serve(config, f"unix:{socket_dir}/dit"):
        health = health_pb2_grpc.HealthStub(channel)
        work = [asyncio.create_task(asyncio.to_thread(huge, f"unix:{socket_dir}/dit"))]
        work.append(asyncio.create_task(asyncio.to_thread(stuck, f"unix:{socket_dir}/dit")))
        while not all(task.done() for task in work):
            asked = time.monotonic()
            answer = await health.Check(health_pb2.HealthCheckRequest(service=DIT), timeout=5)
            await dit_pb2_grpc.DitServiceStub(channel).GetPool(dit_pb2.GetPoolRequest(), timeout=5)
            slowest = max(slowest, time.monotonic() - asked)
            statuses.add(answer.status)
            await asyncio.sleep(0.02)
        assert [task.result() for task in work] == [
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.UNAVAILABLE,
        ]
        answer = await health.Check(health_pb2.HealthCheckRequest(service=DIT), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert slowest < 1


def huge(address: str) -> grpc.StatusCode:
    """Send 500 MB that cannot be right."""
    return ended({"prompt_embeds": torch.zeros(500_000_000 // 96, 24)}, address)


def stuck(address: str) -> grpc.StatusCode:
    return ended({}, address)


def ended(changes: dict[str, Any], address: str) -> grpc.StatusCode:
    """How a slice ended."""
    order = job(str(len(changes)))

    def requests() -> Iterator[dit_pb2.DenoiseRequest]:
        yield dit_pb2.DenoiseRequest(start=order.start)
        for name, tensor in ({**order.tensors} | changes).items():
            for part in tensor_parts(name, tensor):
                yield dit_pb2.DenoiseRequest(tensor=part)

    with grpc.insecure_channel(address) as channel:
        try:
            for _ in dit_pb2_grpc.DitServiceStub(channel).Denoise(requests()):
                pass
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


@pytest.fixture
async def reachable(
    make_config: Callable[..., Config], socket_dir: Path
) -> AsyncIterator[tuple[RankPool, str]]:
    """A pool whose ranks' door has a known address."""
    listen = f"unix:{socket_dir}/ranks"
    config = make_config(
        "one-diffusers", "distributed.world_size=2", f"services.dit.ranks_listen={listen}"
    )
    async with running(config) as pool:
        yield pool, listen


async def knock(address: str, secret: str, hello: rank_pb2.Hello) -> grpc.StatusCode:
    async with grpc.aio.insecure_channel(address) as channel:
        call = rank_pb2_grpc.RankServiceStub(channel).Attach(
            iter([rank_pb2.AttachRequest(hello=hello)]),
            metadata=(("authorization", f"Bearer {secret}"),),
        )
        return await call.code()


async def test_strangers_are_not_let_in(
    reachable: tuple[RankPool, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, address = reachable
    secret = pool._crew._secret
    hello = rank_pb2.Hello(rank=0, host="elsewhere", pid=1)
    assert await knock(address, "guessed", hello) == grpc.StatusCode.UNAUTHENTICATED
    assert await knock(address, "", hello) == grpc.StatusCode.UNAUTHENTICATED
    assert await knock(address, secret, hello) == grpc.StatusCode.FAILED_PRECONDITION
    beyond = rank_pb2.Hello(rank=2, host="elsewhere", pid=1)
    assert await knock(address, secret, beyond) == grpc.StatusCode.FAILED_PRECONDITION
    pool.check()

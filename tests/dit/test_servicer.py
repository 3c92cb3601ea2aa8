"""The DiT host over real gRPC on a unix socket."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch

from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import (
    AbortedError,
    ChituError,
    ConfigError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
    from_rpc_error,
)
from chitu_diffusion.v1 import component_pb2, component_pb2_grpc, dit_pb2, dit_pb2_grpc
from chitu_diffusion.wire import TensorReceiver, tensor_parts
from services.dit import denoiser as denoiser_module
from services.dit.attention.sdpa import Sdpa
from services.dit.denoiser import Denoiser, Prompts, make_plan
from services.dit.flexcache import NoCache
from services.dit.guidance import Execution, guided_velocity
from services.dit.parallel import Alone
from services.dit.rank import Rank
from tests.common.moving import check_moving
from tests.dit.conftest import CPU, make_embeds, make_params, serve

POSITIVE, NEGATIVE = make_embeds(1, 9)[0, :9], make_embeds(2, 4)[0, :4]
NOISE = dit_pb2.LATENT_SOURCE_NOISE
HELD = dit_pb2.LATENT_SOURCE_HELD
CHECKPOINT = dit_pb2.LATENT_SOURCE_CHECKPOINT


@pytest.fixture(scope="module")
def sockets() -> Iterator[Path]:
    """As socket_dir, for all tests here."""
    folder = Path(tempfile.mkdtemp(prefix="chitu-test-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
async def channel(
    make_config: Callable[..., Config], sockets: Path
) -> AsyncIterator[grpc.aio.Channel]:
    async for opened in serve(make_config("one-diffusers"), f"unix:{sockets}/one"):
        yield opened


@pytest.fixture(scope="module")
async def two(make_config: Callable[..., Config], sockets: Path) -> AsyncIterator[grpc.aio.Channel]:
    async for opened in serve(make_config("two-original"), f"unix:{sockets}/two"):
        yield opened


def params(**changes: Any) -> dit_pb2.DenoiseParams:
    fields: dict[str, Any] = {
        "num_frames": 5,
        "height": 32,
        "width": 48,
        "num_inference_steps": 6,
        "guidance_scale": 4.0,
        "flow_shift": 3.0,
        "solver": "unipc",
        "seed": 11,
    }
    return dit_pb2.DenoiseParams(**(fields | changes))


def start(**changes: Any) -> dit_pb2.DenoiseStart:
    fields: dict[str, Any] = {
        "task_id": "task",
        "attempt": 1,
        "params": params(),
        "end_step": 6,
        "source": NOISE,
        "return_latents": True,
    }
    return dit_pb2.DenoiseStart(**(fields | changes))


Tensors = dict[str, torch.Tensor]
PROMPTS: Tensors = {"prompt_embeds": POSITIVE, "negative_prompt_embeds": NEGATIVE}


def messages(opening: dit_pb2.DenoiseStart, tensors: Tensors) -> Iterator[dit_pb2.DenoiseRequest]:
    yield dit_pb2.DenoiseRequest(start=opening)
    for name, tensor in tensors.items():
        for part in tensor_parts(name, tensor):
            yield dit_pb2.DenoiseRequest(tensor=part)


@dataclass
class Answer:
    """What a call sent back, put together."""

    kinds: list[str] = field(default_factory=list)
    steps: list[dit_pb2.StepReport] = field(default_factory=list)
    checkpoints: list[tuple[dit_pb2.Checkpoint, Tensors]] = field(default_factory=list)
    tensors: Tensors = field(default_factory=dict)
    done: dit_pb2.DenoiseDone | None = None

    def take(self, response: dit_pb2.DenoiseResponse, receiver: TensorReceiver) -> None:
        kind = str(response.WhichOneof("response"))
        if kind != "tensor":
            assert not receiver.busy
            self.kinds.append(kind)
        if kind == "step":
            self.steps.append(response.step)
        elif kind == "checkpoint":
            self.checkpoints.append((response.checkpoint, {}))
        elif kind == "done":
            self.done = response.done
        elif (payload := receiver.feed(response.tensor)) is not None:
            self.kinds.append(payload.name)
            of_checkpoint = self.checkpoints[-1] if self.checkpoints else None
            missing = of_checkpoint and (
                {"latents", *of_checkpoint[0].solver_state.tensors} - of_checkpoint[1].keys()
            )
            owner = of_checkpoint[1] if of_checkpoint and missing else self.tensors
            owner[payload.name] = payload.to_torch()


async def denoise(
    channel: grpc.aio.Channel, opening: dit_pb2.DenoiseStart, tensors: Tensors | None = None
) -> Answer:
    call = dit_pb2_grpc.DitServiceStub(channel).Denoise(
        messages(opening, PROMPTS if tensors is None else tensors), timeout=60
    )
    answer, receiver = Answer(), TensorReceiver()
    async for response in call:
        answer.take(response, receiver)
    return answer


async def failure(
    channel: grpc.aio.Channel, opening: dit_pb2.DenoiseStart, tensors: Tensors | None = None
) -> ChituError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await denoise(channel, opening, tensors)
    return from_rpc_error(raised.value)


def expected_latents(config: Config, **changes: Any) -> torch.Tensor:
    rank = Rank(config)
    rank.load()
    denoiser, plan = Denoiser(rank.experts, CPU), make_plan(make_params(**changes))
    state = denoiser.from_noise(plan)
    prompts = Prompts(make_embeds(1, 9), make_embeds(2, 4))
    how = Execution(Sdpa(), Alone(), NoCache())
    assert len(list(denoiser.run(state, len(plan.steps), prompts, how, lambda: False))) == 6
    return state.latents


async def test_denoise(channel: grpc.aio.Channel, make_config: Callable[..., Config]) -> None:
    answer = await denoise(channel, start())
    assert answer.kinds == ["step"] * 6 + ["latents", "done"]
    assert torch.equal(answer.tensors["latents"], expected_latents(make_config("one-diffusers")))
    plan = make_plan(make_params())
    for report, planned in zip(answer.steps, plan.steps, strict=True):
        assert (report.step, report.of) == (planned.step, 6)
        assert (report.timestep, report.sigma) == (planned.timestep, planned.sigma)
        assert report.expert == dit_pb2.EXPERT_UNSPECIFIED
        assert not report.reused
        assert report.seconds > 0
        assert report.layout.cfg_size == report.layout.ulysses_degree == 1
    done = answer.done
    assert done is not None
    assert (done.next_step, done.attn_type) == (6, "sdpa")
    assert (done.report.device, done.report.dtype) == ("cpu", "float32")
    assert done.report.seconds >= sum(report.seconds for report in answer.steps)
    assert done.report.peak_memory_bytes > 0


async def test_nothing_is_returned_that_was_not_asked_for(channel: grpc.aio.Channel) -> None:
    answer = await denoise(channel, start(return_latents=False))
    assert answer.kinds == ["step"] * 6 + ["done"]


async def test_two_experts(two: grpc.aio.Channel, make_config: Callable[..., Config]) -> None:
    experts = {"guidance_scale": 3.0, "guidance_scale_high": 5.0, "boundary_ratio": 0.875}
    answer = await denoise(two, start(params=params(**experts)))
    expected = expected_latents(make_config("two-diffusers"), **experts)
    assert torch.equal(answer.tensors["latents"], expected)
    for report in answer.steps:
        high = report.timestep >= 875
        assert report.expert == (dit_pb2.EXPERT_HIGH_NOISE if high else dit_pb2.EXPERT_LOW_NOISE)
    assert len({report.expert for report in answer.steps}) == 2


@pytest.mark.parametrize("solver", ["unipc", "dpm++", "euler"])
async def test_slices_by_held_state_and_by_checkpoint(
    channel: grpc.aio.Channel, solver: str
) -> None:
    common = {"params": params(solver=solver)}
    whole = await denoise(channel, start(**common))
    first = await denoise(
        channel, start(**common, end_step=2, keep_state=True, return_checkpoint=True)
    )
    assert first.done is not None
    assert first.done.next_step == 2
    held = await denoise(channel, start(**common, first_step=2, source=HELD))
    assert torch.equal(held.tensors["latents"], whole.tensors["latents"])
    ((checkpoint, tensors),) = first.checkpoints
    assert checkpoint.step == checkpoint.solver_state.step == 2
    assert set(tensors) == {"latents", *checkpoint.solver_state.tensors}
    assert torch.equal(tensors["latents"], first.tensors["latents"])
    opening = start(**common, first_step=2, source=CHECKPOINT, solver_state=checkpoint.solver_state)
    restored = await denoise(channel, opening, PROMPTS | tensors)
    assert torch.equal(restored.tensors["latents"], whole.tensors["latents"])


async def test_checkpoints_between_steps(channel: grpc.aio.Channel) -> None:
    whole = await denoise(channel, start())
    answer = await denoise(channel, start(checkpoint_interval_s=1e-9))
    assert answer.checkpoints
    checkpoint, tensors = answer.checkpoints[-1]
    opening = start(
        first_step=checkpoint.step, source=CHECKPOINT, solver_state=checkpoint.solver_state
    )
    rest = await denoise(channel, opening, PROMPTS | tensors)
    assert torch.equal(rest.tensors["latents"], whole.tensors["latents"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
async def test_embeddings_of_any_float_type(channel: grpc.aio.Channel, dtype: torch.dtype) -> None:
    rounded = {name: tensor.to(dtype) for name, tensor in PROMPTS.items()}
    widened = {name: tensor.float() for name, tensor in rounded.items()}
    answers = [await denoise(channel, start(), tensors) for tensors in (rounded, widened)]
    assert torch.equal(*(answer.tensors["latents"] for answer in answers))


async def test_without_guidance_one_prompt_is_sent(channel: grpc.aio.Channel) -> None:
    plain = start(params=params(guidance_scale=1.0))
    answer = await denoise(channel, plain, {"prompt_embeds": POSITIVE})
    assert torch.isfinite(answer.tensors["latents"]).all()
    error = await failure(channel, plain)
    assert isinstance(error, InvalidRequestError)
    assert error.violations[0].field == "negative_prompt_embeds"


async def test_plan(channel: grpc.aio.Channel) -> None:
    stub = dit_pb2_grpc.DitServiceStub(channel)
    request = dit_pb2.PlanRequest(params=params(num_inference_steps=50, flow_shift=5.0))
    answer = await stub.Plan(request)
    timesteps = [step.timestep for step in answer.steps]
    assert (timesteps[:4], timesteps[-4:]) == ([999, 995, 991, 987], [302, 241, 172, 92])
    assert [step.step for step in answer.steps] == list(range(50))
    assert (answer.forward_count, answer.exact) == (100, True)
    assert {step.guidance_scale for step in answer.steps} == {4.0}
    assert answer.steps[0].sigma > answer.steps[-1].sigma > 0


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"num_frames": 0}, "params.num_frames"),
    ({"num_frames": 4}, "params.num_frames"),
    ({"num_frames": 40001}, "params.num_frames"),
    ({"height": 24}, "params.height"),
    ({"height": 0}, "params.height"),
    ({"width": -16}, "params.width"),
    ({"height": 16384, "width": 16384}, "params.height"),
    ({"num_inference_steps": 0}, "params.num_inference_steps"),
    ({"num_inference_steps": 1001}, "params.num_inference_steps"),
    ({"guidance_scale": -1.0}, "params.guidance_scale"),
    ({"guidance_scale": float("nan")}, "params.guidance_scale"),
    ({"flow_shift": 0.0}, "params.flow_shift"),
    ({"flow_shift": float("inf")}, "params.flow_shift"),
    ({"solver": "ddim"}, "params.solver"),
    ({"attn_type": "fast"}, "params.attn_type"),
    ({"boundary_ratio": 0.875}, "params.boundary_ratio"),
    ({"guidance_scale_high": 4.0}, "params.guidance_scale_high"),
]


@pytest.mark.parametrize(("changes", "name"), INVALID)
async def test_invalid_parameters(
    channel: grpc.aio.Channel, changes: dict[str, Any], name: str
) -> None:
    stub = dit_pb2_grpc.DitServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Plan(dit_pb2.PlanRequest(params=params(**changes)))
    for error in (
        from_rpc_error(raised.value),
        await failure(channel, start(params=params(**changes))),
    ):
        assert isinstance(error, InvalidRequestError)
        assert name in [violation.field for violation in error.violations]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"guidance_scale_high": 5.0}, "params.boundary_ratio"),
        ({"boundary_ratio": 0.875}, "params.guidance_scale_high"),
        ({"boundary_ratio": 1.5, "guidance_scale_high": 5.0}, "params.boundary_ratio"),
        ({"boundary_ratio": 0.5, "guidance_scale_high": -1.0}, "params.guidance_scale_high"),
    ],
)
async def test_invalid_parameters_of_two_experts(
    two: grpc.aio.Channel, changes: dict[str, Any], name: str
) -> None:
    error = await failure(two, start(params=params(**changes)))
    assert isinstance(error, InvalidRequestError)
    assert [violation.field for violation in error.violations] == [name]


async def test_every_wrong_field_is_named(channel: grpc.aio.Channel) -> None:
    wrong = params(num_frames=2, height=1, solver="", flow_shift=-1)
    error = await failure(channel, start(params=wrong))
    assert {violation.field.removeprefix("params.") for violation in error.violations} == {
        "num_frames",
        "height",
        "solver",
        "flow_shift",
    }


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"task_id": ""}, "task_id"),
        ({"end_step": 0}, "end_step"),
        ({"end_step": 7}, "end_step"),
        ({"first_step": -1}, "first_step"),
        ({"first_step": 6, "source": HELD}, "first_step"),
        ({"first_step": 3, "end_step": 3, "source": HELD}, "end_step"),
        ({"first_step": 1}, "first_step"),
        ({"source": 0}, "source"),
        ({"source": CHECKPOINT}, "solver_state"),
        ({"solver_state": dit_pb2.SolverState()}, "solver_state"),
        ({"checkpoint_interval_s": -1.0}, "checkpoint_interval_s"),
        ({"preview_interval": -1}, "preview_interval"),
        ({"layout": dit_pb2.Layout(cfg_size=1, ring_degree=1)}, "layout.ulysses_degree"),
    ],
)
async def test_invalid_start(channel: grpc.aio.Channel, changes: dict[str, Any], name: str) -> None:
    error = await failure(channel, start(**changes))
    assert isinstance(error, InvalidRequestError)
    assert name in [violation.field for violation in error.violations]


INFINITE = torch.full((3, 24), torch.inf)
LATENTS = torch.zeros(1, 16, 2, 4, 6)
SOLVER: Tensors = {
    "solver.model_output.0": LATENTS,
    "solver.model_output.1": LATENTS,
    "solver.last_sample": LATENTS,
}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"solver": "euler"}, "solver_state.solver"),
        ({"step": 3}, "solver_state.step"),
        ({"tensors": ["solver.last_sample"]}, "solver_state.tensors"),
        ({"tensors": [*SOLVER, "solver.model_output.2"]}, "solver_state.tensors"),
        ({"order": 0}, "solver_state.order"),
        ({"order": 3}, "solver_state.order"),
    ],
)
async def test_invalid_solver_state(
    channel: grpc.aio.Channel, changes: dict[str, Any], name: str
) -> None:
    good: dict[str, Any] = {"solver": "unipc", "step": 2, "order": 2, "tensors": list(SOLVER)}
    opening = start(
        first_step=2, source=CHECKPOINT, solver_state=dit_pb2.SolverState(**(good | changes))
    )
    error = await failure(channel, opening, PROMPTS | {"latents": LATENTS} | SOLVER)
    assert isinstance(error, InvalidRequestError)
    assert [violation.field for violation in error.violations] == [name]


@pytest.mark.parametrize(
    ("changes", "name", "message"),
    [
        ({"negative_prompt_embeds": None}, "negative_prompt_embeds", "missing"),
        ({"latents": LATENTS}, "latents", "unexpected tensor"),
        ({"prompt_embeds": torch.zeros(21, 24)}, "prompt_embeds", r"\[1 to 20, 24\]"),
        ({"prompt_embeds": torch.zeros(0, 24)}, "prompt_embeds", r"\[0, 24\]"),
        ({"prompt_embeds": torch.zeros(3, 25)}, "prompt_embeds", r"\[3, 25\]"),
        ({"prompt_embeds": torch.zeros(1, 3, 24)}, "prompt_embeds", r"\[1, 3, 24\]"),
        ({"prompt_embeds": torch.zeros(3, 24, dtype=torch.int32)}, "prompt_embeds", "int32"),
        ({"prompt_embeds": torch.full((3, 24), torch.nan)}, "prompt_embeds", "not finite"),
        ({"negative_prompt_embeds": INFINITE}, "negative_prompt_embeds", "not finite"),
    ],
)
async def test_invalid_tensors(
    channel: grpc.aio.Channel, changes: dict[str, torch.Tensor | None], name: str, message: str
) -> None:
    tensors = {key: value for key, value in (PROMPTS | changes).items() if value is not None}
    error = await failure(channel, start(), tensors)
    assert isinstance(error, InvalidRequestError)
    assert error.violations[0].field == name
    with pytest.raises(InvalidRequestError, match=message):
        raise error


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("latents", torch.zeros(1, 16, 2, 6, 4)),
        ("latents", LATENTS.double()),
        ("solver.last_sample", torch.full_like(LATENTS, torch.nan)),
        ("solver.model_output.1", LATENTS[0]),
    ],
)
async def test_invalid_checkpoint_tensors(
    channel: grpc.aio.Channel, name: str, tensor: torch.Tensor
) -> None:
    state = dit_pb2.SolverState(solver="unipc", step=2, order=2, tensors=list(SOLVER))
    opening = start(first_step=2, source=CHECKPOINT, solver_state=state)
    tensors = PROMPTS | {"latents": LATENTS} | SOLVER
    assert (await denoise(channel, opening, tensors)).done is not None
    error = await failure(channel, opening, tensors | {name: tensor})
    assert isinstance(error, InvalidRequestError)
    assert error.violations[0].field == name


async def test_order_of_messages(channel: grpc.aio.Channel) -> None:
    stub = dit_pb2_grpc.DitServiceStub(channel)
    whole = list(messages(start(), PROMPTS))
    for wrong, field_name in (
        (whole[1:], "start"),
        ([], "start"),
        ([whole[0], whole[0]], "request"),
        (whole[:-1], "tensor"),
        ([*whole, *whole[1:4]], "prompt_embeds"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in stub.Denoise(iter(wrong), timeout=20):
                pass
        error = from_rpc_error(raised.value)
        assert isinstance(error, InvalidRequestError)
        assert error.violations[0].field == field_name


TWO_BRANCHES = dit_pb2.Layout(cfg_size=2, ulysses_degree=1, ring_degree=1)
TEACACHE = dit_pb2.FlexCacheParams(strategy="teacache")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"preview_interval": 2}, PreconditionError, "preview_interval"),
        ({"layout": TWO_BRANCHES}, PreconditionError, "cfg 2"),
        ({"ranks": [0, 1]}, PreconditionError, "ranks"),
        ({"params": params(flexcache=TEACACHE)}, PreconditionError, "teacache"),
        ({"params": params(attn_type="flash_attn")}, ConfigError, "CUDA only"),
        ({"params": params(attn_type="sparge")}, ConfigError, "not built yet"),
    ],
)
async def test_what_this_pool_does_not_have(
    channel: grpc.aio.Channel, changes: dict[str, Any], error: type[ChituError], words: str
) -> None:
    raised = await failure(channel, start(**changes))
    assert raised.code is grpc.StatusCode.FAILED_PRECONDITION
    with pytest.raises(error, match=words):
        raise raised


async def test_layout_and_kernel_by_name(channel: grpc.aio.Channel) -> None:
    layout = dit_pb2.Layout(cfg_size=1, ulysses_degree=1, ring_degree=1)
    answer = await denoise(
        channel, start(layout=layout, ranks=[0], params=params(attn_type="sdpa"))
    )
    assert answer.done is not None
    assert answer.done.attn_type == "sdpa"


async def test_no_held_state(channel: grpc.aio.Channel) -> None:
    error = await failure(channel, start(task_id="unheld", first_step=2, source=HELD))
    assert isinstance(error, NotFoundError)


async def test_older_attempt(channel: grpc.aio.Channel) -> None:
    await denoise(channel, start(task_id="retried", attempt=2))
    error = await failure(channel, start(task_id="retried", attempt=1))
    assert isinstance(error, AbortedError)


@pytest.mark.parametrize("how", ["cancel", "deadline", "disconnect"])
async def test_a_call_that_ends_early_stops_within_two_steps(
    channel: grpc.aio.Channel,
    monkeypatch: pytest.MonkeyPatch,
    sockets: Path,
    how: str,
) -> None:
    steps: list[int] = []

    def slow(model: Any, latents: Any, step: int, *rest: Any) -> torch.Tensor:
        steps.append(step)
        time.sleep(0.05)
        return guided_velocity(model, latents, step, *rest)

    monkeypatch.setattr(denoiser_module, "guided_velocity", slow)
    opening = start(params=params(num_inference_steps=200), end_step=200, keep_state=True)
    other = grpc.aio.insecure_channel(f"unix:{sockets}/one") if how == "disconnect" else channel
    timeout = 0.5 if how == "deadline" else 60
    call = dit_pb2_grpc.DitServiceStub(other).Denoise(messages(opening, PROMPTS), timeout=timeout)
    with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        async for response in call:
            if response.step.step == 2 and how != "deadline":
                await (other.close(grace=0) if how == "disconnect" else asyncio.sleep(0))
                call.cancel()
    seen = len(steps)
    assert 0 < seen < 20
    await asyncio.sleep(0.4)
    assert len(steps) <= seen + 2
    monkeypatch.setattr(denoiser_module, "guided_velocity", guided_velocity)
    assert (await denoise(channel, start(task_id="next"))).done is not None


async def test_components(channel: grpc.aio.Channel, make_config: Callable[..., Config]) -> None:
    stub = component_pb2_grpc.ComponentServiceStub(channel)
    answer = await stub.GetComponents(component_pb2.GetComponentsRequest())
    (component,) = answer.components
    assert (component.name, component.model) == ("transformer", "tiny-wan")
    assert component.state == component_pb2.COMPONENT_STATE_READY
    assert component.parameter_count > 0
    assert answer.memory[0].process == "dit rank 0"
    assert answer.version
    await check_moving(channel, "transformer", "transformer_2")


async def test_before_loading(make_config: Callable[..., Config], socket_dir: Path) -> None:
    async for channel in serve(make_config("one-diffusers"), f"unix:{socket_dir}/dit", False):
        assert isinstance(await failure(channel, start()), UnavailableError)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await dit_pb2_grpc.DitServiceStub(channel).Plan(dit_pb2.PlanRequest(params=params()))
        assert isinstance(from_rpc_error(raised.value), UnavailableError)
        answer = await component_pb2_grpc.ComponentServiceStub(channel).GetComponents(
            component_pb2.GetComponentsRequest()
        )
        assert answer.components[0].state == component_pb2.COMPONENT_STATE_LOADING

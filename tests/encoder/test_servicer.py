from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import torch
from transformers import UMT5EncoderModel

from chitu_diffusion import config
from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    InvalidRequestError,
    OutOfMemoryError,
    UnavailableError,
    from_rpc_error,
)
from chitu_diffusion.rpc.channel import dial
from chitu_diffusion.rpc.server import Server
from chitu_diffusion.v1 import component_pb2, component_pb2_grpc, encoder_pb2, encoder_pb2_grpc
from chitu_diffusion.wire import TensorReceiver
from services.encoder import host as host_module
from services.encoder import umt5
from services.encoder.host import EncoderHost
from services.encoder.prompt import PromptTokenizer
from tests.common.moving import check_moving
from tests.encoder.conftest import TEXT_DIM, TEXT_LEN

TextInput, TokenIds = encoder_pb2.TextInput, encoder_pb2.TokenIds


def ids_input(*ids: int) -> encoder_pb2.TextInput:
    return TextInput(token_ids=TokenIds(ids=ids))


async def encode(
    channel: grpc.aio.Channel, *inputs: encoder_pb2.TextInput, ids: bool = False
) -> list[encoder_pb2.EncodeResponse]:
    stub = encoder_pb2_grpc.EncoderServiceStub(channel)
    request = encoder_pb2.EncodeRequest(inputs=inputs, return_token_ids=ids)
    return [response async for response in stub.Encode(request, timeout=30)]


async def refusal(channel: grpc.aio.Channel, *inputs: encoder_pb2.TextInput) -> InvalidRequestError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await encode(channel, *inputs)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidRequestError)
    return error


def results(
    responses: list[encoder_pb2.EncodeResponse],
) -> list[tuple[encoder_pb2.EncodedPrompt, torch.Tensor]]:
    """Facts and rows of each input, in the order they came."""
    receiver, facts, rows = TensorReceiver(), [], []
    for response in responses:
        kind = response.WhichOneof("response")
        if kind == "prompt":
            assert not receiver.busy
            facts.append(response.prompt)
        elif kind == "tensor" and (payload := receiver.feed(response.tensor)):
            assert payload.name == "prompt_embeds"
            rows.append(payload.to_torch())
            assert len(rows) == len(facts)
    return list(zip(facts, rows, strict=True))


async def test_order_of_messages(channel: grpc.aio.Channel) -> None:
    responses = await encode(channel, TextInput(text="red"), ids_input(5, 6, 1))
    kinds = [
        response.tensor.WhichOneof("part") or response.WhichOneof("response")
        for response in responses
    ]
    assert kinds == ["prompt", "header", "chunk", "end"] * 2 + ["report"]
    report = responses[-1].report
    assert (report.device, report.dtype) == ("cpu", "float32")
    assert report.seconds > 0
    assert report.waited_seconds >= 0
    assert report.peak_memory_bytes > 10 << 20


async def test_several_inputs(
    channel: grpc.aio.Channel, ckpt_dir: Path, reference: UMT5EncoderModel
) -> None:
    texts = ["a red circle", "", "cat " * 5000, "cat &amp;amp;  &amp; cat"]
    responses = await encode(
        channel, *(TextInput(text=text) for text in texts), ids_input(9, 8, 1), ids=True
    )
    tokenizer = PromptTokenizer(ckpt_dir, TEXT_LEN)
    prompts = [tokenizer(text) for text in texts]
    expected = [(p.token_count, len(p.ids), p.truncated, p.ids) for p in prompts]
    expected.append((3, 3, False, [9, 8, 1]))
    for index, (facts, rows) in enumerate(results(responses)):
        assert facts.index == index
        assert not facts.cached
        ids = list(facts.token_ids)
        assert (facts.token_count, facts.length, facts.truncated, ids) == expected[index]
        assert rows.shape == (facts.length, TEXT_DIM)
        with torch.no_grad():
            reference_rows = reference(torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(rows, reference_rows, atol=1e-5, rtol=0)
    assert expected[1][:3] == (1, 1, False)
    assert expected[2][:3] == (5001, TEXT_LEN, True)


@pytest.mark.parametrize("content", [TEXT_LEN - 2, TEXT_LEN - 1, TEXT_LEN])
async def test_around_the_text_length(channel: grpc.aio.Channel, content: int) -> None:
    responses = await encode(channel, TextInput(text="cat " * content))
    ((facts, rows),) = results(responses)
    assert facts.token_count == content + 1
    assert facts.truncated is (content >= TEXT_LEN)
    assert facts.length == len(rows) == min(content + 1, TEXT_LEN)
    assert not facts.token_ids


async def test_most_inputs_and_longest_text(channel: grpc.aio.Channel) -> None:
    inputs = [TextInput(text="a" * 100_000), *(TextInput(text=str(i)) for i in range(63))]
    assert len(results(await encode(channel, *inputs))) == 64


async def test_number_of_inputs(channel: grpc.aio.Channel) -> None:
    assert "0 inputs: must be 1 to 64" in str(await refusal(channel))
    assert "65 inputs" in str(await refusal(channel, *[TextInput(text="x")] * 65))


async def test_every_wrong_input_is_named(channel: grpc.aio.Channel, ckpt_dir: Path) -> None:
    vocab = UMT5EncoderModel.from_pretrained(ckpt_dir / "text_encoder").config.vocab_size
    error = await refusal(
        channel,
        TextInput(text="fine"),
        TextInput(),
        TextInput(text="é" * 100_001),
        ids_input(5, vocab, 1),
        ids_input(-1),
        ids_input(),
        ids_input(*[5] * (TEXT_LEN + 1)),
        ids_input(0, vocab - 1),
    )
    assert [(v.field, v.message) for v in error.violations] == [
        ("inputs[1]", "is empty: must be text or token_ids"),
        ("inputs[2].text", "100001 characters: at most 100000"),
        ("inputs[3].token_ids.ids[1]", f"{vocab}: must be 0 to {vocab - 1}"),
        ("inputs[4].token_ids.ids[0]", f"-1: must be 0 to {vocab - 1}"),
        ("inputs[5].token_ids", f"0 ids: must be 1 to {TEXT_LEN}"),
        ("inputs[6].token_ids", f"{TEXT_LEN + 1} ids: must be 1 to {TEXT_LEN}"),
    ]


async def test_concurrent_calls_equal_serial_ones(channel: grpc.aio.Channel) -> None:
    texts = [f"{'red cat ' * (index % 12)}{index}" for index in range(32)]

    async def rows_of(text: str) -> torch.Tensor:
        return results(await encode(channel, TextInput(text=text)))[0][1]

    serial = [await rows_of(text) for text in texts]
    together = await asyncio.gather(*(rows_of(text) for text in texts))
    assert all(torch.equal(one, other) for one, other in zip(serial, together, strict=True))


async def test_components(channel: grpc.aio.Channel, reference: UMT5EncoderModel) -> None:
    stub = component_pb2_grpc.ComponentServiceStub(channel)
    answer = await stub.GetComponents(component_pb2.GetComponentsRequest())
    (component,) = answer.components
    count = sum(parameter.numel() for parameter in reference.parameters())
    assert (component.name, component.model) == ("text_encoder", "tiny-wan")
    assert component.state == component_pb2.COMPONENT_STATE_READY
    assert (component.device, component.dtype) == ("cpu", "float32")
    assert (component.parameter_count, component.weight_bytes) == (count, 4 * count)
    assert answer.memory[0].process == "encoder"
    assert answer.memory[0].rss_bytes > 10 << 20
    assert answer.version


async def test_moving(channel: grpc.aio.Channel) -> None:
    await check_moving(channel, "text_encoder", "vae")


async def move(channel: grpc.aio.Channel, target: str) -> component_pb2.Component:
    stub = component_pb2_grpc.ComponentServiceStub(channel)
    request = component_pb2.MoveComponentRequest(name="text_encoder", target=target)
    return (await stub.MoveComponent(request, timeout=30)).component


@pytest.fixture
async def served(
    settings: Config, tmp_path: Path
) -> AsyncIterator[tuple[EncoderHost, grpc.aio.Channel]]:
    """A loaded host that takes "device" for an accelerator."""
    host = EncoderHost(settings)
    server = Server(host, f"unix:{tmp_path}/served.sock")
    await server.start()
    await server.load()
    host.device = torch.device("cuda", 0)
    async with dial(server.address) as channel:
        yield host, channel
    await server.stop(0)


async def test_a_move_waits_for_the_text_in_work(
    served: tuple[EncoderHost, grpc.aio.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, channel = served
    begun, go_on = threading.Event(), threading.Event()
    order: list[str] = []
    compute = host.model().model.encode

    def held(ids: list[list[int]]) -> list[torch.Tensor]:
        begun.set()
        assert go_on.wait(20)
        order.append("encoded")
        return compute(ids)

    monkeypatch.setattr(host.model().model, "encode", held)
    monkeypatch.setattr(umt5, "move_module", lambda module, device: order.append(str(device)))
    encoding = asyncio.create_task(encode(channel, TextInput(text="red")))
    assert await asyncio.to_thread(begun.wait, 20)
    moving = asyncio.create_task(move(channel, "device"))
    await asyncio.sleep(0.1)
    assert not moving.done()
    assert host.components()[0].device == "cpu"
    go_on.set()
    assert results(await encoding)
    assert (await moving).device == host.components()[0].device == "cuda:0"
    assert order == ["encoded", "cuda:0"]
    assert (await move(channel, "cpu")).device == "cpu"


async def test_what_does_not_fit_stays_and_works(
    served: tuple[EncoderHost, grpc.aio.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, channel = served
    ((_, before),) = results(await encode(channel, TextInput(text="red")))

    def full(module: torch.nn.Module, device: torch.device) -> None:
        raise OutOfMemoryError(f"no room on {device}")

    monkeypatch.setattr(umt5, "move_module", full)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await move(channel, "device")
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(from_rpc_error(caught.value), OutOfMemoryError)
    assert host.components()[0].device == "cpu"
    ((_, after),) = results(await encode(channel, TextInput(text="red")))
    assert torch.equal(before, after)


@pytest.mark.parametrize(("level", "home"), [(0, "cuda:0"), (1, "cuda:0"), (2, "cpu"), (3, "cpu")])
def test_home_at_each_level_of_low_memory(
    level: int, home: str, ckpt_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    asked: list[tuple[str, torch.dtype]] = []
    monkeypatch.setattr(
        host_module,
        "load_worker",
        lambda config, device, dtype: asked.append((str(device), dtype)),
    )
    host = EncoderHost(
        config.load(
            [
                f"models.ckpt_dir={ckpt_dir}",
                "infer.device=cuda",
                f"infer.diffusion.low_mem_level={level}",
            ]
        )
    )
    assert host.components()[0].device == home, "told while it loads"
    host.read()
    host.worker.shutdown()
    # The type is that of the device it was configured for, wherever it lives.
    assert asked == [(home, torch.bfloat16)]
    assert host.device == torch.device("cuda", 0)


async def test_unavailable_until_loaded_and_while_draining(
    settings: Config, tmp_path: Path
) -> None:
    host = EncoderHost(settings)
    server = Server(host, f"unix:{tmp_path}/loading.sock")
    await server.start()
    async with dial(server.address) as channel:

        async def state() -> int:
            stub = component_pb2_grpc.ComponentServiceStub(channel)
            answer = await stub.GetComponents(component_pb2.GetComponentsRequest())
            return answer.components[0].state

        async def check_refused() -> None:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await encode(channel, TextInput(text="x"))
            assert isinstance(from_rpc_error(caught.value), UnavailableError)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await move(channel, "cpu")
            assert isinstance(from_rpc_error(caught.value), UnavailableError)

        assert await state() == component_pb2.COMPONENT_STATE_LOADING
        await check_refused()
        await server.load()
        assert await state() == component_pb2.COMPONENT_STATE_READY
        assert results(await encode(channel, TextInput(text="x")))
        await host.drain()
        assert await state() == component_pb2.COMPONENT_STATE_DRAINING
        await check_refused()
    await server.stop(0)


async def load_error(settings: Config, *overrides: str) -> tuple[EncoderHost, Exception]:
    base = [
        f"models.ckpt_dir={settings.models.ckpt_dir}",
        f"models.transformer.text_len={TEXT_LEN}",
        f"models.transformer.text_dim={TEXT_DIM}",
        "infer.device=cpu",
    ]
    host = EncoderHost(config.load([*base, *overrides]))
    with pytest.raises(Exception) as caught:  # noqa: PT011
        await host.load()
    await host.close()
    return host, caught.value


async def test_failed_load_is_reported(settings: Config, tmp_path: Path) -> None:
    host, error = await load_error(settings, f"models.ckpt_dir={tmp_path}")
    assert isinstance(error, CheckpointNotFoundError)
    component = host.components()[0]
    assert component.state == component_pb2.COMPONENT_STATE_FAILED
    assert str(tmp_path) in component.detail


async def test_checkpoint_without_weights_or_of_another_width(settings: Config) -> None:
    _, error = await load_error(settings, "models.ckpt_dir=null")
    assert isinstance(error, ConfigError)
    _, error = await load_error(settings, "models.transformer.text_dim=64")
    assert isinstance(error, CheckpointError)
    assert "rows of 32 values, models.transformer.text_dim=64" in str(error)


async def test_tokenizer_larger_than_the_vocabulary(
    settings: Config, ckpt_dir: Path, tmp_path: Path
) -> None:
    from .conftest import save_text_encoder

    shutil.copytree(ckpt_dir / "tokenizer", tmp_path / "tokenizer")
    save_text_encoder(tmp_path / "text_encoder", 10)
    _, error = await load_error(settings, f"models.ckpt_dir={tmp_path}")
    assert isinstance(error, CheckpointError)
    assert "the text encoder takes 10" in str(error)

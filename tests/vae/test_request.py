from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import numpy as np
import pytest
import torch

from chitu_diffusion.config.schema import LimitsConfig
from chitu_diffusion.errors import DataLossError, InvalidRequestError
from chitu_diffusion.v1 import tensor_pb2, vae_pb2
from services.vae.request import LatentRules, check_header, read_request
from tests.vae.conftest import make_latents, requests

RULES = LatentRules(
    channels=16,
    spatial_stride=8,
    temporal_stride=4,
    limits=LimitsConfig(max_num_frames=17, max_pixels=64 * 64, max_pixel_frames=64 * 64 * 9),
)
Read = tuple[vae_pb2.DecodeStart, torch.Tensor]


async def read(messages: Iterable[vae_pb2.DecodeRequest]) -> Read:
    async def stream() -> AsyncIterator[vae_pb2.DecodeRequest]:
        for message in messages:
            yield message

    return await read_request(stream(), RULES)


async def refusal(messages: Iterable[vae_pb2.DecodeRequest]) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        await read(messages)
    assert caught.value.violations
    return str(caught.value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2]
)
async def test_any_float_type_becomes_float32(dtype: torch.dtype) -> None:
    latents = make_latents(2).to(dtype)
    start, received = await read(requests(latents, metadata={"a": "b"}))
    assert (start.output_format, start.fps, dict(start.metadata)) == ("mp4", 16, {"a": "b"})
    assert received.dtype == torch.float32
    assert torch.equal(received, latents.float())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
async def test_values_must_be_finite(value: float) -> None:
    latents = make_latents(1).double()
    latents[0, 3, 0, 1, 1] = value
    assert await refusal(requests(latents)) == "latents: 1 values are not finite"


@pytest.mark.parametrize("output_format", ["", "MP4", "gif", "webm"])
async def test_unknown_format(output_format: str) -> None:
    text = await refusal(requests(make_latents(1), output_format))
    assert f"start.output_format: {output_format!r}: must be one of 'mp4', 'tensor'" in text


@pytest.mark.parametrize("fps", [0, -1, 121])
async def test_fps_outside_its_range(fps: int) -> None:
    text = await refusal(requests(make_latents(1), fps=fps))
    assert text == f"start.fps: {fps}: must be 1 to 120"


@pytest.mark.parametrize("fps", [1, 120])
async def test_fps_at_its_limits(fps: int) -> None:
    start, _ = await read(requests(make_latents(1), fps=fps))
    assert start.fps == fps


async def test_all_problems_of_the_start_are_named() -> None:
    text = await refusal(requests(None, "gif", 0, {"": "x", "key": "nul\0"}))
    for part in ("output_format", "start.fps", "metadata['']", "metadata['key']"):
        assert part in text


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((16, 1, 4, 4), "must be (1, channels"),
        ((2, 16, 1, 4, 4), "must be (1, channels"),
        ((1, 16, 0, 4, 4), "each >= 1"),
        ((1, 4, 1, 4, 4), "4 channels, the model has 16"),
        ((1, 16, 6, 4, 4), "21 frames: at most 17"),
        ((1, 16, 1, 8, 9), "4608 pixels a frame: at most 4096"),
        ((1, 16, 4, 8, 8), "53248 pixels in all: at most 36864"),
    ],
)
async def test_shapes(shape: tuple[int, ...], message: str) -> None:
    assert message in await refusal(requests(torch.zeros(shape)))


async def test_a_huge_tensor_is_refused_at_its_header() -> None:
    size = 1 << 40
    header = tensor_pb2.TensorHeader(
        name="latents",
        data_type=tensor_pb2.DATA_TYPE_FLOAT32,
        shape=(1, 16, 1, size, 1),
        byte_size=64 * size,
    )
    with pytest.raises(InvalidRequestError, match="pixels a frame"):
        check_header(header, RULES)


async def test_integers_are_refused() -> None:
    latents = torch.zeros(1, 16, 1, 4, 4, dtype=torch.int32)
    assert "DATA_TYPE_INT32: must be a floating-point type" in await refusal(requests(latents))


async def test_another_name_is_refused() -> None:
    assert "'noise': only 'latents' is taken" in await refusal(
        requests(make_latents(1), name="noise")
    )


async def test_messages_missing_or_out_of_order() -> None:
    whole = list(requests(make_latents(1)))
    assert "start: missing" in await refusal([])
    assert "latents: missing or incomplete" in await refusal(whole[:1])
    assert "latents: missing or incomplete" in await refusal(whole[:-1])
    assert "tensor: must be start once" in await refusal(whole[1:])
    assert "start: must be start once" in await refusal([whole[0], *whole])
    assert "None: must be start once" in await refusal([whole[0], vae_pb2.DecodeRequest()])
    assert "only 'latents' is taken, once" in await refusal([*whole, *whole[1:]])


async def test_a_damaged_tensor_is_data_loss() -> None:
    whole = list(requests(make_latents(1)))
    whole[-1].tensor.end.crc32c ^= 1
    with pytest.raises(DataLossError):
        await read(whole)

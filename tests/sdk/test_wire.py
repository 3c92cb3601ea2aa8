import math

import google_crc32c
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chitu_diffusion.errors import DataLossError, InvalidRequestError
from chitu_diffusion.v1 import tensor_pb2
from chitu_diffusion.wire import CHUNK_BYTES, Payload, TensorReceiver, tensor_parts

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def transfer(tensor) -> Payload:
    receiver = TensorReceiver()
    finished = []
    for part in tensor_parts("x", tensor):
        # Through the bytes that travel, not only through the objects.
        payload = receiver.feed(tensor_pb2.TensorPart.FromString(part.SerializeToString()))
        finished += [payload] if payload is not None else []
    assert len(finished) == 1
    assert not receiver.busy
    return finished[0]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(
            a.contiguous().reshape(-1).view(torch.uint8),
            b.contiguous().reshape(-1).view(torch.uint8),
        )
    )


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), max_size=5),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_tensor_arrives_bit_for_bit(dtype, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        raw = raw % 2
    tensor = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    assert same(transfer(tensor).to_torch(), tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12.0)[::3],
        torch.flip(torch.arange(5), (0,)),
        torch.ones(2, 3, requires_grad=True),
        torch.ones(4).expand(3, 4),
    ],
    ids=["scalar", "empty", "transposed", "strided", "flipped", "requires_grad", "expanded"],
)
def test_any_layout_arrives(tensor):
    assert same(transfer(tensor).to_torch(), tensor.detach())


@pytest.mark.parametrize(
    "array", [np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::-1], np.float64(2.0), np.zeros((0,))]
)
def test_numpy_arrays_arrive(array):
    payload = transfer(array)
    np.testing.assert_array_equal(payload.to_numpy(), array)
    assert payload.to_numpy().dtype == array.dtype


def test_a_payload_is_passed_on_unchanged():
    tensor = torch.randn(7, 3).bfloat16()
    assert same(transfer(transfer(tensor)).to_torch(), tensor)


def test_bfloat16_is_not_widened_for_numpy():
    with pytest.raises(TypeError, match="bfloat16"):
        transfer(torch.ones(2).bfloat16()).to_numpy()


def test_chunks_are_one_mebibyte_and_the_checksum_is_crc32c():
    tensor = torch.arange(CHUNK_BYTES // 4 * 2 + 5, dtype=torch.int32)
    parts = list(tensor_parts("x", tensor))
    sizes = [len(p.chunk.data) for p in parts if p.HasField("chunk")]
    assert sizes == [CHUNK_BYTES, CHUNK_BYTES, 20]
    assert [p.chunk.offset for p in parts if p.HasField("chunk")] == [
        0,
        CHUNK_BYTES,
        2 * CHUNK_BYTES,
    ]
    assert parts[-1].end.crc32c == google_crc32c.value(tensor.numpy().tobytes())
    assert max(p.ByteSize() for p in parts) < 4 << 20


def header(**fields) -> tensor_pb2.TensorPart:
    values = {"name": "x", "data_type": tensor_pb2.DATA_TYPE_FLOAT32, "shape": [2], "byte_size": 8}
    return tensor_pb2.TensorPart(header=tensor_pb2.TensorHeader(**{**values, **fields}))


def chunk(offset: int, data: bytes) -> tensor_pb2.TensorPart:
    return tensor_pb2.TensorPart(chunk=tensor_pb2.TensorChunk(offset=offset, data=data))


def end(data: bytes) -> tensor_pb2.TensorPart:
    return tensor_pb2.TensorPart(end=tensor_pb2.TensorEnd(crc32c=google_crc32c.value(data)))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([header(byte_size=9)], "byte_size 9: shape and type give 8"),
        ([header(shape=[-1, -2], byte_size=8)], "each >= 0"),
        ([header(shape=[1] * 9, byte_size=4)], "at most 8 sizes"),
        ([header(data_type=0)], "data_type 0: unknown"),
        ([header(data_type=99)], "data_type 99: unknown"),
        ([header(shape=[1 << 40], byte_size=4 << 40)], "at most"),
        ([header(), header()], "before the end"),
        ([chunk(0, b"1234")], "before a header"),
        ([end(b"")], "before a header"),
        ([header(), chunk(4, b"1234")], "expected offset 0"),
        ([header(), chunk(0, b"123456789")], "at most 8 bytes"),
        ([header(), chunk(0, b"")], "chunk of 0 bytes"),
        ([header(), chunk(0, b"1234"), end(b"1234")], "ends after 4 of 8"),
        ([tensor_pb2.TensorPart()], "part is empty"),
    ],
)
def test_a_broken_stream_is_refused(parts, message):
    receiver = TensorReceiver()
    for part in parts[:-1]:
        receiver.feed(part)
    with pytest.raises(InvalidRequestError, match=message):
        receiver.feed(parts[-1])


def test_a_damaged_byte_is_noticed():
    receiver = TensorReceiver()
    receiver.feed(header())
    receiver.feed(chunk(0, b"12345678"))
    with pytest.raises(DataLossError, match=r"'x'.*does not match"):
        receiver.feed(end(b"12345679"))


def test_an_unknown_element_type_is_named():
    with pytest.raises(InvalidRequestError, match="complex64"):
        list(tensor_parts("x", torch.zeros(1, dtype=torch.complex64)))

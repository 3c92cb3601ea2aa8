"""Tensors as streams of parts, and back (the rules are in protos/chitu_diffusion/v1/tensor.proto).

`tensor_parts` cuts a tensor into messages, `TensorReceiver` puts them together again. A `Payload`
is a tensor as bytes: a process without torch or numpy can hold it and pass it on. torch and numpy
are imported only by the calls that make or take their tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import google_crc32c

from chitu_diffusion.errors import DataLossError, InvalidRequestError
from chitu_diffusion.v1 import tensor_pb2

if TYPE_CHECKING:
    import numpy as np
    import torch

CHUNK_BYTES = 1 << 20
MAX_CHUNK_BYTES = 2 << 20
MAX_DIMS = 8
MAX_TENSOR_BYTES = 4 << 30
"""Refuse to allocate more than this for one tensor, whatever a header claims."""

DataType: TypeAlias = tensor_pb2.DataType

# torch's name of each element type; numpy has the same names but for the types it lacks.
_TYPE_NAMES: dict[int, tuple[str, int]] = {
    tensor_pb2.DATA_TYPE_BOOL: ("bool", 1),
    tensor_pb2.DATA_TYPE_UINT8: ("uint8", 1),
    tensor_pb2.DATA_TYPE_INT8: ("int8", 1),
    tensor_pb2.DATA_TYPE_INT32: ("int32", 4),
    tensor_pb2.DATA_TYPE_INT64: ("int64", 8),
    tensor_pb2.DATA_TYPE_FLOAT16: ("float16", 2),
    tensor_pb2.DATA_TYPE_BFLOAT16: ("bfloat16", 2),
    tensor_pb2.DATA_TYPE_FLOAT32: ("float32", 4),
    tensor_pb2.DATA_TYPE_FLOAT64: ("float64", 8),
    tensor_pb2.DATA_TYPE_FLOAT8_E4M3FN: ("float8_e4m3fn", 1),
    tensor_pb2.DATA_TYPE_FLOAT8_E5M2: ("float8_e5m2", 1),
}
_TYPE_CODES = {name: code for code, (name, _) in _TYPE_NAMES.items()}


@dataclass(frozen=True)
class Payload:
    """A tensor as bytes: row-major, little-endian."""

    name: str
    data_type: int
    """A `tensor_pb2.DataType`."""
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview

    @property
    def dtype_name(self) -> str:
        """`float32`, `bfloat16`, ..."""
        return _TYPE_NAMES[self.data_type][0]

    def to_torch(self) -> torch.Tensor:
        """The tensor, sharing this payload's memory."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype_name)
        if not len(self.data):
            return torch.empty(self.shape, dtype=dtype)
        data = self.data if isinstance(self.data, bytearray) else bytearray(self.data)
        return torch.frombuffer(data, dtype=dtype).reshape(self.shape)

    def to_numpy(self) -> np.ndarray[Any, Any]:
        """The array, sharing this payload's memory.

        Raises:
            TypeError: numpy has no such element type (bfloat16, float8).
        """
        import numpy as np

        return np.frombuffer(self.data, dtype=np.dtype(self.dtype_name)).reshape(self.shape)


def payload_of(name: str, tensor: torch.Tensor | np.ndarray[Any, Any] | Payload) -> Payload:
    """A tensor's bytes under `name`. Contiguous CPU tensors are not copied."""
    if isinstance(tensor, Payload):
        return Payload(name, tensor.data_type, tensor.shape, tensor.data)
    if type(tensor).__module__.partition(".")[0] == "torch":
        return _payload_of_torch(name, tensor)
    import numpy as np

    array = np.ascontiguousarray(tensor)
    code = _type_code(name, str(array.dtype))
    shape = tuple(np.shape(tensor))  # ascontiguousarray makes scalars one-dimensional
    return Payload(name, code, shape, array.reshape(-1).view(np.uint8).data)


def _payload_of_torch(name: str, tensor: Any) -> Payload:
    import torch

    code = _type_code(name, str(tensor.dtype).removeprefix("torch."))
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return Payload(name, code, tuple(tensor.shape), flat.numpy().data)


def _type_code(name: str, dtype: str) -> int:
    try:
        return _TYPE_CODES[dtype]
    except KeyError:
        known = ", ".join(_TYPE_CODES)
        raise InvalidRequestError.of(
            name, f"element type {dtype}: must be one of {known}"
        ) from None


def tensor_parts(
    name: str, tensor: torch.Tensor | np.ndarray[Any, Any] | Payload
) -> Iterator[tensor_pb2.TensorPart]:
    """Header, chunks and end of a tensor, made one at a time."""
    payload = payload_of(name, tensor)
    data = memoryview(payload.data)
    yield tensor_pb2.TensorPart(
        header=tensor_pb2.TensorHeader(
            name=name,
            data_type=payload.data_type,  # type: ignore[arg-type]
            shape=payload.shape,
            byte_size=len(data),
        )
    )
    crc = 0
    for offset in range(0, len(data), CHUNK_BYTES):
        chunk = bytes(data[offset : offset + CHUNK_BYTES])
        crc = google_crc32c.extend(crc, chunk)
        yield tensor_pb2.TensorPart(chunk=tensor_pb2.TensorChunk(offset=offset, data=chunk))
    yield tensor_pb2.TensorPart(end=tensor_pb2.TensorEnd(crc32c=crc))


class TensorReceiver:
    """Puts parts together. One receiver serves one direction of one stream, tensor after tensor."""

    def __init__(self, max_bytes: int = MAX_TENSOR_BYTES) -> None:
        self._max_bytes = max_bytes
        self._header: tensor_pb2.TensorHeader | None = None
        self._data = bytearray()
        self._received = 0
        self._crc = 0

    @property
    def busy(self) -> bool:
        """Whether a tensor has begun and not ended."""
        return self._header is not None

    def feed(self, part: tensor_pb2.TensorPart) -> Payload | None:
        """Take the next part; the whole tensor when this was its end, else None.

        Raises:
            InvalidRequestError: parts out of order, or a header that does not add up.
            DataLossError: the checksum does not match.
        """
        kind = part.WhichOneof("part")
        if kind == "header":
            self._begin(part.header)
        elif kind == "chunk":
            self._append(part.chunk)
        elif kind == "end":
            return self._finish(part.end)
        else:
            raise InvalidRequestError.of("tensor", "part is empty: must be header, chunk or end")
        return None

    def _begin(self, header: tensor_pb2.TensorHeader) -> None:
        field = f"tensor {header.name!r}"
        if self._header is not None:
            raise InvalidRequestError.of(
                field, f"begins before the end of tensor {self._header.name!r}"
            )
        if header.data_type not in _TYPE_NAMES:
            raise InvalidRequestError.of(field, f"data_type {header.data_type}: unknown")
        if len(header.shape) > MAX_DIMS or any(size < 0 for size in header.shape):
            raise InvalidRequestError.of(
                field, f"shape {list(header.shape)}: at most {MAX_DIMS} sizes, each >= 0"
            )
        expected = math.prod(header.shape) * _TYPE_NAMES[header.data_type][1]
        if header.byte_size != expected:
            raise InvalidRequestError.of(
                field, f"byte_size {header.byte_size}: shape and type give {expected}"
            )
        if expected > self._max_bytes:
            raise InvalidRequestError.of(
                field, f"byte_size {expected}: at most {self._max_bytes} are taken"
            )
        self._header = header
        self._data = bytearray(expected)
        self._received = self._crc = 0

    def _append(self, chunk: tensor_pb2.TensorChunk) -> None:
        header = self._opened("chunk")
        data = chunk.data
        end = self._received + len(data)
        if chunk.offset != self._received or end > header.byte_size or not data:
            raise InvalidRequestError.of(
                f"tensor {header.name!r}",
                f"chunk of {len(data)} bytes at offset {chunk.offset}: "
                f"expected offset {self._received} and at most {header.byte_size} bytes in all",
            )
        if len(data) > MAX_CHUNK_BYTES:
            raise InvalidRequestError.of(
                f"tensor {header.name!r}", f"chunk of {len(data)} bytes: at most {MAX_CHUNK_BYTES}"
            )
        self._data[self._received : end] = data
        self._crc = google_crc32c.extend(self._crc, data)
        self._received = end

    def _finish(self, end: tensor_pb2.TensorEnd) -> Payload:
        header = self._opened("end")
        if self._received != header.byte_size:
            raise InvalidRequestError.of(
                f"tensor {header.name!r}",
                f"ends after {self._received} of {header.byte_size} bytes",
            )
        if self._crc != end.crc32c:
            raise DataLossError(f"tensor {header.name!r}: CRC-32C does not match")
        payload = Payload(header.name, header.data_type, tuple(header.shape), self._data)
        self._header, self._data = None, bytearray()
        return payload

    def _opened(self, kind: str) -> tensor_pb2.TensorHeader:
        if self._header is None:
            raise InvalidRequestError.of("tensor", f"{kind} before a header")
        return self._header

"""The error tree, and the one table between errors and gRPC statuses.

Everything raised on purpose derives from `ChituError`. A leaf also inherits the built-in that
Python users would catch (`ValueError`, `FileNotFoundError`, `RuntimeError`, `LookupError`). On the
wire an error is a gRPC status with `google.rpc.ErrorInfo` (its `reason`), `BadRequest` (its
violations) and `RetryInfo` (when trying again can help); `from_rpc_error` undoes `to_status`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "chitu-diffusion"

# Status details travel in trailers, which clients drop at random above 8 KiB.
_MAX_MESSAGE_BYTES = 1024
_MAX_VIOLATION_BYTES = 256
_MAX_DETAIL_BYTES = 4096


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong with a request or a configuration."""

    field: str
    """Path of the field, e.g. `params.num_frames`."""
    message: str
    """The value that was given and the rule it breaks."""

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class ChituError(Exception):
    """Root of all errors raised on purpose."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False
    """Whether the same request may succeed when it is sent again."""

    violations: tuple[Violation, ...] = ()


class ComponentError(ChituError, RuntimeError):
    """A model part raised, or produced values that are not finite."""

    reason = "COMPONENT_FAILED"


class InvalidRequestError(ChituError, ValueError):
    """A request breaks a rule; `violations` names each field, its value and the rule."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(map(str, self.violations)))

    @classmethod
    def of(cls, field: str, message: str) -> InvalidRequestError:
        """The error for a single field."""
        return cls([Violation(field, message)])


class ConfigError(ChituError, ValueError):
    """The configuration names an unknown key, a wrong value, or something this host cannot do."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "INVALID_CONFIG"


class CheckpointError(ChituError, ValueError):
    """A checkpoint is corrupt, incomplete, or does not fit the model."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "INVALID_CHECKPOINT"


class CheckpointNotFoundError(ChituError, FileNotFoundError):
    """A checkpoint folder or one of its files is missing."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "CHECKPOINT_NOT_FOUND"


class PreconditionError(ChituError, RuntimeError):
    """The request is fine, but not in the present state or on this server."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "FAILED_PRECONDITION"


class NotFoundError(ChituError, LookupError):
    """No such task, model, component or held state."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"


class AlreadyExistsError(ChituError, ValueError):
    """A request id was used with other parameters."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "ALREADY_EXISTS"


class OffsetError(ChituError, ValueError):
    """An offset lies outside the data."""

    code = grpc.StatusCode.OUT_OF_RANGE
    reason = "OUT_OF_RANGE"


class AbortedError(ChituError, RuntimeError):
    """A newer attempt has taken over."""

    code = grpc.StatusCode.ABORTED
    reason = "SUPERSEDED"


class CancelledTaskError(ChituError, RuntimeError):
    """The task was cancelled."""

    code = grpc.StatusCode.CANCELLED
    reason = "CANCELLED"


class DeadlineError(ChituError, TimeoutError):
    """The time that was allowed is over."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class DataLossError(ChituError, RuntimeError):
    """Bytes were damaged on the way: the checksum does not match."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "CHECKSUM_MISMATCH"
    retryable = True


class OutOfMemoryError(ChituError, RuntimeError):
    """The request does not fit in memory. What it had taken is freed."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "OUT_OF_MEMORY"


class QueueFullError(ChituError, RuntimeError):
    """No more tasks, watchers or bytes are accepted for the moment."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"
    retryable = True


class UnavailableError(ChituError, RuntimeError):
    """The service is loading, shutting down, unreachable, or lost a worker."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "UNAVAILABLE"
    retryable = True


class UnsupportedError(ChituError, NotImplementedError):
    """The server does not offer this."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "UNSUPPORTED"


_RETRY_DELAY_S = 1.0

_LEAVES: tuple[type[ChituError], ...] = (
    ComponentError,
    InvalidRequestError,
    ConfigError,
    CheckpointError,
    CheckpointNotFoundError,
    PreconditionError,
    NotFoundError,
    AlreadyExistsError,
    OffsetError,
    AbortedError,
    CancelledTaskError,
    DeadlineError,
    DataLossError,
    OutOfMemoryError,
    QueueFullError,
    UnavailableError,
    UnsupportedError,
)
_BY_REASON = {leaf.reason: leaf for leaf in _LEAVES}
# For statuses without our ErrorInfo: made by gRPC itself, a proxy, or another server.
_BY_CODE: dict[grpc.StatusCode, type[ChituError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: PreconditionError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.OUT_OF_RANGE: OffsetError,
    grpc.StatusCode.ABORTED: AbortedError,
    grpc.StatusCode.CANCELLED: CancelledTaskError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.DATA_LOSS: DataLossError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFullError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
}


def error_from(reason: str, message: str, code: grpc.StatusCode | None = None) -> ChituError:
    """The error that `reason` (else `code`) names."""
    leaf = _BY_REASON.get(reason) or _BY_CODE.get(code or grpc.StatusCode.INTERNAL, ComponentError)
    if leaf is InvalidRequestError:
        return InvalidRequestError([Violation("request", message)])
    return leaf(message)


def to_status(error: ChituError) -> status_pb2.Status:
    """The `google.rpc.Status` of an error, small enough to survive as a trailer."""
    status = status_pb2.Status(
        code=error.code.value[0], message=_shorten(str(error), _MAX_MESSAGE_BYTES)
    )
    status.details.append(
        _pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)),
    )
    if error.violations:
        status.details.append(_pack(_bad_request(error.violations)))
    if error.retryable:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(_RETRY_DELAY_S * 1000))
        status.details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status


def from_rpc_error(error: Any) -> ChituError:
    """The error behind a failed call; for statuses of other origin the nearest one by code.

    `error`: a `grpc.RpcError` of a sync call, or a `grpc.aio.AioRpcError`.
    """
    code: grpc.StatusCode = error.code()
    message = error.details() or code.name
    try:
        status = rpc_status.from_call(error)
    except (ValueError, NotImplementedError):  # the trailer was cut, or names another code
        status = None
    reason = ""
    violations: list[Violation] = []
    for detail in status.details if status is not None else ():
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(bad):
            violations += [Violation(v.field, v.description) for v in bad.field_violations]
    if violations:
        return InvalidRequestError(violations)
    return error_from(reason, message, code)


def _bad_request(violations: Iterable[Violation]) -> error_details_pb2.BadRequest:
    """As many violations as there is room for."""
    message = error_details_pb2.BadRequest()
    for violation in violations:
        message.field_violations.add(
            field=_shorten(violation.field, _MAX_VIOLATION_BYTES),
            description=_shorten(violation.message, _MAX_VIOLATION_BYTES),
        )
        if message.ByteSize() > _MAX_DETAIL_BYTES:
            del message.field_violations[-1]
            break
    return message


def _pack(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _shorten(text: str, limit: int) -> str:
    """At most `limit` bytes of UTF-8; a lone surrogate, which has none, becomes "?"."""
    data = text.encode(errors="replace")
    return data.decode() if len(data) <= limit else data[: limit - 3].decode(errors="ignore") + "…"

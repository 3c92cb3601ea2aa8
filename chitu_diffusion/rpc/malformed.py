"""Says what is wrong with bytes that are not a valid message.

protobuf refuses a message with a string that is not UTF-8 without saying which one; gRPC then
answers INTERNAL. Here the string is found, so that its sender can be told.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import empty_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from chitu_diffusion.errors import InvalidRequestError

_LENGTH_DELIMITED = 2


def parse_error(data: bytes, message_type: type[Any]) -> InvalidRequestError:
    """The error for `data`, which `message_type` cannot parse."""
    path = _not_utf8(data, message_type.DESCRIPTOR)
    if path is None:
        return InvalidRequestError.of(
            "request", f"{len(data)} bytes that are not a {message_type.DESCRIPTOR.full_name}"
        )
    return InvalidRequestError.of(path, "must be valid UTF-8")


def _not_utf8(data: bytes, descriptor: Descriptor) -> str | None:
    """Path of the first string in `data` that is not UTF-8."""
    raw = empty_pb2.Empty()  # a message without fields keeps every field as unknown bytes
    try:
        raw.ParseFromString(data)
    except DecodeError:
        return None
    fields: Any = UnknownFieldSet(raw)  # its stub lacks the iteration that it documents
    for unknown in fields:
        field = descriptor.fields_by_number.get(unknown.field_number)
        if field is None or unknown.wire_type != _LENGTH_DELIMITED:
            continue
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(unknown.data):
            return field.name
        if field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
            path = _not_utf8(unknown.data, field.message_type)
            if path is not None:
                return f"{field.name}.{path}"
    return None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True

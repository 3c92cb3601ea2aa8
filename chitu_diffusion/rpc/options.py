"""Channel and server options, set together so that both sides agree."""

from __future__ import annotations

from typing import Any, TypeAlias

Options: TypeAlias = list[tuple[str, Any]]

MAX_MESSAGE_BYTES = 8 << 20
"""Bulk travels in 1 MiB chunks; this bounds what a peer can make us allocate for one message."""

_KEEPALIVE_MS = 30_000

SERVER_OPTIONS: Options = [
    # Without this a second server binds the same port in silence and gets half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Lets clients ping through long quiet calls (a step of minutes) without "too many pings".
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]

CHANNEL_OPTIONS: Options = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
]

# Calls that move tensors or files get a TCP connection of their own, so that a progress event or a
# health check never waits behind a megabyte.
BULK_CHANNEL_OPTIONS: Options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]

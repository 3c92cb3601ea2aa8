"""Dialling other services: targets, channels, health."""

from __future__ import annotations

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chitu_diffusion.rpc.options import BULK_CHANNEL_OPTIONS, CHANNEL_OPTIONS


def dial(address: str, *, bulk: bool = False) -> grpc.aio.Channel:
    """An asyncio channel to `address` (host:port or unix:PATH).

    Args:
        address: where the service listens.
        bulk: for tensors and files: a connection of its own.
    """
    options = BULK_CHANNEL_OPTIONS if bulk else CHANNEL_OPTIONS
    return grpc.aio.insecure_channel(address, options=options)


def dial_sync(address: str, *, bulk: bool = False) -> grpc.Channel:
    """As `dial`, for callers without an event loop."""
    options = BULK_CHANNEL_OPTIONS if bulk else CHANNEL_OPTIONS
    return grpc.insecure_channel(address, options=options)


def is_serving(address: str, service: str, timeout_s: float) -> bool:
    """Whether a service reports SERVING; False if it does not answer in time."""
    with dial_sync(address) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.RpcError:
            return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

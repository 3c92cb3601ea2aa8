"""The DiT pool on the wire; dit.proto says what each call promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import InvalidRequestError
from chitu_diffusion.v1 import dit_pb2, dit_pb2_grpc
from chitu_diffusion.wire import Payload, TensorReceiver
from services.dit import denoiser
from services.dit import request as door
from services.dit.denoiser import make_plan
from services.dit.forward import FORWARD_TENSORS, forward_responses, parse_forward
from services.dit.jobs import Order
from services.dit.pool import Pool
from services.dit.replies import planned
from services.dit.rules import check_header


class DitServicer(dit_pb2_grpc.DitServiceServicer):
    """Plan, Denoise, Release, Forward and GetPool."""

    def __init__(self, pool: Pool, config: Config) -> None:
        self._pool = pool
        self._config, self._model = config, config.models

    async def Plan(self, request: dit_pb2.PlanRequest, context: Any) -> dit_pb2.PlanResponse:
        """Lay out the steps."""
        self._pool.check()
        plan = make_plan(door.parse_params(request.params, self._model))
        if request.params.attn_type:
            self._pool.check_attention(request.params.attn_type, "params.attn_type")
        return dit_pb2.PlanResponse(
            steps=[planned(step, plan) for step in plan.steps],
            forward_count=plan.forward_count,
            exact=True,
        )

    async def Denoise(
        self, requests: AsyncIterator[dit_pb2.DenoiseRequest], context: Any
    ) -> AsyncIterator[dit_pb2.DenoiseResponse]:
        """Run a slice. Leaving this generator early, for whatever reason, ends it."""
        self._pool.check()
        start, plan = await self._opening(requests)
        expected = door.expected_tensors(start, plan)
        payloads = await _receive(requests, expected)
        # Values are scanned off the event loop: a checkpoint can hold 77 MB.
        tensors = await asyncio.to_thread(door.parse_tensors, payloads, expected, plan, self._model)
        stream = self._pool.submit(Order(start, plan, tensors))
        try:
            async for response in stream:
                yield response
        finally:
            stream.cancel()

    async def Forward(
        self, requests: AsyncIterator[dit_pb2.ForwardRequest], context: Any
    ) -> AsyncIterator[dit_pb2.ForwardResponse]:
        """Run one transformer once."""
        self._pool.check()
        start = await _forward_start(requests)
        payloads = await _receive(requests, FORWARD_TENSORS)
        job = await asyncio.to_thread(parse_forward, start, payloads, self._config)
        if job.attn_type:
            self._pool.check_attention(job.attn_type, "attn_type")
        done = await self._pool.forward(job)
        for response in forward_responses(done):
            yield response

    async def Release(
        self, request: dit_pb2.ReleaseRequest, context: Any
    ) -> dit_pb2.ReleaseResponse:
        """Free a task's state."""
        if not request.task_id:
            raise InvalidRequestError.of("task_id", "must not be empty")
        self._pool.release(request.task_id)
        return dit_pb2.ReleaseResponse()

    async def GetPool(
        self, request: dit_pb2.GetPoolRequest, context: Any
    ) -> dit_pb2.GetPoolResponse:
        """Tell the pool."""
        return self._pool.describe()

    async def _opening(
        self, requests: AsyncIterator[dit_pb2.DenoiseRequest]
    ) -> tuple[dit_pb2.DenoiseStart, denoiser.Plan]:
        async for message in requests:
            if message.WhichOneof("request") != "start":
                break
            plan = door.parse_start(message.start, self._config)
            if message.start.params.attn_type:
                self._pool.check_attention(message.start.params.attn_type, "params.attn_type")
            self._pool.check_group(message.start)
            return message.start, plan
        raise InvalidRequestError.of("start", "must be the first message")


async def _forward_start(
    requests: AsyncIterator[dit_pb2.ForwardRequest],
) -> dit_pb2.ForwardStart:
    async for message in requests:
        if message.WhichOneof("request") != "start":
            break
        return message.start
    raise InvalidRequestError.of("start", "must be the first message")


async def _receive(
    requests: AsyncIterator[dit_pb2.DenoiseRequest] | AsyncIterator[dit_pb2.ForwardRequest],
    expected: Sequence[str],
) -> dict[str, Payload]:
    """Take the tensors until the caller closes its side."""
    receiver, payloads = TensorReceiver(), dict[str, Payload]()
    async for message in requests:
        if message.WhichOneof("request") != "tensor":
            raise InvalidRequestError.of("request", "only tensors may follow the first message")
        if message.tensor.WhichOneof("part") == "header":
            check_header(message.tensor.header.name, expected, payloads)
        payload = receiver.feed(message.tensor)
        if payload is not None:
            payloads[payload.name] = payload
    if receiver.busy:
        raise InvalidRequestError.of("tensor", "the stream closed in the middle of a tensor")
    return payloads

"""Handles on the model hosts: a method here is one call there.

A handle owns two channels, so that status and progress never queue behind tensors. Errors of the
calls come out as the `ChituError` that the host raised. Ending an iteration early cancels the call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
import grpc.aio

from chitu_diffusion.errors import ChituError, ComponentError, from_rpc_error
from chitu_diffusion.rpc.channel import dial
from chitu_diffusion.v1 import (
    component_pb2,
    component_pb2_grpc,
    dit_pb2,
    dit_pb2_grpc,
    encoder_pb2,
    encoder_pb2_grpc,
    vae_pb2,
    vae_pb2_grpc,
)
from chitu_diffusion.wire import Payload, TensorReceiver, tensor_parts

_STATUS_TIMEOUT_S = 5.0


class Component:
    """A model host at an address."""

    name: ClassVar[str]
    """Section of the configuration."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._control = dial(address)
        self._bulk = dial(address, bulk=True)
        self._status = component_pb2_grpc.ComponentServiceStub(self._control)

    async def describe(self) -> component_pb2.GetComponentsResponse:
        """What the host holds, and its memory.

        Raises:
            UnavailableError: it does not answer.
        """
        with _chitu_errors():
            return await self._status.GetComponents(
                component_pb2.GetComponentsRequest(), timeout=_STATUS_TIMEOUT_S
            )

    async def move(self, name: str, target: str) -> component_pb2.Component:
        """Move one of its components to "cpu" or back to its "device"."""
        with _chitu_errors():
            response = await self._status.MoveComponent(
                component_pb2.MoveComponentRequest(name=name, target=target)
            )
        return response.component

    async def wait_ready(self) -> None:
        """Wait until every component of the host is ready; a host may come, go and come back."""
        while True:
            with contextlib.suppress(ChituError):
                if self._is_ready(await self.describe()):
                    return
            await asyncio.sleep(0.1)

    def _is_ready(self, response: component_pb2.GetComponentsResponse) -> bool:
        return bool(response.components) and all(
            c.state == component_pb2.COMPONENT_STATE_READY for c in response.components
        )

    async def close(self) -> None:
        """Close the channels."""
        await self._control.close(None)
        await self._bulk.close(None)


@dataclass(frozen=True)
class Encoded:
    """One encoded text."""

    info: encoder_pb2.EncodedPrompt
    embeds: Payload
    """(length, text_dim), the true rows only."""


class TextEncoder(Component):
    """Prompts to embeddings."""

    name = "encoder"

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._stub = encoder_pb2_grpc.EncoderServiceStub(self._bulk)

    async def encode(
        self, inputs: Iterable[str | Sequence[int]]
    ) -> tuple[list[Encoded], component_pb2.StageReport]:
        """Encode texts, or token ids with their end token, in order."""
        request = encoder_pb2.EncodeRequest(inputs=[_text_input(item) for item in inputs])
        infos: list[encoder_pb2.EncodedPrompt] = []
        embeds: list[Payload] = []
        report = component_pb2.StageReport()
        receiver = TensorReceiver()
        async for response in _responses(self._stub.Encode(request)):
            kind = response.WhichOneof("response")
            if kind == "prompt":
                infos.append(response.prompt)
            elif kind == "tensor":
                payload = receiver.feed(response.tensor)
                if payload is not None:
                    embeds.append(payload)
            elif kind == "report":
                report = response.report
        if not len(infos) == len(embeds) == len(request.inputs):
            raise ComponentError(
                f"encoder answered {len(infos)} prompts and {len(embeds)} tensors "
                f"for {len(request.inputs)} texts"
            )
        return [Encoded(i, e) for i, e in zip(infos, embeds, strict=True)], report


def _text_input(item: str | Sequence[int]) -> encoder_pb2.TextInput:
    if isinstance(item, str):
        return encoder_pb2.TextInput(text=item)
    return encoder_pb2.TextInput(token_ids=encoder_pb2.TokenIds(ids=item))


class DitPool(Component):
    """Embeddings and noise to latents."""

    name = "dit"

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._stub = dit_pb2_grpc.DitServiceStub(self._bulk)
        self._facts = dit_pb2_grpc.DitServiceStub(self._control)

    async def pool(self) -> dit_pb2.GetPoolResponse:
        """Its ranks, and how a slice runs that asks for nothing special.

        Raises:
            UnavailableError: it does not answer.
        """
        with _chitu_errors():
            return await self._facts.GetPool(dit_pb2.GetPoolRequest(), timeout=_STATUS_TIMEOUT_S)

    async def forward(self, start: dit_pb2.ForwardStart, tensors: Iterable[Payload]) -> Payload:
        """Run one transformer once; its velocity."""

        def requests() -> Iterator[dit_pb2.ForwardRequest]:
            yield dit_pb2.ForwardRequest(start=start)
            for payload in tensors:
                for part in tensor_parts(payload.name, payload):
                    yield dit_pb2.ForwardRequest(tensor=part)

        return await _one_tensor(_responses(self._stub.Forward(requests())), self.name)

    async def plan(self, params: dit_pb2.DenoiseParams) -> dit_pb2.PlanResponse:
        """Every step that a denoise would do."""
        with _chitu_errors():
            return await self._facts.Plan(
                dit_pb2.PlanRequest(params=params), timeout=_STATUS_TIMEOUT_S
            )

    async def release(self, task_id: str) -> None:
        """Free the state that a task has left there."""
        with _chitu_errors():
            request = dit_pb2.ReleaseRequest(task_id=task_id)
            await self._facts.Release(request, timeout=_STATUS_TIMEOUT_S)

    def denoise(
        self, start: dit_pb2.DenoiseStart, tensors: Iterable[Payload]
    ) -> AsyncGenerator[dit_pb2.DenoiseResponse, None]:
        """Run a slice; the pool's messages as they come."""

        def requests() -> Iterator[dit_pb2.DenoiseRequest]:
            yield dit_pb2.DenoiseRequest(start=start)
            for payload in tensors:
                for part in tensor_parts(payload.name, payload):
                    yield dit_pb2.DenoiseRequest(tensor=part)

        return _responses(self._stub.Denoise(requests()))


class Vae(Component):
    """Latents to video."""

    name = "vae"

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._stub = vae_pb2_grpc.VaeServiceStub(self._bulk)

    def decode(
        self, start: vae_pb2.DecodeStart, latents: Payload
    ) -> AsyncGenerator[vae_pb2.DecodeResponse, None]:
        """Decode latents; the service's messages as they come."""

        def requests() -> Iterator[vae_pb2.DecodeRequest]:
            yield vae_pb2.DecodeRequest(start=start)
            for part in tensor_parts("latents", latents):
                yield vae_pb2.DecodeRequest(tensor=part)

        return _responses(self._stub.Decode(requests()))

    async def decode_tensor(self, latents: Payload) -> Payload:
        """Decode latents (1, C, F, H, W) to frames (1, 3, F, H, W) float32 in [-1, 1]."""
        start = vae_pb2.DecodeStart(output_format="tensor", fps=1)
        return await _one_tensor(self.decode(start, latents), self.name)


async def _one_tensor(responses: AsyncGenerator[Any, None], name: str) -> Payload:
    """The only tensor of an answer."""
    receiver = TensorReceiver()
    payload: Payload | None = None
    async with contextlib.aclosing(responses):
        async for response in responses:
            if response.HasField("tensor"):
                payload = receiver.feed(response.tensor) or payload
    if payload is None:
        raise ComponentError(f"{name} answered without its tensor")
    return payload


async def _responses(call: Any) -> AsyncGenerator[Any, None]:
    # An abandoned call is never collected and keeps its server busy: cancel it in any case.
    try:
        with _chitu_errors():
            async for response in call:
                yield response
    finally:
        call.cancel()


@contextlib.contextmanager
def _chitu_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error

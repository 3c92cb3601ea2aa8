"""The VAE on the wire; vae.proto says what each call promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from chitu_diffusion.v1 import vae_pb2, vae_pb2_grpc
from services.common.host import ModelHost
from services.common.memory import stage_report
from services.vae.job import DecodeJob
from services.vae.request import LatentRules, read_request
from services.vae.turn import Turn
from services.vae.wan_vae import WanVae


class VaeServicer(vae_pb2_grpc.VaeServiceServicer):
    """VaeService."""

    def __init__(self, host: ModelHost[WanVae]) -> None:
        self._host = host
        self._lock = asyncio.Lock()

    async def Decode(
        self,
        request_iterator: AsyncIterator[vae_pb2.DecodeRequest],
        context: Any,
    ) -> AsyncIterator[vae_pb2.DecodeResponse]:
        """Read and check the whole request, wait for a turn, then decode as the answers leave."""
        host = self._host
        vae = host.model()
        rules = LatentRules(
            vae.channels, vae.spatial_stride, vae.temporal_stride, host.config.models.limits
        )
        request = await read_request(request_iterator, rules)
        job = DecodeJob(vae, host.config.services.vae, *request)
        del request
        loop = asyncio.get_running_loop()
        async with Turn(self._lock) as turn:
            try:
                while (batch := await loop.run_in_executor(host.worker, job.advance)) is not None:
                    turn.sending()
                    for response in batch:
                        yield response
                    await turn.take()
            finally:
                # Behind a step that may still run: the worker is one thread.
                host.worker.submit(job.close)
        report = stage_report(vae.device, vae.dtype, job.seconds, turn.waited_seconds)
        yield vae_pb2.DecodeResponse(done=vae_pb2.DecodeDone(video=job.video, report=report))

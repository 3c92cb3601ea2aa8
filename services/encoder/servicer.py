"""The encoder on the wire; encoder.proto says what each call promises."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from chitu_diffusion.v1 import encoder_pb2, encoder_pb2_grpc
from chitu_diffusion.wire import tensor_parts
from services.common.host import ModelHost
from services.common.memory import stage_report
from services.encoder.prompt import TokenizedPrompt
from services.encoder.request import check_request
from services.encoder.worker import Worker


class EncoderServicer(encoder_pb2_grpc.EncoderServiceServicer):
    """EncoderService."""

    def __init__(self, host: ModelHost[Worker]) -> None:
        self._host = host

    async def Encode(
        self, request: encoder_pb2.EncodeRequest, context: Any
    ) -> AsyncIterator[encoder_pb2.EncodeResponse]:
        """Check everything first, then encode and send text by text."""
        host, worker = self._host, self._host.model()
        check_request(request, worker.model.vocab_size, host.config.models.transformer.text_len)
        loop = asyncio.get_running_loop()
        seconds = waited = 0.0
        for index, item in enumerate(request.inputs):
            asked = time.perf_counter()
            encoded = await loop.run_in_executor(host.worker, worker.encode, item, asked)
            seconds, waited = seconds + encoded.seconds, waited + encoded.waited_seconds
            yield _facts(index, encoded.prompt, request.return_token_ids)
            for part in tensor_parts("prompt_embeds", encoded.rows):
                yield encoder_pb2.EncodeResponse(tensor=part)
        report = stage_report(worker.device, host.dtype, seconds, waited)
        yield encoder_pb2.EncodeResponse(report=report)


def _facts(index: int, prompt: TokenizedPrompt, with_ids: bool) -> encoder_pb2.EncodeResponse:
    return encoder_pb2.EncodeResponse(
        prompt=encoder_pb2.EncodedPrompt(
            index=index,
            token_count=prompt.token_count,
            length=len(prompt.ids),
            truncated=prompt.truncated,
            token_ids=prompt.ids if with_ids else [],
        )
    )

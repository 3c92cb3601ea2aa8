"""The text encoder as a service process."""

from __future__ import annotations

import grpc.aio
import torch

from chitu_diffusion.v1 import component_pb2, component_pb2_grpc, encoder_pb2, encoder_pb2_grpc
from services.common.components import ComponentServicer
from services.common.host import ModelHost
from services.encoder.servicer import EncoderServicer
from services.encoder.worker import Worker, load_worker

_ON_CPU_LEVEL = 2
"""infer.diffusion.low_mem_level from which the text encoder lives in host memory."""


class EncoderHost(ModelHost[Worker]):
    """Tokenizer and UMT5."""

    name = "encoder"
    component = "text_encoder"

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Add EncoderService and ComponentService."""
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(EncoderServicer(self), server)
        component_pb2_grpc.add_ComponentServiceServicer_to_server(ComponentServicer(self), server)
        return [
            encoder_pb2.DESCRIPTOR.services_by_name["EncoderService"].full_name,
            component_pb2.DESCRIPTOR.services_by_name["ComponentService"].full_name,
        ]

    @property
    def home(self) -> torch.device:
        """Host memory at the higher levels of low_mem_level."""
        on_cpu = self.config.infer.diffusion.low_mem_level >= _ON_CPU_LEVEL
        return torch.device("cpu") if on_cpu else self.device

    def read(self) -> Worker:
        """Read tokenizer and weights."""
        return load_worker(self.config, self.home, self.dtype)

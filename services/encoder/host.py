"""The text encoder as a service process."""

from __future__ import annotations

import grpc.aio

from chitu_diffusion.v1 import component_pb2, component_pb2_grpc, encoder_pb2, encoder_pb2_grpc
from services.common.components import ComponentServicer
from services.common.host import ModelHost
from services.encoder.servicer import EncoderServicer
from services.encoder.worker import Worker, load_worker


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

    def read(self) -> Worker:
        """Read tokenizer and weights."""
        return load_worker(self.config, self.device, self.dtype)

"""The VAE as a service process."""

from __future__ import annotations

from pathlib import Path

import grpc.aio

from chitu_diffusion.v1 import component_pb2, component_pb2_grpc, vae_pb2, vae_pb2_grpc
from services.common.components import ComponentServicer
from services.common.host import ModelHost
from services.vae.servicer import VaeServicer
from services.vae.wan_vae import WanVae


class VaeHost(ModelHost[WanVae]):
    """The decoder half of the VAE."""

    name = "vae"
    component = "vae"

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Add VaeService and ComponentService."""
        vae_pb2_grpc.add_VaeServiceServicer_to_server(VaeServicer(self), server)
        component_pb2_grpc.add_ComponentServiceServicer_to_server(ComponentServicer(self), server)
        return [
            vae_pb2.DESCRIPTOR.services_by_name["VaeService"].full_name,
            component_pb2.DESCRIPTOR.services_by_name["ComponentService"].full_name,
        ]

    def read(self) -> WanVae:
        """Read the weights."""
        return WanVae.load(Path(str(self.config.models.ckpt_dir)), self.device, self.dtype)

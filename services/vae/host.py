"""The VAE as a service process."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc.aio

from chitu_diffusion.v1 import component_pb2, component_pb2_grpc, vae_pb2, vae_pb2_grpc
from services.common.components import ComponentServicer
from services.common.host import ModelHost
from services.vae.servicer import VaeServicer
from services.vae.wan_vae import WanVae

log = logging.getLogger(__name__)

_TILING_LEVEL = 1
"""infer.diffusion.low_mem_level from which the VAE is to decode in tiles."""


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
        level = self.config.infer.diffusion.low_mem_level
        if level >= _TILING_LEVEL:
            log.warning(
                "infer.diffusion.low_mem_level=%d: tiled decode is not built yet, "
                "the VAE decodes whole latent frames",
                level,
            )
        return WanVae.load(Path(str(self.config.models.ckpt_dir)), self.device, self.dtype)

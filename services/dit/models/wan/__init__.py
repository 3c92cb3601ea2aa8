"""Wan2.1 and Wan2.2 text-to-video."""

from services.dit.models.family import ModelFamily
from services.dit.models.wan.transformer import WanTransformer
from services.dit.models.wan.weights import diffusers_name, expert_folders, weight_dtype

FAMILY = ModelFamily(
    transformer=WanTransformer,
    rename=diffusers_name,
    weight_dtype=weight_dtype,
    expert_folders=expert_folders,
    latent_stride=(4, 8, 8),
)

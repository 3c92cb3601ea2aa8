"""Model families. The registry is `MODEL_TYPES` of the configuration's schema."""

from __future__ import annotations

import importlib

from chitu_diffusion.config import schema
from chitu_diffusion.errors import ConfigError
from services.dit.models.family import Constants, ModelFamily, Transformer

__all__ = ["Constants", "ModelFamily", "Transformer", "get_family", "get_model_class"]


def get_family(model_type: str) -> ModelFamily:
    """Find the family of `models.type`.

    Raises:
        ConfigError: it is not in the registry.
    """
    if model_type not in schema.MODEL_TYPES:
        raise ConfigError(
            f"models.type={model_type!r}: must be one of {', '.join(map(repr, schema.MODEL_TYPES))}"
        )
    family: ModelFamily = importlib.import_module(f"services.dit.models.{model_type}").FAMILY
    return family


def get_model_class(model_type: str) -> type[Transformer]:
    """Find the transformer's class of `models.type`; errors are those of `get_family`."""
    return get_family(model_type).transformer

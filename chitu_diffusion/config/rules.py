"""What the values of a typed configuration must be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from chitu_diffusion.config.schema import Config, ModelConfig
from chitu_diffusion.errors import InvalidRequestError


def problems(config: Config) -> Iterator[str]:
    """Everything that is wrong, one line each: the key, its value, and what is allowed."""
    found = [*_field_problems(config, "")]
    yield from found
    if not found:  # the rules between fields suppose that each field is right
        yield from _model_problems(config.models)
        yield from _pool_problems(config)


def _field_problems(node: Any, prefix: str) -> Iterator[str]:
    """Ranges and choices, as the schema has them beside the fields."""
    for field in dataclasses.fields(node):
        key, value = f"{prefix}{field.name}", getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            yield from _field_problems(value, f"{key}.")
        elif "range" in field.metadata and value is not None:
            low, high = field.metadata["range"]
            values = value if isinstance(value, list) else [value]
            # OmegaConf lets lists through as elements of lists of numbers.
            if not all(isinstance(n, int | float) and low <= n <= high for n in values):
                yield f"{key}={value!r}: must be between {low:g} and {high:g}"
        elif "choices" in field.metadata and value not in field.metadata["choices"]:
            allowed = ", ".join(map(repr, field.metadata["choices"]))
            yield f"{key}={value!r}: must be one of {allowed}"


def _model_problems(model: ModelConfig) -> Iterator[str]:
    transformer, defaults = model.transformer, model.request_defaults
    dim, heads = transformer.hidden_size, transformer.num_heads
    if dim % heads or dim // heads % 2:
        yield (
            f"models.transformer.hidden_size={dim}: must be an even multiple of num_heads={heads}"
        )
    if transformer.freq_dim % 2:
        yield f"models.transformer.freq_dim={transformer.freq_dim}: must be even"
    if len(transformer.patch_size) != 3:
        yield (
            f"models.transformer.patch_size={transformer.patch_size}: must be three numbers, "
            "for frames, rows and columns"
        )
    if (model.boundary_ratio is None) != (defaults.guidance_scale_high is None):
        yield (
            "models.boundary_ratio and models.request_defaults.guidance_scale_high: "
            "set both (two experts) or neither"
        )
        return
    yield from _default_problems(model)


def _default_problems(model: ModelConfig) -> Iterator[str]:
    """The defaults must be a request that this model takes."""
    from chitu_diffusion.request import GenerationRequest  # which imports the schema

    try:
        GenerationRequest(prompt="").resolve(model, seed=0, attn_type="auto")
    except InvalidRequestError as error:
        for violation in error.violations:
            name = violation.field.removeprefix("params.")
            yield f"models.request_defaults.{name}={violation.message}"


def _pool_problems(config: Config) -> Iterator[str]:
    degree, heads = config.distributed.ulysses_degree, config.models.transformer.num_heads
    if heads % degree:
        yield (
            f"distributed.ulysses_degree={degree}: must divide models.transformer.num_heads={heads}"
        )

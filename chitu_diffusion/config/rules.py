"""What the values of a typed configuration must be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from chitu_diffusion.config.fields import allowed, holds, walk
from chitu_diffusion.config.schema import Config, ModelConfig
from chitu_diffusion.config.typed import Problem
from chitu_diffusion.errors import InvalidRequestError


def problems(config: Config) -> Iterator[Problem]:
    """Everything that is wrong."""
    found = [
        Problem(key, f"={value!r}", f"must be {allowed(field)}")
        for key, field, value in walk(config)
        if not dataclasses.is_dataclass(value) and not holds(field, value)
    ]
    yield from found
    if not found:  # the rules between fields suppose that each field is right
        yield from _model_problems(config.models)
        yield from _pool_problems(config)


def _model_problems(model: ModelConfig) -> Iterator[Problem]:
    transformer, defaults = model.transformer, model.request_defaults
    dim, heads = transformer.hidden_size, transformer.num_heads
    if dim % heads or dim // heads % 2:
        rule = f"must be an even multiple of num_heads={heads}"
        yield Problem("models.transformer.hidden_size", f"={dim}", rule)
    if transformer.freq_dim % 2:
        yield Problem("models.transformer.freq_dim", f"={transformer.freq_dim}", "must be even")
    if (model.boundary_ratio is None) != (defaults.guidance_scale_high is None):
        yield Problem(
            "models.boundary_ratio",
            f"={model.boundary_ratio}",
            "must be set (two experts) exactly if models.request_defaults.guidance_scale_high="
            f"{defaults.guidance_scale_high} is",
        )
        return
    yield from _default_problems(model)


def _default_problems(model: ModelConfig) -> Iterator[Problem]:
    """The defaults must be a request that this model takes."""
    from chitu_diffusion.request import GenerationRequest  # which imports the schema

    try:
        GenerationRequest(prompt="").resolve(model, seed=0, attn_type="auto")
    except InvalidRequestError as error:
        for violation in error.violations:
            name = violation.field.removeprefix("params.")
            has, _, rule = violation.message.partition(": ")
            yield Problem(f"models.request_defaults.{name}", f"={has}", rule)


def _pool_problems(config: Config) -> Iterator[Problem]:
    degree, heads = config.distributed.ulysses_degree, config.models.transformer.num_heads
    if heads % degree:
        rule = f"must divide models.transformer.num_heads={heads}"
        yield Problem("distributed.ulysses_degree", f"={degree}", rule)

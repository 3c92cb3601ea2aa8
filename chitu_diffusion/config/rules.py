"""What the values of a typed configuration must be."""

from __future__ import annotations

import dataclasses
import math
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
        yield from _expert_problems(config)
        yield from _warmup_problems(config)


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
    distributed, heads = config.distributed, config.models.transformer.num_heads
    degree = distributed.ulysses_degree
    if degree and heads % degree:
        rule = f"must divide models.transformer.num_heads={heads}"
        yield Problem("distributed.ulysses_degree", f"={degree}", rule)
    degrees = (distributed.cfg_size, degree, distributed.ring_degree)
    size = math.prod(degree or 1 for degree in degrees)
    world = distributed.world_size or size
    if world % size:
        cfg, ulysses, ring = (degree or "auto" for degree in degrees)
        rule = f"must be a multiple of cfg {cfg} x ulysses {ulysses} x ring {ring} ranks"
        yield Problem("distributed.world_size", f"={world}", rule)
    if world % distributed.nodes:
        rule = f"must divide distributed.world_size={world}"
        yield Problem("distributed.nodes", f"={distributed.nodes}", rule)
    if world > 1 and ":" in config.infer.device:
        rule = f"must name no single device for {world} ranks"
        yield Problem("infer.device", f"={config.infer.device!r}", rule)
    if distributed.nodes > 1:
        listen = config.services.dit.ranks_listen
        for key, value in (
            ("distributed.rendezvous", distributed.rendezvous),
            ("services.dit.ranks_listen", listen),
        ):
            if value is None or value.startswith("unix:") or value.endswith(":0"):
                rule = (
                    f"must be host:port with a fixed port for distributed.nodes={distributed.nodes}"
                )
                yield Problem(key, f"={value!r}", rule)


def _expert_problems(config: Config) -> Iterator[Problem]:
    if config.models.boundary_ratio is not None:
        return
    dit = config.services.dit
    if dit.expert != "all":
        rule = f"must be 'all', as {config.models.name} has one"
        yield Problem("services.dit.expert", f"={dit.expert!r}", rule)
    if dit.low_noise_address is not None:
        rule = f"must be unset, as {config.models.name} has one expert"
        yield Problem("services.dit.low_noise_address", f"={dit.low_noise_address!r}", rule)


def _warmup_problems(config: Config) -> Iterator[Problem]:
    """Each shape must be a request that this model takes."""
    from chitu_diffusion.request import GenerationRequest  # which imports the schema

    if config.services.dit.warmup == "default":
        return  # checked as the defaults of a request
    for frames, height, width in warmup_shapes(config):
        try:
            GenerationRequest(prompt="", num_frames=frames, height=height, width=width).resolve(
                config.models, seed=0, attn_type="auto"
            )
        except InvalidRequestError as error:
            yield Problem("services.dit.warmup", f"={frames}x{height}x{width}", str(error))


def warmup_shapes(config: Config) -> list[tuple[int, int, int]]:
    """Frames, height and width of each video that a pool warms up with."""
    text, defaults = config.services.dit.warmup, config.models.request_defaults
    if text == "off":
        return []
    if text == "default":
        return [(defaults.num_frames, defaults.height, defaults.width)]
    sizes = (tuple(map(int, size.split("x"))) for size in text.replace(" ", "").split(","))
    return [(frames, height, width) for frames, height, width in sizes]

"""Typed hydra configuration: `load(overrides)` gives a checked `Config`.

`load` composes the YAML files beside this module, so `models=tiny-wan2.2` and
`infer.attn_type=sdpa` mean what hydra users expect. It changes no directory and writes no file.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from chitu_diffusion.config import schema
from chitu_diffusion.config.schema import Config, ModelConfig
from chitu_diffusion.errors import ConfigError

_HERE = Path(__file__).parent
_ASSETS = _HERE.parent.parent / "assets"

ConfigStore.instance().store(name="schema", node=Config)
OmegaConf.register_new_resolver("chitu.assets", lambda name: str(_ASSETS / name), replace=True)


def load(overrides: Sequence[str] = (), config_name: str = "wan") -> Config:
    """Compose, type-check and range-check the configuration.

    Args:
        overrides: hydra overrides, e.g. `["models=tiny-wan", "infer.device=cpu"]`.
        config_name: root YAML file.

    Raises:
        ConfigError: an unknown key or choice, a value of the wrong type or out of range.
    """
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("chitu_diffusion.config", version_base=None):
            args = compose(config_name=config_name, overrides=list(overrides))
        return check(args)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, overrides)) from error


def check(args: DictConfig | Config | Mapping[str, Any]) -> Config:
    """Turn a composed tree into a checked `Config`; relative paths become absolute here, once.

    Raises:
        ConfigError: an unknown key or choice, a value of the wrong type or out of range.
    """
    try:
        config = _typed(args)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error, ())) from error
    if config.models.ckpt_dir is not None:
        config.models.ckpt_dir = str(Path(config.models.ckpt_dir).expanduser().absolute())
    if "://" not in config.orchestrator.results_url:
        config.orchestrator.results_url = str(
            Path(config.orchestrator.results_url).expanduser().absolute()
        )
    problems = [*_problems(config)]
    if problems:
        raise ConfigError("; ".join(problems))
    return config


def _typed(args: Any) -> Config:
    if isinstance(args, Config):
        args = OmegaConf.structured(args)
    elif isinstance(args, Mapping) and not isinstance(args, DictConfig):
        args = OmegaConf.create(dict(args))
    if not isinstance(args, DictConfig):
        raise ConfigError(
            f"configuration of type {type(args).__name__}: must be what hydra's compose() or "
            "chitu_diffusion.config.load() gives"
        )
    # Merging plain values onto the schema refuses keys that hydra's "+key=value" has added.
    merged = OmegaConf.merge(
        OmegaConf.structured(Config), cast(Any, OmegaConf.to_container(args, resolve=True))
    )
    return cast(Config, OmegaConf.to_object(merged))


def model_names() -> list[str]:
    """Choices of the `models` group."""
    return sorted(path.stem for path in (_HERE / "models").glob("*.yaml"))


def _problems(config: Config) -> Iterable[str]:
    def one_of(key: str, value: Any, allowed: Sequence[Any]) -> Iterable[str]:
        if value not in allowed:
            yield f"{key}={value!r}: must be one of {', '.join(map(repr, allowed))}"

    def within(key: str, value: float, low: float, high: float) -> Iterable[str]:
        if not low <= value <= high:
            yield f"{key}={value!r}: must be between {low:g} and {high:g}"

    yield from _model_problems(config.models)
    yield from one_of("infer.dtype", config.infer.dtype, ("auto", "float32", "bfloat16"))
    yield from one_of("infer.attn_type", config.infer.attn_type, schema.ATTN_TYPES)
    yield from within("infer.num_threads", config.infer.num_threads, 0, 1024)
    encoder, vae = config.services.encoder, config.services.vae
    yield from one_of("services.encoder.dtype", encoder.dtype, ("auto", "float32", "bfloat16"))
    yield from one_of("services.vae.dtype", vae.dtype, ("float32", "bfloat16"))
    yield from within("services.vae.crf", vae.crf, 0, 51)
    yield from one_of("services.vae.preset", vae.preset, schema.PRESETS)
    yield from within("services.stop_grace_s", config.services.stop_grace_s, 0, 3600)
    orchestrator = config.orchestrator
    yield from within("orchestrator.max_queued_tasks", orchestrator.max_queued_tasks, 1, 1_000_000)
    yield from within("orchestrator.max_watchers", orchestrator.max_watchers, 1, 100_000)
    yield from within(
        "orchestrator.max_finished_tasks", orchestrator.max_finished_tasks, 1, 1_000_000
    )
    yield from within("orchestrator.slice_steps", orchestrator.slice_steps, 0, 1000)


def _model_problems(model: ModelConfig) -> Iterable[str]:
    transformer, defaults = model.transformer, model.request_defaults
    if transformer.hidden_size % transformer.num_heads:
        yield (
            f"models.transformer.hidden_size={transformer.hidden_size}: must be a multiple of "
            f"num_heads={transformer.num_heads}"
        )
    if model.type not in schema.MODEL_TYPES:
        yield f"models.type={model.type!r}: must be one of {', '.join(schema.MODEL_TYPES)}"
    if defaults.solver not in schema.SOLVERS:
        yield (
            f"models.request_defaults.solver={defaults.solver!r}: must be one of "
            f"{', '.join(schema.SOLVERS)}"
        )
    if model.boundary_ratio is not None and not 0 < model.boundary_ratio < 1:
        yield f"models.boundary_ratio={model.boundary_ratio}: must be between 0 and 1, exclusive"
    if (model.boundary_ratio is None) != (defaults.guidance_scale_high is None):
        yield (
            "models.boundary_ratio and models.request_defaults.guidance_scale_high: "
            "set both (two experts) or neither"
        )


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    """One line: what is wrong, with the nearest name where one was mistyped."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    cause = error.__cause__
    if cause is not None and str(cause).strip():
        text = f"{text} ({str(cause).strip().splitlines()[0]})"
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if key == "models" and value not in model_names():
            near = difflib.get_close_matches(value, model_names(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            return f"models={value!r}: must be one of {', '.join(model_names())}{hint}"
        if (key and key in text) or override in text:
            near = difflib.get_close_matches(key, _keys(), n=1)
            if near and near[0] != key:
                return f"{override}: {text}; did you mean {near[0]!r}?"
            return f"{override}: {text}"
    return text


def _keys() -> list[str]:
    """All dotted keys of the schema."""

    def walk(node: DictConfig, prefix: str) -> Iterable[str]:
        for key in node:
            path = f"{prefix}{key!s}"
            yield path
            if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
                yield from walk(node[key], f"{path}.")

    return list(walk(OmegaConf.structured(Config), ""))

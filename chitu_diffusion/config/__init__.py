"""Typed hydra configuration: `load(overrides)` gives a checked `Config`.

`load` composes the YAML files beside this module, so `models=tiny-wan2.2` and
`infer.attn_type=sdpa` mean what hydra users expect. It changes no directory and writes no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from chitu_diffusion.config.environment import resolved
from chitu_diffusion.config.explain import explain, model_names
from chitu_diffusion.config.rules import problems
from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import ConfigError

__all__ = ["Config", "check", "load", "model_names", "to_yaml"]

_ASSETS = Path(__file__).parent.parent.parent / "assets"

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
        raise ConfigError(explain(error, overrides)) from error


def check(args: DictConfig | Config | Mapping[str, Any]) -> Config:
    """Turn a composed tree into a checked `Config`; relative paths become absolute here, once.

    Raises:
        ConfigError: an unknown key or choice, a value of the wrong type or out of range.
    """
    try:
        config = _typed(args)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    if config.models.ckpt_dir is not None:
        config.models.ckpt_dir = str(Path(config.models.ckpt_dir).expanduser().absolute())
    if "://" not in config.orchestrator.results_url:
        config.orchestrator.results_url = str(
            Path(config.orchestrator.results_url).expanduser().absolute()
        )
    found = [*problems(config)]
    if found:
        raise ConfigError("; ".join(found))
    return config


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML; `check` of it gives the same again."""
    text: str = OmegaConf.to_yaml(OmegaConf.structured(config))
    return text


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
    merged = OmegaConf.merge(OmegaConf.structured(Config), cast(Any, resolved(args)))
    return cast(Config, OmegaConf.to_object(merged))

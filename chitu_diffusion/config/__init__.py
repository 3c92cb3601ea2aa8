"""Typed hydra configuration: `load(overrides)` gives a checked `Config`.

`load` composes the YAML files beside this module, so `models=tiny-wan2.2` and
`infer.attn_type=sdpa` mean what hydra users expect. It changes no directory and writes no file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.initialize import get_gh_backup, restore_gh_from_backup
from hydra.utils import to_absolute_path
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from chitu_diffusion.config.environment import resolved
from chitu_diffusion.config.explain import explain, model_names
from chitu_diffusion.config.rules import problems
from chitu_diffusion.config.schema import Config
from chitu_diffusion.config.typed import Problem, plain, typed
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
    try:
        with _hydra_of_its_own():
            args = compose(config_name=config_name, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(explain(error, overrides)) from error
    return check(args)


def check(args: DictConfig | Config | Mapping[str, Any]) -> Config:
    """Turn a composed tree into a checked `Config`; relative paths become absolute here, once.

    Args:
        args: of hydra's `compose`, or the same keys and values in a dictionary or a `Config`.

    Raises:
        ConfigError: an unknown key or choice, a value of the wrong type or out of range.
    """
    try:
        values, origins = resolved(_tree(args))
        node, found = typed(values)
        config = None if found else cast(Config, OmegaConf.to_object(node))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    found = found if config is None else [*problems(config)]
    if config is None or found:
        raise ConfigError("; ".join(_told(problem, origins) for problem in found))
    models, orchestrator = config.models, config.orchestrator
    if models.ckpt_dir is not None:
        models.ckpt_dir = _absolute("models.ckpt_dir", models.ckpt_dir)
    if "://" not in orchestrator.results_url:
        orchestrator.results_url = _absolute("orchestrator.results_url", orchestrator.results_url)
    return config


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML; `check` of it gives the same again."""
    text: str = OmegaConf.to_yaml(OmegaConf.structured(config))
    return text


@contextlib.contextmanager
def _hydra_of_its_own() -> Iterator[None]:
    """A program that has initialized hydra for itself finds it as it was."""
    theirs = get_gh_backup()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("chitu_diffusion.config", version_base=None):
            yield
    finally:
        restore_gh_from_backup(theirs)


def _tree(args: Any) -> DictConfig:
    if isinstance(args, Config):
        args = plain(args)
    if isinstance(args, Mapping) and not isinstance(args, DictConfig):
        args = OmegaConf.create(dict(args))
    if not isinstance(args, DictConfig):
        raise ConfigError(
            f"configuration of type {type(args).__name__}: must be what hydra's compose() or "
            "chitu_diffusion.config.load() gives"
        )
    return args


def _told(problem: Problem, origins: Mapping[str, str]) -> str:
    origin = [text for key, text in origins.items() if key.partition("[")[0] == problem.key]
    source = f" ({', '.join(origin)})" if origin else ""
    return f"{problem.key}{problem.has}{source}: {problem.rule}"


def _absolute(key: str, path: str) -> str:
    """Against the start directory, also where `hydra.main` has gone to its job's folder."""
    try:
        return str(to_absolute_path(str(Path(path).expanduser())))
    except RuntimeError as error:  # "~" of nobody
        raise ConfigError(f"{key}={path!r}: {error}") from error

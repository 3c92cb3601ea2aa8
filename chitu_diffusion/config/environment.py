"""Values from environment variables: `${oc.env:NAME}` and `${oc.env:NAME,default}`.

They become the type of their key. An empty variable counts as one that is not set.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from chitu_diffusion.errors import ConfigError

_VARIABLE = re.compile(r"\$\{oc\.env:\s*['\"]?([^,}'\"\s]+)")


def resolved(args: DictConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """The tree as plain values, interpolations resolved.

    Returns:
        The values, which have no types yet; of each key that names environment variables, these
        and what they have.

    Raises:
        ConfigError: a variable is missing; names it and the key.
        OmegaConfBaseException: any other interpolation that cannot be resolved.
    """
    raw: Any = OmegaConf.to_container(args, resolve=False)
    variables = dict(_variables(raw, ""))
    untyped = OmegaConf.create(raw)
    with _empty_is_unset({name for names in variables.values() for name in names}):
        origins = {key: _told(names) for key, names in variables.items()}
        for key, origin in origins.items():
            try:
                OmegaConf.select(untyped, key)
            except OmegaConfBaseException as error:
                line = str(error).strip().splitlines()[0]
                raise ConfigError(f"{key}: {origin}: {line}") from error
        values: Any = OmegaConf.to_container(untyped, resolve=True)
    return values, origins


def _variables(node: Any, key: str) -> Iterator[tuple[str, list[str]]]:
    """Every key whose value names environment variables, and the variables."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _variables(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _variables(value, f"{key}[{index}]")
    elif isinstance(node, str) and (names := _VARIABLE.findall(node)):
        yield key, names


@contextlib.contextmanager
def _empty_is_unset(names: set[str]) -> Iterator[None]:
    empty = [name for name in names if os.environ.get(name) == ""]
    for name in empty:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(dict.fromkeys(empty, ""))


def _told(names: list[str]) -> str:
    return ", ".join(
        f"environment variable {name}={os.environ[name]!r}"
        if name in os.environ
        else f"environment variable {name} is not set or empty"
        for name in names
    )

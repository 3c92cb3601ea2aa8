"""From plain values to a typed `Config`: unknown keys, missing ones, values of the wrong type."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from chitu_diffusion.config.explain import no_such_key
from chitu_diffusion.config.fields import allowed, walk
from chitu_diffusion.config.schema import Config


class Problem(NamedTuple):
    """Something that is wrong: the key, what it has, and what would be right."""

    key: str
    has: str
    rule: str


def typed(tree: Mapping[str, Any]) -> tuple[DictConfig, list[Problem]]:
    """Put plain values into the schema.

    Returns:
        The tree, an object of `Config` by `OmegaConf.to_object` if nothing is wrong; what is wrong.
    """
    node = OmegaConf.structured(Config)
    found = [*_fill(node, tree, "")]
    absent = [name for name in node if name not in tree]  # "~section", or never composed
    if absent:
        rule = f"must have the sections {', '.join(node)}"
        found.append(Problem("configuration", f" without {', '.join(absent)}", rule))
    if not found:
        missing = OmegaConf.missing_keys(node)
        found = [
            Problem(key, " is not set", f"must be {allowed(field)}")
            for key, field, _ in walk(Config())
            if key in missing
        ]
    return node, found


def plain(node: Any) -> Any:
    """The values of a `Config`, also those that the schema does not have."""
    if dataclasses.is_dataclass(node):
        return {name: plain(value) for name, value in vars(node).items()}
    return node


def _fill(node: DictConfig, tree: Mapping[str, Any], prefix: str) -> Iterator[Problem]:
    fields = {
        field.name: field for field in dataclasses.fields(cast(Any, OmegaConf.get_type(node)))
    }
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in fields:
            yield Problem(key, f"={value!r}", no_such_key(key))
        elif not isinstance(node._get_node(name), DictConfig):
            yield from _put(node, fields[name], value, key)
        elif isinstance(value, Mapping):
            yield from _fill(node[name], value, f"{key}.")
        else:
            yield Problem(key, f"={value!r}", f"must be a section with {', '.join(node[name])}")


def _put(
    node: DictConfig, field: dataclasses.Field[Any], value: Any, key: str
) -> Iterator[Problem]:
    try:
        node[field.name] = value
    except OmegaConfBaseException:
        yield Problem(key, f"={value!r}", f"must be {allowed(field)}")

"""What is wrong with hydra's overrides, in one line, with the nearest name for a mistyped one."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException

from chitu_diffusion.config.fields import allowed, walk
from chitu_diffusion.config.schema import Config

_GRAMMAR = "must be key=value, +key=value, ++key=value or ~key"


def explain(error: Exception, overrides: Sequence[str] = ()) -> str:
    """Describe an error of hydra or OmegaConf.

    Args:
        error: what was raised.
        overrides: the hydra overrides that were given.
    """
    if isinstance(error, OverrideParseException):
        return f"{' '.join(error.override.split())}: {_first_line(error)}; {_GRAMMAR}"
    cause = f" ({_first_line(error.__cause__)})" if error.__cause__ else ""
    text = f"{_first_line(error)}{cause}"
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    named = [item for item in parsed if item.key_or_group in text or item.input_line in text]
    wrong_model = [item for item in parsed if _names_no_model(item)]
    # "models" is a part of "models.transfomer": the longest is the one that is meant.
    for item in wrong_model or sorted(named, key=lambda item: -len(item.key_or_group)):
        return f"{' '.join(item.input_line.split())}: {_rule(item) or text}"
    key = str(getattr(error, "full_key", None) or "")
    return f"{key}: {text}" if key else text


def model_names() -> list[str]:
    """Choices of the `models` group."""
    return sorted(path.stem for path in (Path(__file__).parent / "models").glob("*.yaml"))


def no_such_key(key: str) -> str:
    """Say so, and the nearest key, or what its section has."""
    fields = [known for known, _, _ in walk(Config())]
    tail = [known for known in fields if known.endswith(f".{key.rpartition('.')[2]}")]
    near = difflib.get_close_matches(key, tail, n=1, cutoff=0.0)
    near = near or difflib.get_close_matches(key, fields, n=1, cutoff=0.75)
    if near:
        return f"there is no such key; did you mean {near[0]!r}?"
    section = key.rpartition(".")[0]
    while section and section not in fields:
        section = section.rpartition(".")[0]
    names = [known for known in fields if known.rpartition(".")[0] == section]
    return f"there is no such key; there are {', '.join(names)}"


def _rule(item: Override) -> str | None:
    """What an override must be; None if its key and its value are none of the schema's."""
    if _names_no_model(item):
        near = difflib.get_close_matches(str(item.value()), model_names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"must be one of {', '.join(model_names())}{hint}"
    key = item.key_or_group
    if key.startswith("hydra") or item.package is not None:
        return None
    known = {name: (field, value) for name, field, value in walk(Config())}
    if key not in known:
        return no_such_key(key)
    field, value = known[key]
    if item.is_add() or item.is_delete() or dataclasses.is_dataclass(value):
        return None
    return f"must be {allowed(field)}"


def _names_no_model(item: Override) -> bool:
    return item.key_or_group == "models" and item.value() not in model_names()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]

"""What is wrong with a configuration, in one line, with the nearest name where one is mistyped."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from chitu_diffusion.config.schema import Config


def explain(error: Exception, overrides: Sequence[str] = ()) -> str:
    """Describe an error of hydra or OmegaConf.

    Args:
        error: what was raised.
        overrides: the hydra overrides that were given.
    """
    text = _first_line(error) or type(error).__name__
    cause = error.__cause__
    if cause is not None and _first_line(cause):
        text = f"{text} ({_first_line(cause)})"
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if key == "models" and value not in model_names():
            choices = ", ".join(model_names())
            return f"models={value!r}: must be one of {choices}{_hint(value, model_names())}"
        if (key and key in text) or override in text:
            return f"{override}: {text}{_hint(key, _keys())}"
    key = str(getattr(error, "full_key", None) or "")
    return f"{key}: {text}{_hint(key, _keys())}" if key else text


def model_names() -> list[str]:
    """Choices of the `models` group."""
    return sorted(path.stem for path in (Path(__file__).parent / "models").glob("*.yaml"))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def _hint(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near and near[0] != name else ""


def _keys() -> list[str]:
    """All dotted keys of the schema."""

    def walk(node: DictConfig, prefix: str) -> Iterator[str]:
        for key in node:
            path = f"{prefix}{key!s}"
            yield path
            if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
                yield from walk(node[key], f"{path}.")

    return list(walk(OmegaConf.structured(Config), ""))

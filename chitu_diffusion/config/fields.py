"""What a field of the schema allows: said beside the field, and told by every error about it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def within(default: Any, low: float, high: float) -> Any:
    """A number, or a list of as many numbers as its default has, each from `low` to `high`."""
    if isinstance(default, list):
        return dataclasses.field(
            default_factory=lambda: list(default),
            metadata={"range": (low, high), "length": len(default)},
        )
    return dataclasses.field(default=default, metadata={"range": (low, high)})


def one_of(default: str, choices: Sequence[str]) -> Any:
    """One of some words."""
    return dataclasses.field(default=default, metadata={"choices": tuple(choices)})


def line(default: str) -> Any:
    """Text, which may be empty."""
    return _formed(default, "one line of text", lambda _: True)


def filled(default: str | None) -> Any:
    """Text that is not empty: an empty path would be the start directory."""
    return _formed(default, "one line of text that is not empty", lambda text: bool(text.strip()))


def device_name(default: str) -> Any:
    """A device by name."""
    named = re.compile(r"auto|cpu|cuda(:\d{1,4})?", re.ASCII)
    words = "'auto', 'cpu', 'cuda' or 'cuda:N'"
    return _formed(default, words, lambda text: named.fullmatch(text) is not None)


def endpoint(default: str | None) -> Any:
    """Where a service is."""
    words = "host:port, with a port of 0 to 65535, or unix:PATH, of at most 100 characters"
    return _formed(default, words, _is_address)


def shapes(default: str) -> Any:
    """Sizes of videos."""
    size = r"[1-9]\d{0,5}x[1-9]\d{0,5}x[1-9]\d{0,5}"
    named = re.compile(rf"default|off|{size}(, ?{size})*", re.ASCII)
    words = "'default', 'off', or frames x height x width as in '81x480x832, 1x480x832'"
    return _formed(default, words, lambda text: named.fullmatch(text) is not None)


def walk(node: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Every dotted key of a configuration, its field and its value; sections before what they have.

    A section's value is a dataclass.
    """
    for field in dataclasses.fields(node):
        key, value = f"{prefix}{field.name}", getattr(node, field.name)
        yield key, field, value
        if dataclasses.is_dataclass(value):
            yield from walk(value, f"{key}.")


def allowed(field: dataclasses.Field[Any]) -> str:
    """What a field allows, as the end of "must be ..."."""
    rule, kind = field.metadata, str(field.type)
    if "choices" in rule:
        words = f"one of {', '.join(map(repr, rule['choices']))}"
    elif "range" in rule:
        nouns = ("an integer", "integers") if "int" in kind else ("a number", "numbers")
        noun = f"{rule['length']} {nouns[1]}" if "length" in rule else nouns[0]
        words = "{} between {} and {}".format(noun, *rule["range"])
    else:
        words = rule["words"]
    return f"{words}, or null" if "None" in kind else words


def holds(field: dataclasses.Field[Any], value: Any) -> bool:
    """Whether a value of the right type is allowed."""
    rule = field.metadata
    if value is None:
        return True
    if "choices" in rule:
        return value in rule["choices"]
    if "range" not in rule:
        return bool(rule["holds"](value))
    low, high = rule["range"]
    values = value if "length" in rule else [value]
    # OmegaConf lets lists through as elements of lists of numbers; NaN is within nothing.
    return len(values) == rule.get("length", 1) and all(
        isinstance(number, int | float) and low <= number <= high for number in values
    )


def _formed(default: str | None, words: str, holds: Callable[[str], bool]) -> Any:
    def is_line(text: str) -> bool:  # YAML does not give every line end back
        return "".join(text.splitlines()) == text

    rule = {"words": words, "holds": lambda text: is_line(text) and holds(text)}
    return dataclasses.field(default=default, metadata=rule)


def _is_address(text: str) -> bool:
    if text.startswith("unix:"):  # a socket's path has a length limit of about 107 bytes
        return 1 <= len(text.removeprefix("unix:").encode()) <= 100
    host, _, port = text.rpartition(":")
    return bool(host and re.fullmatch(r"\d{1,5}", port, re.ASCII)) and int(port) <= 65535

"""A mechanism as text on a command line, and as JSON."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Sequence
from typing import Any

from ._mechanism import MechanismConfig

Value = int | float | bool | str | tuple[int, ...] | None
_WORDS: dict[str, Value] = {"true": True, "false": False, "none": None}


def parse_from(text: str, mechanisms: Sequence[type[MechanismConfig]], length: int | None = None) -> MechanismConfig:
    """The configuration called `name:field=value,...`, of one of the mechanisms.

    Values are whole numbers, several of them (0+7+9), numbers, true, false, none or text. Fields left out have their
    defaults, or where a length is given what is usual for sequences of up to so many tokens.

    Raises:
        TypeError: not a text.
        ValueError: no such mechanism or field, a field without a value or with two, a value that cannot be, a length
            of no tokens.
    """
    if not isinstance(text, str):
        raise TypeError(f"mechanism: expected text such as 'linear:feature_map=relu', got {type(text).__name__}")
    if length is not None and length < 1:
        raise ValueError(f"length: must be at least 1, got {length}")
    name, _, settings = text.partition(":")
    kind = _named(name, mechanisms)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    given: dict[str, Any] = {} if length is None else _fields(kind.usual(length))
    said: dict[str, Any] = {}
    for part in filter(None, settings.split(",")):
        field, equals, value = part.partition("=")
        if field not in fields or not equals:
            raise ValueError(f"mechanism: {name} takes {_forms(list(fields))}; got {part!r}")
        if field in said:
            raise ValueError(f"mechanism: {text}: {field} is given twice")
        said[field] = _value(value)
    try:
        return kind(**{**given, **said})
    except (TypeError, ValueError) as error:
        raise ValueError(f"mechanism: {text}: {error}") from None


def to_json(config: MechanismConfig) -> dict[str, Any]:
    """The configuration as JSON keeps it: its name and its fields."""
    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in _fields(config).items()}
    return {"name": config.name, **fields}


def from_json(values: Any, mechanisms: Sequence[type[MechanismConfig]]) -> MechanismConfig:
    """The inverse of `to_json`; fields that are not there have their defaults.

    Raises:
        ValueError: not such an object, no such mechanism or field, a value that cannot be.
    """
    if not isinstance(values, dict) or not isinstance(values.get("name"), str):
        raise ValueError(f"mechanism: expected an object with a name, got {reprlib.repr(values)}")
    kind = _named(values["name"], mechanisms)
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    del given["name"]
    unknown = sorted(set(given) - {field.name for field in dataclasses.fields(kind)})
    if unknown:
        raise ValueError(f"mechanism: {kind.name} has no {', '.join(unknown)}")
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"mechanism: {kind.name}: {error}") from None


def _named(name: str, mechanisms: Sequence[type[MechanismConfig]]) -> type[MechanismConfig]:
    for kind in mechanisms:
        if kind.name == name:
            return kind
    raise ValueError(f"mechanism: expected one of {', '.join(kind.name for kind in mechanisms)}; got {name!r}")


def _fields(config: MechanismConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}


def _forms(fields: list[str]) -> str:
    return ", ".join(f"{field}=..." for field in fields) if fields else "no settings"


def _value(text: str) -> Value:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    several = text.split("+")
    return tuple(map(int, several)) if all(part.isdecimal() for part in several) else text

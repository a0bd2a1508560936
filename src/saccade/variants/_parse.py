"""A mechanism as a command line names it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ._mechanism import MechanismConfig

Value = int | float | bool | str | None
_WORDS: dict[str, Value] = {"true": True, "false": False, "none": None}


def parse_from(text: str, mechanisms: Sequence[type[MechanismConfig]]) -> MechanismConfig:
    """The configuration called `name:field=value,...`, of one of the mechanisms; fields left out have their defaults.

    Values are whole numbers, numbers, true, false, none or text.

    Raises:
        ValueError: no such mechanism or field, a field without a value, a value that cannot be.
    """
    name, _, settings = text.partition(":")
    kind = next((kind for kind in mechanisms if kind.name == name), None)
    if kind is None:
        raise ValueError(f"mechanism: expected one of {', '.join(kind.name for kind in mechanisms)}; got {name!r}")
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    given: dict[str, Value] = {}
    for part in filter(None, settings.split(",")):
        field, equals, value = part.partition("=")
        if field not in fields or not equals:
            raise ValueError(f"mechanism: {name} takes {_forms(list(fields))}; got {part!r}")
        given[field] = _value(value)
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"mechanism: {text}: {error}") from None


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
    return text

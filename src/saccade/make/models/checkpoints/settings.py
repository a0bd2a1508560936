"""Settings of a published model: config.json, read with checks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .._shortened import shortened
from .reading import read_json

CONFIG = "config.json"
T = TypeVar("T")
_MOST = 2**31 - 1  # larger tables cannot be allocated


class CheckpointSettings:
    """Contents of config.json. Readers raise ValueError with the file, the setting, its value and the known values.

    Attributes:
        values: the whole file.
        stored: names of the tensors in the weights' files, for settings that depend on them.
        left_out: settings without a counterpart here, and their values.
        anew: whether the model is new and has no stored weights.
    """

    def __init__(self, values: Mapping[str, Any], path: Path, stored: Collection[str] = ()):
        self.values, self.path, self.stored, self.anew = dict(values), path, frozenset(stored), False
        self.left_out: dict[str, object] = {}

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value; null counts as absent."""
        value = self.values.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """An int of at least `least`; without a default the setting is required."""
        value = self._given(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
            raise self.error(name, f"an int from {least} to {_MOST}")
        return value

    def token(self, name: str, default: int, vocabulary: int) -> int:
        """A token's id."""
        value = self.count(name, default, least=0)
        if value >= vocabulary:
            raise self.error(name, f"a token's id, from 0 to {vocabulary - 1}")
        return value

    def layers(self, name: str, default: int | None = None) -> int:
        """A number of layers. At most the number of stored tensors, since every layer has tensors."""
        layers = self.count(name, default)
        if layers > len(self.stored) and not self.anew:
            raise self.error(name, f"at most {len(self.stored)}, as many as there are tensors")
        return layers

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._given(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.error(name, "a finite number")
        return float(value)

    def eps(self, name: str, default: float) -> float:
        """The epsilon of a norm, a positive number."""
        value = self.number(name, default)
        if value <= 0.0:
            raise self.error(name, "a positive number")
        return value

    def theta(self, name: str, default: float | None = None) -> float:
        """The base of rotary frequencies, a number above 1."""
        value = self.number(name, default)
        if value <= 1.0:
            raise self.error(name, "a number above 1")
        return value

    def share(self, name: str, default: float | None = None) -> float:
        """A probability below 1."""
        value = self.number(name, default)
        if not 0.0 <= value < 1.0:
            raise self.error(name, "a number in [0, 1)")
        return value

    def flag(self, name: str, default: bool | None = None) -> bool:
        """A boolean."""
        value = self._given(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def choice(self, name: str, choices: Mapping[Any, T], default: Any = None) -> T:
        """The value that `choices` has for the published value."""
        value = self._given(name, default)
        if not isinstance(value, (str, int, bool)) or value not in choices:
            raise self.error(name, f"one of {', '.join(map(repr, choices))}")
        return choices[value]

    def only(self, name: str, *allowed: object) -> None:
        """ValueError unless the setting is absent or has an allowed value."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            raise self.error(name, f"{' or '.join(map(repr, allowed))}: other values are not supported")

    def rename(self, aliases: Mapping[str, str]) -> None:
        """Rename settings from their aliases; ValueError if both names are there with different values."""
        for alias, name in aliases.items():
            if alias not in self.values:
                continue
            value = self.values.pop(alias)
            if name in self.values and self.values[name] != value:
                raise self.error(name, f"{shortened(repr(value))}, as {alias} says, which names the same setting")
            self.values[name] = value

    def error(self, name: str, expected: str) -> ValueError:
        """The error about a setting."""
        return ValueError(f"{self.path}: {name}: expected {expected}, got {shortened(repr(self.values.get(name)))}")

    def _given(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise ValueError(f"{self.path}: {name}: missing")
        return value


def read_settings(folder: Path) -> CheckpointSettings:
    """config.json of a folder. Raises a one-line FileNotFoundError or ValueError if it is missing or damaged."""
    path = folder / CONFIG
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: damaged, expected an object of model settings")
    return CheckpointSettings(values, path)

"""The parameters of a request, read one by one; errors name the parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MOST_TOKENS = 20_000  # in one list of a request
LONGEST = 200  # characters of a value that a message shows


class ParameterError(ValueError):
    """An invalid request, as one sentence for its sender."""


class Params:
    """The unchecked parameters of one request."""

    def __init__(self, given: object):
        if not isinstance(given, dict):
            raise ParameterError(f"params: expected an object, got {_shown(given)}")
        self._given: dict[Any, Any] = given

    def _value(self, name: str) -> Any:
        if name not in self._given:
            raise ParameterError(f"{name}: is missing")
        return self._given[name]

    def integer(self, name: str, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return _integer(name, self._value(name), low, high)

    def integers(self, name: str, below: int) -> list[int]:
        """Whole numbers from 0, at least one and at most 20,000, sorted and each once."""
        given = self._value(name)
        if not isinstance(given, list) or not 1 <= len(given) <= MOST_TOKENS:
            raise ParameterError(f"{name}: expected a list of 1 to {MOST_TOKENS:,} whole numbers, got {_shown(given)}")
        return sorted({_integer(name, entry, 0, below - 1) for entry in given})

    def integer_or_none(self, name: str, low: int, high: int) -> int | None:
        """As `integer`, or null."""
        return None if self._value(name) is None else self.integer(name, low, high)

    def heads(self, name: str, heads: Mapping[str, int]) -> list[tuple[str, int]]:
        """Pairs of a call and one of its heads, sorted and each once; `heads`: the number of heads of each call."""
        given = self._value(name)
        if not isinstance(given, list) or len(given) > sum(heads.values()):
            raise ParameterError(f"{name}: expected a list of pairs [call, head], got {_shown(given)}")
        pairs = set()
        for pair in given:
            if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str) or pair[0] not in heads:
                raise ParameterError(f"{name}: expected a call of this run and a head, got {_shown(pair)}")
            pairs.add((pair[0], _integer(name, pair[1], 0, heads[pair[0]] - 1)))
        return sorted(pairs)

    def span(self, most: int) -> tuple[int, int]:
        """``start`` and ``stop`` of a range within `most` places."""
        start = self.integer("start", 0, most)
        return start, self.integer("stop", start, most)

    def choice(self, name: str, among: Sequence[str]) -> str:
        given = self._value(name)
        if not isinstance(given, str) or given not in among:
            wanted = ", ".join(among[:12]) + (", ..." if len(among) > 12 else "")
            raise ParameterError(f"{name}: expected one of {wanted}, got {_shown(given)}")
        return given

    def text(self, name: str, most: int) -> str:
        """A text of at most so many characters."""
        given = self._value(name)
        if not isinstance(given, str) or len(given) > most:
            raise ParameterError(f"{name}: expected a text of at most {most:,} characters, got {_shown(given)}")
        return given

    def flag(self, name: str) -> bool:
        given = self._value(name)
        if not isinstance(given, bool):
            raise ParameterError(f"{name}: expected true or false, got {_shown(given)}")
        return given


def _integer(name: str, given: object, low: int, high: int) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not low <= given <= high:
        raise ParameterError(f"{name}: expected a whole number from {low:,} to {high:,}, got {_shown(given)}")
    return given


def _shown(given: object) -> str:
    if isinstance(given, list | dict):
        return f"{'a list' if isinstance(given, list) else 'an object'} of {len(given):,}"
    if isinstance(given, int) and not isinstance(given, bool) and abs(given) >= 10**18:
        return "a number of more than 18 digits"  # Python writes no number of over 4,300 digits
    shown = repr(given)
    return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}..."

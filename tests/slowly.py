"""Which parameters of a test stay among the fast ones."""

from __future__ import annotations

import itertools

import pytest


def slow_but(values, *fast):
    """`values` as parameters: those in `fast` as they are, the others for `pytest -m slow`."""
    assert set(fast) <= set(values)
    return [value if value in fast else _slow(value) for value in values]


def slow_after(count, values):
    """The first `count` of the values as they are, the others for `pytest -m slow`."""
    assert 0 < count < len(values)
    return [*values[:count], *map(_slow, values[count:])]


def alternate(*axes):
    """All combinations of the axes' values; every other one is for `pytest -m slow`.

    With three axes, any two values of two axes still meet.
    """
    return _combinations(axes, lambda place: sum(place) % 2 == 0)


def diagonal(*axes):
    """All combinations of the axes' values; as few as have every value once are fast."""
    fast = {tuple(n % len(axis) for axis in axes) for n in range(max(map(len, axes)))}
    return _combinations(axes, fast.__contains__)


def every_other(cases):
    """Of the collected cases of a test, those whose values stand at places of an odd sum, as in `alternate`."""
    places, odd = {}, []
    for item in cases:
        total = 0
        for names in _parameters(item):
            values = places.setdefault(names, {})
            total += values.setdefault(tuple(id(item.callspec.params[name]) for name in names), len(values))
        if total % 2:
            odd.append(item)
    return odd


def _parameters(item):
    """The names of each parametrization, then fixtures with parameters."""
    marks = [mark.args[0] for mark in item.iter_markers("parametrize")]
    named = [tuple(names.replace(" ", "").split(",") if isinstance(names, str) else names) for names in marks]
    return [*named, *((name,) for name in item.callspec.params if not any(name in names for names in named))]


def _combinations(axes, is_fast):
    places = itertools.product(*(range(len(axis)) for axis in axes))
    return [
        values if is_fast(place) else _slow(values)
        for place, values in zip(places, itertools.product(*axes), strict=True)
    ]


def _slow(value):
    """A tuple is for several arguments at once, as in `parametrize`."""
    if isinstance(value, type(pytest.param())):
        return pytest.param(*value.values, id=value.id, marks=[*value.marks, pytest.mark.slow])
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)

"""Which parameters of a test stay among the fast ones."""

from __future__ import annotations

import itertools

import pytest


def slow_but(values, *fast):
    """`values` as parameters: those in `fast` as they are, the others for `pytest -m slow`."""
    assert set(fast) <= set(values)
    return [value if value in fast else _slow(value) for value in values]


def alternate(*axes):
    """All combinations of the axes' values; every other one is for `pytest -m slow`.

    With three axes, any two values of two axes still meet.
    """
    places = itertools.product(*(range(len(axis)) for axis in axes))
    return [
        _slow(values) if sum(place) % 2 else values
        for place, values in zip(places, itertools.product(*axes), strict=True)
    ]


def _slow(value):
    """A tuple is for several arguments at once, as in `parametrize`."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)

"""Which parameters of a test stay among the fast ones."""

from __future__ import annotations

import pytest


def slow_but(values, *fast):
    """`values` as parameters: those in `fast` as they are, the others for `pytest -m slow`."""
    assert set(fast) <= set(values)
    return [value if value in fast else _slow(value) for value in values]


def _slow(value):
    """A tuple is for several arguments at once, as in `parametrize`."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)

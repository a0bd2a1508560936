"""Many small cases of one law in one test: pytest takes longer over a test than a small case does."""

from __future__ import annotations

import functools
import inspect
import random

import numpy as np
import pytest
import torch


def seed() -> None:
    """The same random numbers for each test, and for each case of one."""
    random.seed(0)
    np.random.seed(0)
    # torch.manual_seed also seeds other devices. Without one it queues the seed together with a stack trace: 1 ms.
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(0)


def looped(names, values):
    """As `pytest.mark.parametrize(names, values)`, in one test. A failure names its case; the rest is not run then.

    All cases share the test's fixtures: a test that changes one, as a folder or a model, is for `parametrize`.
    """
    names = names.replace(" ", "").split(",") if isinstance(names, str) else list(names)
    cases = [dict(zip(names, value, strict=True)) for value in _present(values, len(names))]
    assert cases, f"no cases of {names}"

    def decorate(test):
        signature = inspect.signature(test)

        @functools.wraps(test)
        def every_case(*args, **fixtures):
            for case in cases:
                seed()
                try:
                    test(*args, **fixtures, **case)
                except (Exception, pytest.fail.Exception) as error:
                    raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error

        kept = [one for name, one in signature.parameters.items() if name not in names]
        every_case.__signature__ = signature.replace(parameters=kept)
        return every_case

    return decorate


def _present(values, count):
    """Tuples of `count`, less what is skipped on this machine."""
    for value in values:
        marks = getattr(value, "marks", ())
        assert all(mark.name == "skipif" for mark in marks), f"{value} is for parametrize"
        if not any(mark.args[0] for mark in marks):
            yield value.values if marks else value if count > 1 else (value,)

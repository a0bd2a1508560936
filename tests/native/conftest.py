"""The compiled kernels: nothing here runs without them, and some tests run on every instruction set of the machine."""

from __future__ import annotations

import os

import pytest

from native import fuzzing
from saccade.operator._backends.native import _kernels

native = _kernels.module


def sets() -> list[str]:
    """What this processor reports, and what SACCADE_TEST_HIDDEN_SETS=a,b says it has though a hypervisor hides it."""
    if native is None:
        return []
    hidden = os.environ.get("SACCADE_TEST_HIDDEN_SETS", "").split(",")
    return [*native.sets(), *(f"{name}!" for name in native.compiled_sets() if name in hidden)]


def pytest_collection_modifyitems(items):
    if native is None:
        for item in items:
            if "/tests/native/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="no native build"))


@pytest.fixture
def use():
    """Forces an instruction set for the test alone."""
    before = native.active()
    yield native.use
    native.use(f"{before}!")


@pytest.fixture(scope="module", params=["the widest", pytest.param("between", marks=pytest.mark.slow)])
def every_other_set(request):
    """`each_set` is every other one: they are instances of the same templates, which test_fuzz.py tries on all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzzing, "CHOSEN", slice(0 if request.param == "the widest" else 1, None, 2))
        yield


@pytest.fixture(params=sets() or [None])
def instructions(request, use) -> str:
    """Each instruction set of this machine, in use."""
    use(request.param)
    return native.active()

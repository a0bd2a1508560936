"""The backends a contract test runs on. `chunked` runs twice: as it is, and in tiles so small that there are many.
`auto` is `chunked` in float64 and `native` in float32, to the bit in every case (test_values.py), and not asked again.

`native` has no float64: its problems are stated in float32, and the tolerances, which are derived from the dtype of the
result, follow. (Its instruction sets are the environment's: SACCADE_INSTRUCTIONS=avx2 runs all of this on that one.)
"""

from __future__ import annotations

import sys

import pytest
import torch

import problems
from problems import NATIVE

DIFFERENTIABLE = ("reference", "chunked", "chunked in small tiles")  # in every mode and order, and in float64
EXACT = (*DIFFERENTIABLE, NATIVE)  # they promise every line of the contract


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 4 rows by 5 keys and few batch items at once, so that 11 x 13 is walked in 9 tiles."""
    import saccade.operator._tiles as tiles

    assert {"ROWS", "KEYS", "GROUP"} <= set(vars(tiles)), "the chunked backend's tile sizes have moved"
    for module in [m for name, m in sys.modules.items() if name.startswith("saccade.operator._backends")]:
        for name, size in (("ROWS", 4), ("KEYS", 5), ("GROUP", 1)):
            if name in vars(module):
                monkeypatch.setattr(module, name, size)


def _prepare(request) -> str:
    if request.param == "chunked in small tiles":
        request.getfixturevalue("small_tiles")
    if request.param == "native":
        request.getfixturevalue("monkeypatch").setattr(problems, "DTYPE", torch.float32)
    return request.param.split(" ")[0]


@pytest.fixture(params=EXACT)
def exact(request) -> str:
    return _prepare(request)


@pytest.fixture(params=DIFFERENTIABLE)
def differentiable(request) -> str:
    """For forward mode and gradients of gradients, checked by finite differences."""
    return _prepare(request)


@pytest.fixture(params=("reference", "chunked", NATIVE))
def real_tiles(request) -> str:
    """The exact ones at their real tile sizes."""
    return _prepare(request)


@pytest.fixture(params=EXACT)
def backend(request) -> str:
    return _prepare(request)


@pytest.fixture(params=("reference", "chunked in small tiles"))
def twice_differentiated(request) -> str:
    """The two whose second derivatives are computed by different code."""
    return _prepare(request)


@pytest.fixture(params=("auto", "chunked in small tiles"))
def transformed(request) -> str:
    """For torch.func: `auto` is chunked in its real tiles there."""
    return _prepare(request)

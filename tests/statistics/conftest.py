"""The backends that statistics are tested on; `chunked` also in tiles so small that there are many."""

from __future__ import annotations

import sys

import pytest
import torch

import problems
from problems import NATIVE


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 4 rows by 5 keys and one item at a time, so that 11 x 13 is walked in 9 tiles."""
    import saccade.operator._statistics._visibility as sight
    import saccade.operator._tiles as tiles

    for name, size in (("ROWS", 4), ("KEYS", 5), ("GROUP", 1)):
        assert name in vars(tiles), "the tile sizes have moved"
        for module in [m for path, m in sys.modules.items() if path.startswith("saccade.operator._backends")]:
            if name in vars(module):
                monkeypatch.setattr(module, name, size)
    monkeypatch.setattr(sight, "_ROWS", 3)
    monkeypatch.setattr(sight, "_KEYS", 5)


def prepared(request) -> str:
    """The name `backend=` takes; problems are stated in float32 for a backend without float64."""
    if request.param == "chunked in small tiles":
        request.getfixturevalue("small_tiles")
    if request.param == "native":
        request.getfixturevalue("monkeypatch").setattr(problems, "DTYPE", torch.float32)
    return request.param.split(" ")[0]


@pytest.fixture(params=("reference", "chunked", "chunked in small tiles", NATIVE))
def backend(request) -> str:
    return prepared(request)

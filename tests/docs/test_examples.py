"""Examples in docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import sys
from pathlib import Path

import pytest

import saccade

SOURCES = Path(saccade.__file__).parent
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules_with_examples() -> list[str]:
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        if ">>> " in path.read_text(encoding="utf-8"):
            parts = path.relative_to(SOURCES.parent).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Accelerate keeps device and precision for the life of the process, and examples train."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_print_what_they_say(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)
    assert results.attempted and not results.failed

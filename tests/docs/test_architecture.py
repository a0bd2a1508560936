"""The page on architecture names files that are there, and its drawing is of the imports there are."""

from __future__ import annotations

import importlib.util
import re

import pytest
from pages import ROOT


@pytest.mark.slow
def test_the_drawing_is_of_the_imports_there_are():
    path = ROOT / "docs" / "figures" / "architecture.py"
    spec = importlib.util.spec_from_file_location("architecture", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.FIGURE.read_text(encoding="utf-8") == module.draw(), "python docs/figures/architecture.py"


def test_every_file_that_the_page_names_is_there():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+(?:/|\.(?:py|h|cpp)))`", page))
    files = [
        path.relative_to(ROOT).as_posix()
        for top in ("src", "native", "docs", "tests")
        for path in (ROOT / top).rglob("*")
    ]
    assert len(named) > 30
    assert not [name for name in named if not any(f"/{one}".endswith(f"/{name.rstrip('/')}") for one in files)]

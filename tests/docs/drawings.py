"""The pictures that the Python blocks of docs/drawing.md save, the same every time."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

from pages import ROOT, run_python

PAGE = ROOT / "docs" / "drawing.md"
DRAWINGS = ("map", "heads", "image", "sound")


def path_of(name: str) -> Path:
    return ROOT / "docs" / "figures" / f"drawing-{name}.svg"


def draw_all(folder: Path) -> dict[str, str]:
    """Each picture as SVG by name: no date, identifiers from a fixed seed, letters as letters."""
    import matplotlib.pyplot

    fixed = {"backend": "agg", "svg.hashsalt": "saccade", "svg.fonttype": "none"}
    environment = mock.patch.dict(os.environ, {"SOURCE_DATE_EPOCH": "0"})
    before = Path.cwd()
    os.chdir(folder)
    try:
        with environment, matplotlib.rc_context(fixed):
            run_python(PAGE)
    finally:
        os.chdir(before)
    matplotlib.pyplot.close("all")
    return {name: (folder / f"{name}.svg").read_text(encoding="utf-8") for name in DRAWINGS}

"""Shortens texts from model files, which can be of any length, to quote them in an error message."""

from __future__ import annotations

import re

_MOST = 240
_END = 80
_DIGITS = re.compile(r"\d{21,}|\d{1,3}(?:,\d{3}){7,}")


def shortened(said: object) -> str:
    """The first line of a text without its final full stop. Long numbers and long lines are abbreviated."""
    text = str(said).strip()
    line = (text.splitlines() or [type(said).__name__])[0].rstrip(".")
    line = _DIGITS.sub(lambda found: f"[{sum(map(str.isdigit, found[0]))} digits]", line)
    return line if len(line) <= _MOST else f"{line[: _MOST - _END]} ... {line[-_END:]}"

"""What a file of a model said, as part of one line of an error: whoever wrote the file chose how long it is."""

from __future__ import annotations

import re

_MOST = 240
_END = 80
_DIGITS = re.compile(r"\d{21,}|\d{1,3}(?:,\d{3}){7,}")


def shortened(said: object) -> str:
    """The first line of an error or a text, without its last full stop, its long numbers counted and its middle cut."""
    text = str(said).strip()
    line = (text.splitlines() or [type(said).__name__])[0].rstrip(".")
    line = _DIGITS.sub(lambda found: f"[{sum(map(str.isdigit, found[0]))} digits]", line)
    return line if len(line) <= _MOST else f"{line[: _MOST - _END]} ... {line[-_END:]}"

"""Which arguments name a file that a watch was saved to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WATCH_ENDINGS = (".watch", ".safetensors")
LONGEST_PATH = 4096


def is_watch_file(subject: Any) -> bool:
    """Whether this names a file as a watch is saved to, by its ending or by what it holds; any other text is a text."""
    if isinstance(subject, Path):
        return True
    if not isinstance(subject, str) or not subject or len(subject) > LONGEST_PATH:
        return False
    path = Path(subject).expanduser()
    try:
        if not path.is_file():
            return path.suffix.lower() in WATCH_ENDINGS and not any(map(str.isspace, subject))
        with path.open("rb") as file:
            beginning = file.read(9)
        size = path.stat().st_size
    except (OSError, ValueError):  # impossible as a name
        return False
    header = int.from_bytes(beginning[:8], "little")  # of a safetensors file: how long its JSON is
    return path.suffix.lower() in WATCH_ENDINGS or (beginning[8:] == b"{" and header <= size)

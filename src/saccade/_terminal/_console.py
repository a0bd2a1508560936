"""rich's console, cleaned. Not imported by the package itself: rich is for commands."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.progress import Progress, ProgressColumn
from rich.segment import Segment

from . import printable, uncleaned


class Console(rich.console.Console):
    """A console that writes its own colours, links and bars, and what `printable` makes of all text."""

    def __init__(self, *, stderr: bool = False, **options: Any):
        options.setdefault("file", uncleaned(sys.stderr if stderr else sys.stdout))
        super().__init__(stderr=stderr, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Every text passes here; what moves the cursor is marked as control."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def progress_bar(*columns: ProgressColumn, quiet: bool = False) -> Progress:
    """A bar on standard error where that is a terminal; it is gone when its block ends."""
    console = Console(stderr=True, **({"file": io.StringIO()} if quiet else {}))
    return Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True)

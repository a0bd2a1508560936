"""rich's console, cleaned. Not imported by the package itself: rich is for commands."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.progress import Progress, ProgressColumn, TaskID, TextColumn
from rich.segment import Segment

from . import printable, uncleaned

FIRST = 10.0  # seconds until the first line about what is done, where no bar can be drawn


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
    """A bar on standard error where that is a terminal; it is gone when its block ends. In a pipe: few plain lines."""
    console = Console(stderr=True, **({"file": io.StringIO()} if quiet else {}))
    kind = Progress if quiet or console.is_terminal else _ProgressLines
    return kind(*columns, console=console, disable=quiet or not console.is_terminal, transient=True)


class _ProgressLines(Progress):
    """A line after `FIRST` seconds, and whenever the time has doubled."""

    def __init__(self, *columns: ProgressColumn, **options: Any):
        super().__init__(*columns, **options)
        self._began, self._due = time.monotonic(), FIRST
        self._named = next((one.text_format for one in columns if isinstance(one, TextColumn)), "")

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        seconds, task = time.monotonic() - self._began, self._tasks[task_id]
        if seconds < self._due or not task.total or task.completed >= task.total:
            return
        self._due = 2 * seconds
        name = self._named.format(task=task).strip()
        with contextlib.suppress(OSError):  # nobody reads them any more
            text = f"saccade: {name}: {task.completed:,.0f} of {task.total:,.0f}, {seconds:.0f} s"
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

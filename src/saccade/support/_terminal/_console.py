"""rich's console, cleaned. Not imported by the package itself: rich is for commands."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment

from . import printable, uncleaned

FIRST = 10.0  # seconds until the first line about what is done, where no bar can be drawn


class Console(rich.console.Console):
    """A console that cleans all text by `printable`, but not its own colours, links and bars."""

    def __init__(self, *, stderr: bool = False, **options: Any):
        options.setdefault("file", uncleaned(sys.stderr if stderr else sys.stdout))
        super().__init__(stderr=stderr, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments whose text is made printable; control segments, which move the cursor, are unchanged."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


@contextlib.contextmanager
def progress_bar(
    title: str = "{task.description}", *, quiet: bool = False, **fields: Any
) -> Iterator[Callable[..., None]]:
    """A bar on standard error where that is a terminal, gone when the block ends; in a pipe, a few plain lines.

    Yields rich's `Progress.update` for this bar: `update(completed=3, total=7, description="...")`.

    Args:
        title: the text before the bar, in rich's format.
        fields: first values of `{task.fields[name]}` in the title.
    """
    console = Console(stderr=True, **({"file": io.StringIO()} if quiet else {}))
    kind = Progress if quiet or console.is_terminal else _ProgressLines
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"))
    disable = quiet or not console.is_terminal
    with kind(*columns, TimeRemainingColumn(), console=console, disable=disable, transient=True) as bar:
        yield functools.partial(bar.update, bar.add_task("", total=None, **fields))


class _ProgressLines(Progress):
    """A line after `FIRST` seconds, and whenever the time has doubled."""

    def __init__(self, title: TextColumn, *columns: ProgressColumn, **options: Any):
        super().__init__(title, *columns, **options)
        self._began, self._due = time.monotonic(), FIRST
        self._title = title.text_format

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        seconds, task = time.monotonic() - self._began, self._tasks[task_id]
        if seconds < self._due or not task.total or task.completed >= task.total:
            return
        self._due = 2 * seconds
        title = self._title.format(task=task).strip()
        with contextlib.suppress(OSError):  # the pipe is closed
            text = f"saccade: {title}: {task.completed:,.0f} of {task.total:,.0f}, {seconds:.0f} s"
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

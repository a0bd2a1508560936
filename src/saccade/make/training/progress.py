"""The display of a run in a terminal: a progress bar, a line for each evaluation, and sample text."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from ...support._terminal._console import Console, progress_bar
from .objective import Evaluation
from .prepared import COMMON, CurveEntry, PreparedRun, Reporter, RunRequest
from .processes import joined


class ConsoleReporter(Reporter):
    """Writes to `console`; if that is not a terminal, there is no bar and no colour.

    A context manager: leaving it removes the bar, so that errors are shown below it.

    Attributes:
        stored: the evaluation of the best weights, once the run has finished.
    """

    stored: Evaluation | None = None

    def __init__(self, run: RunRequest, console: Console | None = None, *, quiet: bool = False):
        self._run = run
        self._console = console or Console(quiet=quiet)
        self._progress = Progress(
            TextColumn("step {task.fields[at]}"),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.3f}{task.fields[metric]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None, at="0", loss=math.nan, metric="")
        self._steps, self._began = math.inf, time.monotonic()

    def __enter__(self) -> ConsoleReporter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def started(self, prepared: PreparedRun) -> None:
        *lines, last = prepared.introduction
        for line in lines:
            self._line(line)
        self._steps = prepared.settings.all_steps
        minutes = prepared.settings.minutes
        limits = [f"{self._steps:,} steps"] if math.isfinite(self._steps) else []
        limits += [] if minutes is None else [f"at most {minutes:g} minutes"]
        self._line(f"{last}; {', '.join(limits)} into {self._run.out}")
        execution, every = prepared.settings.execution.settled, prepared.settings.looks.every
        precision = "float32" if execution.precision == "no" else execution.precision
        # In a pipe there is no bar, and the first evaluation may take minutes.
        self._line(f"on {joined().device.type} in {precision}, evaluated every {every:,} steps")
        self._progress.update(self._task, total=1.0)

    def step(self, step: int, loss: float, norm: float, rate: float, tokens_per_second: float) -> None:
        at = f"{step}/{self._steps}" if math.isfinite(self._steps) else f"{step:,}"
        self._progress.update(self._task, completed=self._share(step), at=at, loss=loss)

    def _share(self, step: int) -> float:
        """Progress of the run from 0 to 1, by steps or by time, whichever ends first."""
        minutes = self._run.settings.minutes
        by_time = 0.0 if minutes is None else (time.monotonic() - self._began) / (60 * minutes)
        return max(step / self._steps, min(by_time, 1.0))

    def looked(self, entry: CurveEntry, sample: str, best: bool) -> None:
        metrics = {name: value for name, value in entry.items() if name not in COMMON}
        shown = "".join(f"  {name} {value:.4f}" for name, value in metrics.items())
        self._progress.update(self._task, metric=next((f"  {name} {value:.3f}" for name, value in metrics.items()), ""))
        self._line(
            f"step {entry['step']:>6,}  training {entry['training_loss']:.4f}  "
            f"validation {entry['validation_loss']:.4f}{shown}{' (best)' if best else '':7}  "
            f"{entry['seconds']:.0f} s"
        )
        if sample:
            # Bytes of an untrained model may be terminal escape sequences.
            printable = "".join(letter if letter.isprintable() else " " for letter in sample)
            self._line("    " + " ".join(printable.split()), style="dim")

    def finished(self, prepared: PreparedRun, stored: Evaluation) -> None:
        self.stored = stored
        self._line(prepared.conclusion(stored))

    def concluded(self, line: str) -> None:
        self._line(line)

    def warned(self, message: str) -> None:
        self._line(message)

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)


@contextlib.contextmanager
def rates_shown(steps: int, *, quiet: bool = False) -> Iterator[Callable[[float, float], None]]:
    """A progress bar for a range test. Yields a function to call with each rate and its loss."""
    title = "rate {task.fields[rate]:.1e}  loss {task.fields[loss]:.3f}"
    with progress_bar(title, quiet=quiet, rate=math.nan, loss=math.nan) as update:
        yield lambda rate, loss: update(total=steps, advance=1, rate=rate, loss=loss)

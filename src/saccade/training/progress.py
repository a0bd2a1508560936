"""Showing a run in a terminal: a progress bar, a line for each look at the validation text, and sample text."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from .._terminal._console import Console
from ..models import LanguageModel
from .data import Corpus
from .language_run import LanguageRun, Reporter


class ConsoleReporter(Reporter):
    """Writes to `console`; where that is no terminal, there is no bar and every line is plain.

    A context manager, so that the bar is gone before an error is shown.
    """

    def __init__(self, run: LanguageRun, console: Console | None = None, *, quiet: bool = False):
        self._run = run
        self._console = console or Console(quiet=quiet)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  |g| {task.fields[norm]:.2f}  {task.fields[speed]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=run.settings.all_steps, loss=math.nan, norm=math.nan, speed=0.0)

    def __enter__(self) -> ConsoleReporter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def started(self, lm: LanguageModel, corpus: Corpus) -> None:
        config = lm.model.config
        self._line(
            f"{lm.model.parameter_count():,} parameters: {config.layers} layers, {config.heads} heads, "
            f"width {config.width}, context {config.context}, {config.vocabulary} tokens in the vocabulary"
            + ("" if config.mechanism is None else f"; {config.mechanism}")
        )
        self._line(
            f"{corpus.training.shape[0]:,} tokens to train on, {corpus.validation.shape[0]:,} to validate; "
            f"{self._run.settings.all_steps:,} steps into {self._run.out}"
        )

    def step(self, step: int, loss: float, norm: float, rate: float, tokens_per_second: float) -> None:
        self._progress.update(self._task, completed=step, loss=loss, norm=norm, speed=tokens_per_second)

    def looked(self, entry: dict[str, float], sample: str, best: bool) -> None:
        self._line(
            f"step {entry['step']:>6,}  training {entry['training_loss']:.4f}  "
            f"validation {entry['validation_loss']:.4f}{' (best)' if best else '':7}  "
            f"gradient norm {entry['norm']:.2f}  {entry['tokens_per_second']:,.0f} tokens/s  {entry['seconds']:.0f} s"
        )
        if sample:
            # A young model's bytes are anything, terminal escapes included.
            printable = "".join(letter if letter.isprintable() else " " for letter in sample)
            self._line("    " + " ".join(printable.split()), style="dim")

    def finished(self, validation_loss: float) -> None:
        self._line(f"best weights, over the whole validation text: {validation_loss:.4f} nats per token")

    def warned(self, message: str) -> None:
        self._line(message)

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)


@contextlib.contextmanager
def rates_shown(steps: int, *, quiet: bool = False) -> Iterator[Callable[[float, float], None]]:
    """A bar for a range test, in a terminal; what it gives is told of each rate and its loss."""
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("rate {task.fields[rate]:.1e}  loss {task.fields[loss]:.3f}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=quiet or not console.is_terminal,
    )
    with progress:
        task = progress.add_task("", total=steps, rate=math.nan, loss=math.nan)
        yield lambda rate, loss: progress.update(task, advance=1, rate=rate, loss=loss)

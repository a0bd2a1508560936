"""`saccade train TASK DATA --search N`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .._errors import UserError
from .._task_options import TaskFileOptions
from ._run_options import ending

if TYPE_CHECKING:
    from ...make.tasks import SearchReporter


def train_search(task: str, data: Path, files: TaskFileOptions, options: dict[str, Any], trials: int) -> None:
    """Run the trials one after another and show the results. `options` has only options that were given."""
    began = time.perf_counter()
    if trials < 1:
        raise UserError(f"--search {trials}: must be at least 1")
    from ...make.tasks._searching._search import search_request, search_requested

    minutes = options.pop("minutes", None)
    wanted = search_request(
        task,
        data,
        files.out,
        {**options, "share": files.share},
        trials=trials,
        minutes=minutes,
        validation=files.validation,
        initial=files.initial,
        overwrite=files.overwrite,
        resume=files.resume,
    )
    count = len(wanted.run.training)
    typer.echo(f"{task}: at most {trials} trials on {count:,} examples into {files.out}, a line after each")
    with ending(files.out):
        result = search_requested(wanted, _reporter(trials), began)
    typer.echo(f"\n{result}\npicture: {files.out / 'search.png'}")


def _reporter(trials: int) -> SearchReporter:
    """Prints a line for each trial, with a progress bar for the current one in a terminal."""
    from ...make.tasks import SearchReporter
    from ...make.training import Reporter
    from ...make.training.progress import ConsoleReporter

    class Brief(ConsoleReporter):
        """Shows only a trial's progress bar and its warnings."""

        def __init__(self, run: Any):
            super().__init__(run)
            self._progress.live.transient = True

        def _line(self, text: str, style: str = "") -> None: ...

        def warned(self, message: str) -> None:
            super()._line(message)

    class Lines(SearchReporter):
        @contextlib.contextmanager
        def began(self, trial: Any, run: Any) -> Iterator[Reporter]:
            with Brief(run) as reporter:
                yield reporter

        def ended(self, trial: Any, *, best: bool) -> None:
            settings = "  ".join(f"{name} {value}" for name, value in trial.shown_settings.items())
            metrics = "  ".join(f"{name} {value:.4f}" for name, value in trial.metrics.items())
            came = metrics or f"{trial.state} at step {trial.steps:,}"
            line = f"trial {trial.number} of {trials}: {settings}: {came}  {trial.seconds:.0f} s"
            typer.echo(f"{line} (best)" if best else line)

    return Lines()

"""The folder of a search: search.json with its trials, the run of the best one so far, and that of the one in progress.

Trials run in folders of their own. One that is the best moves up into the search's folder, all others go: there are
never more than two models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ....support._whole_file import whole_file
from ...models.checkpoints.reading import read_json
from ...models.decoder_lm.checkpoint import CARD, write_text
from ...training.run_folder.checkpoint_files import checkpoints, remove
from ...training.run_folder.layout import (
    FOLDER,
    OURS,
    SEARCH,
    SEARCH_PICTURE,
    TASK,
    check_barely_begun,
    check_output,
    check_still_new,
    clear,
    lock_existing,
    make_folder,
    task_of,
    unfinished_files,
    way_out,
)
from ...training.run_folder.scalars import LOG, log_files
from .._runs._request import TaskRun

RUNNING, ENDED, PRUNED, DIVERGED, TOO_LARGE = "running", "ended", "pruned", "diverged", "out of memory"
_TRIAL = "trial-"


@dataclasses.dataclass(frozen=True)
class Trial:
    """A run of a search.

    Attributes:
        number: counted from 1.
        settings: what was tried, by option.
        state: "running"; "ended" by itself; "pruned": its looks were worse than those of most other trials; "diverged";
            "out of memory".
        looks: the cost after each look at the validation data, the lower the better.
        metrics, loss, cost: of its best weights, on the validation data, if it ended; runs are judged by `cost`.
        steps, seconds: that it took.

    Example:
        >>> import saccade
        >>> trial = saccade.tasks.Trial(number=1, settings={"rate": 0.0005, "batch": 32})  # as in `SearchResult.trials`
        >>> trial.shown_settings
        {'rate': '0.0005', 'batch': '32'}
    """

    number: int
    settings: dict[str, Any]
    state: str = RUNNING
    looks: tuple[float, ...] = ()
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    loss: float | None = None
    cost: float | None = None
    steps: int = 0
    seconds: float = 0.0

    @property
    def shown_settings(self) -> dict[str, str]:
        """The settings as text for the command line."""
        return {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in self.settings.items()}


@dataclasses.dataclass(frozen=True)
class Trials:
    """The trials of a search in order; a running one is the last."""

    asked: dict[str, Any]
    all: tuple[Trial, ...] = ()

    @property
    def done(self) -> list[Trial]:
        return [trial for trial in self.all if trial.state != RUNNING]

    @property
    def running(self) -> Trial | None:
        return self.all[-1] if self.all and self.all[-1].state == RUNNING else None

    @property
    def best(self) -> Trial | None:
        return next(iter(ranked(self.all)), None)

    def with_trial(self, trial: Trial) -> Trials:
        """The trials with this one, which replaces the one with its number."""
        return dataclasses.replace(self, all=(*self.all[: trial.number - 1], trial))

    def write(self, path: Path) -> None:
        values = {"asked": self.asked, "trials": [dataclasses.asdict(trial) for trial in self.all]}
        with whole_file(path, durable=True) as temporary:
            temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def ranked(trials: Iterable[Trial]) -> list[Trial]:
    """The trials that ended, the best first; in a tie, the trial with the lower loss."""
    ended = [trial for trial in trials if trial.state == ENDED]
    return sorted(ended, key=lambda trial: (trial.cost, trial.loss))


def read_trials(path: Path) -> Trials:
    """Read the file of `Trials.write`. ValueError if it is damaged."""
    values = read_json(path)
    try:
        trials = [Trial(**{**trial, "looks": tuple(trial["looks"])}) for trial in values["trials"]]
        return Trials(values["asked"], tuple(trials))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: damaged ({error})") from None


def trial_folder(out: Path, number: int) -> Path:
    """The folder of a trial's run."""
    return out / f"{_TRIAL}{number:03d}"


@contextlib.contextmanager
def opened(run: TaskRun, asked: dict[str, object]) -> Iterator[Trials]:
    """The trials in the folder, which stays locked in the context. Errors as of `run_training`."""
    out = run.out
    with contextlib.ExitStack() as held:
        lock = lock_existing(out, ours=run.resume or run.overwrite)
        if lock is not None:
            held.callback(lock.close)
        trials = _stored(out, asked) if run.resume else Trials(asked)
        if not run.resume:
            check_output(out, run.overwrite)
        taken = make_folder(out, lock)
        if taken is not lock:
            held.callback(taken.close)
        if not run.resume:
            if not run.overwrite:
                check_still_new(out)
            _begin(out)
        _tidy(out, trials)
        yield trials


def _stored(out: Path, asked: dict[str, object]) -> Trials:
    from ...training.run_folder.resume import refuse_another

    path = out / SEARCH
    if path.is_file():
        trials = read_trials(path)
        refuse_another(asked, trials.asked, path)
        return trials
    if not (out / FOLDER).is_dir() or task_of(out) is not None:
        raise FileNotFoundError(f"{out}: no search to resume (no {SEARCH} in it); {way_out(out)}")
    check_barely_begun(out)
    return Trials(asked)


def _begin(out: Path) -> None:
    """Remove the files of an earlier search."""
    clear(out)
    _remove_run(out)
    for folder in _trial_folders(out) if (out / SEARCH).is_file() else []:
        shutil.rmtree(folder)
    for name in (SEARCH, SEARCH_PICTURE):
        (out / name).unlink(missing_ok=True)


def _tidy(out: Path, trials: Trials) -> None:
    """Finish the move or the removal of trials' folders that a kill interrupted."""
    best = trials.best
    remove(unfinished_files(out))
    for path in out.glob(f".{_TRIAL}*"):
        shutil.rmtree(path)
    for folder in _trial_folders(out):
        number = int(folder.name.removeprefix(_TRIAL))
        if number <= len(trials.done):
            if best is not None and best.number == number and (folder / TASK).exists():
                promote(out, folder)
            shutil.rmtree(folder)


def _trial_folders(out: Path) -> list[Path]:
    return [path for path in out.glob(f"{_TRIAL}*") if path.name.removeprefix(_TRIAL).isdecimal() and path.is_dir()]


def promote(out: Path, folder: Path) -> None:
    """Move the run of a trial into `out`; after a kill it can be called again."""
    if (out / TASK).exists():
        clear(out)
        _remove_run(out)
    name, card = out.resolve().name, (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).exists() else ""
    for path in (*checkpoints(folder / FOLDER), *log_files(folder / LOG)):
        target = out / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        path.replace(target)
    for path in folder.iterdir():
        if path.is_file() and path.name not in (TASK, CARD):
            path.replace(out / path.name)
    if card:
        write_text(out / CARD, card.replace(f"# {folder.name}\n", f"# {name}\n", 1))
    (folder / TASK).replace(out / TASK)  # the last: then a whole run stands there


def _remove_run(out: Path) -> None:
    """The files of a run, task.json last, in the order of removal."""
    for name in OURS:
        if name not in (SEARCH, SEARCH_PICTURE, TASK):
            (out / name).unlink(missing_ok=True)
    (out / TASK).unlink(missing_ok=True)

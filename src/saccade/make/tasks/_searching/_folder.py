"""The folder of a search: search.json, the run of the best trial so far, and that of the trial in progress.

Trials run in folders of their own. One that is the best moves up into the search's folder, all others go: there are
never more than two models.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

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
from ._trials import Trials, read_trials

_TRIAL = "trial-"


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

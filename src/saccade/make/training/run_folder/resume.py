"""Resuming: the settings stored in checkpoints, compared with the settings of the run that continues."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..prepared import RunRequest
from ..settings import Settings
from .checkpoint_files import DamagedCheckpoint, checkpoints, read_checkpoint
from .layout import FOLDER, LANGUAGE, check_barely_begun, way_out

VERSION = 2
DATA = (" text", " data")  # endings of the names of input files

R = TypeVar("R", bound=RunRequest)


@dataclasses.dataclass(frozen=True)
class LatestCheckpoint:
    """The newest readable checkpoint of a run, and the damaged ones that were skipped.

    Args:
        path, state: of the checkpoint; None and empty if the run was stopped before its first.
        damaged: an error message for each damaged checkpoint.
    """

    path: Path | None
    state: dict[str, Any]
    damaged: tuple[str, ...]


def settings_described(settings: Settings) -> dict[str, Any]:
    """All settings that affect the result, by the names of their options.

    Settings of evaluation (`EvaluationSettings`), `minutes` and `context_parallel` are left out: they may change when a
    run is resumed.
    """
    described = dataclasses.asdict(dataclasses.replace(settings, execution=settings.execution.settled))
    del described["looks"], described["minutes"]
    execution = described.pop("execution")
    del execution["context_parallel"]
    return {**described, **execution}


def check_same(asked: dict[str, Any], state: dict[str, Any], path: Path) -> None:
    """ValueError that lists each setting in which the run differs from the checkpoint `path`.

    A finished run may get more steps.
    """
    stored = state["run"]
    over = (
        stored["steps"] is not None and state["loop"]["progress"]["step"] >= stored.get("copying", 0) + stored["steps"]
    )
    more = over and asked["steps"] is not None and asked["steps"] > stored["steps"]
    refuse_another(asked, {**stored, "steps": asked["steps"]} if more else stored, path)


def refuse_another(asked: dict[str, Any], stored: dict[str, Any], path: Path) -> None:
    """ValueError that lists each field whose requested value differs from the one stored at `path`."""
    names = [*stored, *(name for name in asked if name not in stored)]
    differ = [name for name in names if asked.get(name) != stored.get(name)]
    if not differ:
        return
    # Numbers first, then the files that were read.
    differ.sort(key=lambda name: (name == "from", name.endswith(DATA)))
    listed = [_difference(name, _short(asked.get(name)), _short(stored.get(name))) for name in differ]
    raise ValueError(f"resume: {path} is of another run: {'; '.join(listed)}")


def as_begun(run: R, checkpoint: LatestCheckpoint | None) -> R:
    """The run with the precision of its checkpoint if the requested one is "auto"; for a new run, "auto" is resolved.

    A run may be resumed on another machine, where "auto" would mean another precision.
    """
    execution = run.settings.execution
    if checkpoint is not None and checkpoint.path is not None and execution.precision == "auto":
        execution = dataclasses.replace(execution, precision=checkpoint.state["run"]["precision"])
    settings = dataclasses.replace(run.settings, execution=execution.settled)
    return dataclasses.replace(run, settings=settings)  # type: ignore[type-var]  # every request is a dataclass


def newest(out: Path, task: str) -> LatestCheckpoint:
    """The newest readable checkpoint of the run in `out`.

    Raises:
        FileNotFoundError: `out` contains no run.
        ValueError: the run is of another task.
        FileExistsError: no checkpoint, but files that a run which has just begun does not have.
        ValueError: no checkpoint can be read.
    """
    folder = out / FOLDER
    if not folder.is_dir():
        raise FileNotFoundError(f"{out}: nothing to resume (no {FOLDER} in it); {way_out(out)}")
    damaged: list[str] = []
    for path in checkpoints(folder):
        try:
            state = read_checkpoint(path)
            if state.get("version") != VERSION:
                raise DamagedCheckpoint(f"{path}: written by another version of saccade")
        except (DamagedCheckpoint, OSError) as error:
            damaged.append(" ".join(str(error).split()))
        else:
            check_task(out, state["run"].get("task", LANGUAGE), task)
            return LatestCheckpoint(path, state, tuple(damaged))
    if damaged:
        raise ValueError(f"{out}: none of its checkpoints can be read: {'; '.join(damaged)}; {way_out(out)}")
    check_barely_begun(out)
    return LatestCheckpoint(None, {}, ())


def check_task(out: Path, text: str, asked: str) -> None:
    """ValueError if a folder's run is of another task."""
    if text != asked:
        raise ValueError(f"{out}: is a run of the task {text}, not of {asked}; give a folder of {asked}")


def sha256(parts: Iterable[bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return "sha256:" + whole.hexdigest()


def digest(paths: Sequence[Path]) -> str:
    """SHA-256 of the contents of files, and of the names and contents of all files below folders."""
    files = [(path, file) for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    named = ((file.relative_to(path).as_posix().encode(), file) for path, file in files if file.is_file())
    return sha256(part for name, file in named for part in (name, file.read_bytes()))


def _difference(name: str, asked: str, stored: str) -> str:
    if name.endswith(DATA):
        return f"the {name} is not the one it was trained with (SHA-256 {asked}, was {stored})"
    return f"{name} {asked} (asked for) / {stored} (in the checkpoint)"


def _short(value: Any) -> str:
    return value[7:19] if isinstance(value, str) and value.startswith("sha256:") else str(value)

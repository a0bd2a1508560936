"""What a run was begun with, kept in its checkpoints, and whether a run that continues it asks for the same."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .files import DamagedCheckpoint, checkpoints, read_checkpoint
from .folder import FOLDER, LANGUAGE, check_barely_begun, way_out
from .prepared import RunRequest
from .settings import Settings

VERSION = 2
DATA = (" text", " data")  # how names of what a run reads end

R = TypeVar("R", bound=RunRequest)


@dataclasses.dataclass(frozen=True)
class LatestCheckpoint:
    """The newest whole checkpoint of a run (None: it was stopped before its first), and the damaged ones passed over.

    Args:
        path, state: of the checkpoint; without one, the state is empty.
        damaged: a line for each.
    """

    path: Path | None
    state: dict[str, Any]
    damaged: tuple[str, ...]


def settings_described(settings: Settings) -> dict[str, Any]:
    """All settings that decide what a run learns, by their options.

    How a run is looked at (`EvaluationSettings`) is not part of it and may change when it is resumed; the same holds
    for its minutes, which no two runs spend alike.
    """
    described = dataclasses.asdict(dataclasses.replace(settings, execution=settings.execution.settled))
    del described["looks"], described["minutes"]
    execution = described.pop("execution")
    return {**described, **execution}


def check_same(asked: dict[str, Any], state: dict[str, Any], path: Path) -> None:
    """ValueError that names each field in which the run asked for is not the one in the checkpoint `path`.

    Of a run that is over more steps may be asked for.
    """
    stored = state["run"]
    over = (
        stored["steps"] is not None and state["loop"]["progress"]["step"] >= stored.get("copying", 0) + stored["steps"]
    )
    more = over and asked["steps"] is not None and asked["steps"] > stored["steps"]
    refuse_another(asked, {**stored, "steps": asked["steps"]} if more else stored, path)


def refuse_another(asked: dict[str, Any], stored: dict[str, Any], path: Path) -> None:
    """ValueError that names each field whose requested value differs from the one stored at `path`."""
    names = [*stored, *(name for name in asked if name not in stored)]
    differ = [name for name in names if asked.get(name) != stored.get(name)]
    if not differ:
        return
    # Numbers first, then the files that the run read.
    differ.sort(key=lambda name: (name == "from", name.endswith(DATA)))
    listed = [_difference(name, _short(asked.get(name)), _short(stored.get(name))) for name in differ]
    raise ValueError(f"resume: {path} is of another run: {'; '.join(listed)}")


def as_begun(run: R, checkpoint: LatestCheckpoint | None) -> R:
    """The run with the precision it has been computed in, where none is asked for ("auto"), or what "auto" is here.

    A run may go on on another kind of machine, where "auto" by itself would be something else.
    """
    execution = run.settings.execution
    if checkpoint is not None and checkpoint.path is not None and execution.precision == "auto":
        execution = dataclasses.replace(execution, precision=checkpoint.state["run"]["precision"])
    settings = dataclasses.replace(run.settings, execution=execution.settled)
    return dataclasses.replace(run, settings=settings)  # type: ignore[type-var]  # every request is a dataclass


def newest(out: Path, task: str) -> LatestCheckpoint:
    """The newest whole checkpoint of the run in `out`.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: it is one of another task.
        FileExistsError: there is no checkpoint, but more than the beginning of a run.
        ValueError: there are checkpoints, and none can be read.
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
    """ValueError where a folder's run is of another task."""
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

"""task.json of a run's folder: the task, its options and its data."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from ...models.checkpoints.hub import folder_of
from ...models.checkpoints.reading import find_weights, read_json
from ...training.run_folder.layout import TASK, is_ours, task_of
from ...training.run_folder.resume import digest, sha256
from .._task import Task
from ._registry import TESTED, task_with


@dataclasses.dataclass(frozen=True)
class TaskFile:
    """The content of task.json.

    Args:
        task: with all its fields, the learned ones included.
        data, validation: what was read; without a file for validation a share was split off by the seed.
        digests: SHA-256 of what was read, by path: a baseline is trained on the same data or not at all.
        seed, share: of the split.
    """

    task: Task
    data: Path
    validation: Path | None
    digests: dict[str, str]
    seed: int
    share: float

    def changed(self) -> str | None:
        """Which training data are missing or have changed, as text; None if they are the same."""
        for path, known in self.digests.items():
            files = self.task.files(Path(path))
            if not all(file.exists() for file in files):
                return f"{path}, which the run was trained on, is not there any more"
            if digest(files) != known:
                return f"{path} is not what the run was trained on any more"
        return None

    def to_json(self) -> str:
        values = {
            "task": self.task.name,
            "options": dataclasses.asdict(self.task),
            "data": str(self.data),
            "validation": None if self.validation is None else str(self.validation),
            "sha256": self.digests,
            "seed": self.seed,
            "share": self.share,
        }
        return json.dumps(values, indent=1) + "\n"


def read_task_file(folder: Path) -> TaskFile:
    """task.json of a run's folder.

    Raises:
        FileNotFoundError: no such folder. ValueError: no run of a task, a damaged file.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; expected the --out of `saccade train`")
    name = task_of(folder)
    if name is None and any(folder.glob(f"seed-*/{TASK}")):
        raise ValueError(f"{folder}: holds runs of several seeds; expected one of them, such as {folder}/seed-0")
    if name is None and is_ours(folder):
        raise ValueError(f"{folder}: has no model yet; give its `saccade train` again, with --resume to go on")
    if name is None:
        raise ValueError(f"{folder}: is not a run of `saccade train`, it has no {TASK}")
    if name not in TESTED:
        raise ValueError(f"{folder}: is a run of the task {name}; expected one of {', '.join(TESTED)}")
    if not (folder / TASK).is_file():  # a language model of before, or one that was trained elsewhere
        return TaskFile(task_with(name, {}), folder, None, {}, 0, 0.0)
    values = read_json(folder / TASK)
    try:
        return _parsed(values)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{folder / TASK}: damaged ({error})") from None


def _parsed(values: dict[str, Any]) -> TaskFile:
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in values["options"].items()}
    validation = values["validation"]
    return TaskFile(
        task_with(values["task"], options),
        Path(values["data"]),
        None if validation is None else Path(validation),
        dict(values["sha256"]),
        int(values["seed"]),
        float(values["share"]),
    )


def weights_digest(source: Path | str) -> str:
    """SHA-256 of a checkpoint's files of weights."""
    files = sorted({stored.file for stored in find_weights(folder_of(source)).tensors.values()})
    return sha256(file.read_bytes() for file in files)


def check_elsewhere(out: Path, folder: Path) -> None:
    """ValueError if a run would be written into the folder of the run whose weights it needs."""
    if out.resolve() == folder.resolve():
        raise ValueError(f"out: {out} is the folder of the run it starts from; give another folder")

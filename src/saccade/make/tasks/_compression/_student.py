"""The model that learns from a teacher: the teacher's configuration with other sizes, another one, or a checkpoint."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....support._plain_values import parsed_json
from ...models import Model
from ...models.checkpoints.reading import read_json
from ...models.checkpoints.settings import CONFIG
from ...models.loading import new_model
from ...models.model import COMPANIONS
from ...models.pruned_heads import PRUNED
from ...training.run_folder.layout import TASK
from .._runs._run_folder import read_task_file
from .._temporary import kept_while_used, temporary_folder

_NAMES = {  # what settings are called, in config.json of one family or another
    "layers": ("num_hidden_layers", "n_layers", "n_layer", "num_layers"),
    "width": ("hidden_size", "dim", "n_embd"),
    "heads": ("num_attention_heads", "n_heads", "n_head", "num_heads"),
    "hidden": ("intermediate_size", "hidden_dim", "n_inner"),
}
_BLOCK = re.compile(r"(?<=\bblocks\.)\d+(?=\.)")


@dataclasses.dataclass(frozen=True)
class Student:
    """The requested student.

    Args:
        settings: what differs from the teacher's config.json, by its names or as `layers`, `width`, `heads` and
            `hidden`; with a `model_type` all of a config.json.
        initial: a run's folder, a published model's, or a name on the hub; None: a new model.
    """

    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    initial: str | None = None

    @classmethod
    def of(cls, given: str | Path | Mapping[str, Any]) -> Student:
        """Settings, also as `layers=2,width=128`; the file of a config.json; or a checkpoint.

        Raises:
            ValueError: invalid settings.
        """
        if isinstance(given, Mapping):
            return cls(given)
        path, text = Path(given), str(given)
        if path.suffix == ".json" and not path.is_dir():
            values = read_json(path)
            if not isinstance(values, dict) or "model_type" not in values:
                raise ValueError(f"{path}: names no model_type; expected the config.json of a published model")
            return cls(values)
        return cls(_parsed(text)) if "=" in text and not path.exists() else cls(initial=text)

    def __str__(self) -> str:
        return self.initial or ", ".join(f"{name}={value}" for name, value in self.settings.items())

    def config(self, teacher: Model) -> dict[str, Any]:
        """config.json of a new student. ValueError for another vocabulary than the teacher's."""
        if "model_type" in self.settings:
            config = {**self.settings}
        else:
            config = _changed(teacher.settings.values, self.settings)
        size = teacher.settings.get("vocab_size")
        if size is not None and config.setdefault("vocab_size", size) != size:
            raise ValueError(
                f"student: vocab_size is {config['vocab_size']}, and the teacher's {size}; a new student reads the "
                "teacher's tokens"
            )
        return config

    def new_model(self, teacher: Model, labels: Sequence[str]) -> Model:
        """A model with the teacher's inputs; with its weights where only the number of blocks differs."""
        config, folder = self.config(teacher), temporary_folder()
        assert teacher.folder is not None
        for name in COMPANIONS:
            if (teacher.folder / name).is_file():
                shutil.copyfile(teacher.folder / name, folder / name)
        try:
            model = new_model(folder, head=teacher.request.head, labels=list(labels) or None, **config)
        except ValueError as error:
            shutil.rmtree(folder)
            raise ValueError(f"student: {str(error).removeprefix(f'{folder / CONFIG}: ')}") from None
        if self.blocks(teacher):
            _take_blocks(model, teacher, self.blocks(teacher))
        return kept_while_used(model, folder)

    def blocks(self, teacher: Model) -> list[int]:
        """The teacher's blocks with which a new student begins, evenly spaced (Sanh et al., DistilBERT, 2019: of 12
        blocks 0, 2, 4, 7, 9 and 11); empty unless the student is a shallower copy of its teacher."""
        name, own = _name("layers", teacher.settings.values), teacher.settings.values
        config = self.config(teacher)
        alike = all(config.get(key) == value for key, value in own.items() if key != name)
        if self.initial is not None or name is None or not alike or config[name] > own[name]:
            return []
        count = config[name]
        return [round(n * (own[name] - 1) / max(count - 1, 1)) for n in range(count)]

    def check_labels(self, task: str, labels: Sequence[str]) -> None:
        """ValueError if the student is a run of the same task with other labels."""
        folder = Path(self.initial or "")
        if self.initial is None or not (folder / TASK).is_file():
            return
        known = read_task_file(folder).task
        labels_there = getattr(known, "label_names", ())
        if known.name == task and list(labels_there) != list(labels):
            raise ValueError(
                f"student: {folder} has the labels {', '.join(labels_there)}; its teacher has {', '.join(labels)}"
            )


def _parsed(text: str) -> dict[str, Any]:
    found = {}
    for one in text.split(","):
        name, equals, value = one.strip().partition("=")
        if not equals or not name or not value:
            raise ValueError(f"student: expected settings such as layers=2,width=128, got {one.strip()!r} in {text!r}")
        try:
            found[name] = parsed_json(value)
        except ValueError:
            found[name] = value
    return found


def _name(setting: str, config: Mapping[str, Any]) -> str | None:
    return next((name for name in _NAMES[setting] if isinstance(config.get(name), int)), None)


def _changed(teacher: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The teacher's config.json with other settings; sizes that depend on the width follow it."""
    sizes = {name: settings[name] for name in _NAMES if name in settings}
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"student: {name}: expected an int of at least 1, got {value!r}")
        if _name(name, teacher) is None:
            raise ValueError(f"student: {name}: the teacher's config.json has no such setting; give all of a config")
    unknown = [name for name in settings if name not in _NAMES and name not in teacher]
    if unknown:
        raise ValueError(
            f"student: {unknown[0]}: is neither one of {', '.join(_NAMES)} nor a setting of the teacher's config.json"
        )
    if "width" in sizes:
        old, new = _size("width", teacher), sizes["width"]
        heads, hidden = _size("heads", teacher), _size("hidden", teacher)
        sizes.setdefault("heads", max(n for n in range(1, heads + 1) if new % n == 0))
        if hidden:
            sizes.setdefault("hidden", max(round(new * hidden / old), 1))
    named = {str(_name(name, teacher)): value for name, value in sizes.items()}
    others = {name: value for name, value in settings.items() if name not in _NAMES}
    return {**{name: value for name, value in teacher.items() if name != PRUNED}, **named, **others}


def _size(setting: str, config: Mapping[str, Any]) -> int:
    return int(config.get(_name(setting, config) or "", 0))


def _take_blocks(student: Model, teacher: Model, blocks: Sequence[int]) -> None:
    """Copy the teacher's weights of the chosen blocks, and all others that the student has."""
    weights = teacher.state_dict()
    student.load_state_dict(
        {name: weights[_BLOCK.sub(lambda n: str(blocks[int(n[0])]), name)] for name in student.state_dict()}
    )

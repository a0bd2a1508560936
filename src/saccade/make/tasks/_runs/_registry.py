"""The tasks by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ..._task_registry import TASK_CLASSES, ClassifyOptions
from .._language import Language
from .._several_labels import ClassifySeveral
from .._task import Task


def _task_class(place: str) -> type[Task]:
    """`tag.Tag` is the class Tag in tag.py."""
    module, _, name = place.partition(".")
    kind: type[Task] = getattr(import_module(f"...{module}", __name__), name)
    return kind


TASKS = {options.name: _task_class(place) for place, options in TASK_CLASSES.items()}
TESTED: dict[str, type[Task]] = {**TASKS, Language.name: Language}
"""Tasks whose runs are tested and predict: a language model is trained by another command."""


def task_with(name: str, options: Mapping[str, Any]) -> Task:
    """The task of this name with these options; the option `several` selects another class of task."""
    several = name == ClassifyOptions.name and options.get("several") is not None
    return (ClassifySeveral if several else TESTED[name])(**options)

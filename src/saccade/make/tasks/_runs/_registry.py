"""The tasks by name. A new one is a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._language import Language
from .._several_labels import ClassifySeveral
from .._task import Task
from ..answer import Answer
from ..classify import Classify
from ..forecast import Forecast
from ..graph import ClassifyNodes
from ..image import ClassifyImages
from ..mlm import Mlm
from ..speech import Speech
from ..tag import Tag
from ..translate import Translate

TASKS: dict[str, type[Task]] = {
    kind.name: kind for kind in (Classify, Tag, Answer, Translate, Mlm, ClassifyImages, Speech, Forecast, ClassifyNodes)
}
TESTED: dict[str, type[Task]] = {**TASKS, Language.name: Language}
"""Tasks whose runs are tested and predict: a language model is trained by another command."""


def task_with(name: str, options: Mapping[str, Any]) -> Task:
    """A task with these options, which may make it one of another kind."""
    several = name == Classify.name and options.get("several") is not None
    return (ClassifySeveral if several else TESTED[name])(**options)

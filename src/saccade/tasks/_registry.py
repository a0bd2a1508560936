"""The tasks by name. A new one is a file and a line here."""

from __future__ import annotations

from ._task import Task
from .answer import Answer
from .classify import Classify
from .tag import Tag

TASKS: dict[str, type[Task]] = {kind.name: kind for kind in (Classify, Tag, Answer)}

"""The tasks by name. A new one is a file and a line here."""

from __future__ import annotations

from ._task import Task
from .answer import Answer
from .classify import Classify
from .forecast import Forecast
from .graph import ClassifyNodes
from .image import ClassifyImages
from .mlm import Mlm
from .speech import Speech
from .tag import Tag
from .translate import Translate

TASKS: dict[str, type[Task]] = {
    kind.name: kind for kind in (Classify, Tag, Answer, Translate, Mlm, ClassifyImages, Speech, Forecast, ClassifyNodes)
}

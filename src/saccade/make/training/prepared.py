"""Interfaces of a run: its request, what it trains and writes, and the callbacks for its events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from .objective import Evaluation, Objective
from .settings import Settings
from .verdict import verdict as run_verdict

CurveEntry = dict[str, float]
"""One line of `curve.jsonl`: the `COMMON` fields of an evaluation, with the task's metrics after the losses."""
COMMON = ("step", "training_loss", "validation_loss", "norm", "tokens_per_second", "seconds")


class RunRequest(Protocol):
    """Fields of every run's request; each task adds its data and its model.

    Attributes:
        task_name: the name of the task in `saccade train`.
        out: the folder to write; one that exists raises an error unless `overwrite`.
        resume: continue the run in `out`; a finished run continues if `steps` is larger than before.
    """

    @property
    def task_name(self) -> str: ...
    @property
    def out(self) -> Path: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def overwrite(self) -> bool: ...
    @property
    def resume(self) -> bool: ...


def check_one(run: RunRequest) -> None:
    """ValueError if a run has both `resume` and `overwrite`."""
    if run.resume and run.overwrite:
        raise ValueError("resume: continues what is in the folder, overwrite replaces it; give one of them")


class PreparedRun(ABC):
    """A run with its input read and checked: what it trains and writes. Abstract: each task has one.

    Attributes:
        settings: with all values that depend on the data filled in.
        objective: what the loop trains.
        trained: the model in training, of the type that `stored` returns.
        described: all settings that affect the result, by name; a resumed run must have an equal description.
        kept: what a checkpoint needs besides the weights to rebuild the model, as plain values.
        state: of the checkpoint to continue from; None for a new run.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> from saccade.training import Execution, LanguageRun, LanguageSettings, Reporter
        >>> class Introduced(Reporter):
        ...     def started(self, prepared):  # gets the `PreparedRun`
        ...         print(prepared.introduction[1])
        >>> settings = LanguageSettings(steps=1, batch=2, execution=Execution(precision="no"))
        >>> shape = {"layers": 1, "heads": 2, "width": 8, "context": 8}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     text = pathlib.Path(folder, "story.txt")
        ...     _ = text.write_text("the cat sat on the mat. " * 20)
        ...     run = LanguageRun(text, pathlib.Path(folder, "run"), settings, shape, vocabulary=None)
        ...     lm = saccade.training.train_language_model(run, Introduced())
        433 tokens to train on, 49 to validate
    """

    settings: Settings
    objective: Objective
    trained: Any
    described: dict[str, Any]
    kept: dict[str, Any]
    state: dict[str, Any] | None

    @property
    @abstractmethod
    def introduction(self) -> list[str]:
        """Lines that describe the model and the data, shown at the start."""

    @abstractmethod
    def conclusion(self, stored: Evaluation) -> str:
        """A line with the score of the best weights, as they were stored."""

    @abstractmethod
    def as_stored(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A copy of the model's weights on the CPU, in the precision in which files hold them."""

    @abstractmethod
    def save(self, weights: dict[str, Tensor], name: str) -> None:
        """Write the model folder, with these weights in a file of this name."""

    @abstractmethod
    def card(self, curve: list[CurveEntry], steps_done: int, stored: Evaluation | None) -> str:
        """The model card in Markdown; `stored` as in `conclusion`, None until the run has finished."""

    @abstractmethod
    def stored(self) -> tuple[Any, Evaluation]:
        """The stored model, loaded from the folder, and its evaluation on all validation data."""

    def verdict(self, curve: list[CurveEntry], steps_done: int, stored: Evaluation) -> list[str]:
        """Lines that say how far the result can be trusted; `stored` as in `conclusion`."""
        return run_verdict(curve, self.settings, steps_done)

    def sample(self, step: int) -> str:
        """A sample of the model's output to show; "" for models without one."""
        return ""


class Reporter:
    """Callbacks of a run. The default methods do nothing; override those you need.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> from saccade.training import Execution, LanguageRun, LanguageSettings, Reporter
        >>> class Looks(Reporter):
        ...     def looked(self, entry, sample, best):
        ...         print(entry["step"], best)
        >>> settings = LanguageSettings(steps=1, batch=2, execution=Execution(precision="no"))
        >>> shape = {"layers": 1, "heads": 2, "width": 8, "context": 8}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     text = pathlib.Path(folder, "story.txt")
        ...     _ = text.write_text("the cat sat on the mat. " * 20)
        ...     run = LanguageRun(text, pathlib.Path(folder, "run"), settings, shape, vocabulary=None)
        ...     lm = saccade.training.train_language_model(run, Looks())
        1 True
    """

    def started(self, prepared: Any) -> None: ...

    def step(self, step: int, loss: float, norm: float, rate: float, tokens_per_second: float) -> None: ...

    def looked(self, entry: CurveEntry, sample: str, best: bool) -> None: ...

    def judged(self, step: int, cost: float) -> None:
        """Called with the cost of each evaluation. An error raised here ends the run."""

    def finished(self, prepared: Any, stored: Evaluation) -> None: ...

    def concluded(self, line: str) -> None:
        """Called with each line of the run's verdict, after all other callbacks."""

    def warned(self, message: str) -> None: ...

"""What a run of any task is asked for, what it trains and writes once its input is read, and whom it tells."""

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
"""A look at the validation data: `COMMON` ones, and the task's metrics between the losses and the rest."""
COMMON = ("step", "training_loss", "validation_loss", "norm", "tokens_per_second", "seconds")


class RunRequest(Protocol):
    """What every run is asked for; each task adds its data and its model.

    Attributes:
        task_name: of the task, as `saccade train` has it.
        out: the folder to write; one that exists raises an error unless `overwrite`.
        resume: continue the run in `out` where it stopped; one that is over also with more steps than it had.
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
    """ValueError where a run is asked both to continue and to replace what is in its folder."""
    if run.resume and run.overwrite:
        raise ValueError("resume: continues what is in the folder, overwrite replaces it; give one of them")


class PreparedRun(ABC):
    """What a run trains and writes, after its input was read and checked. Abstract: each task has one.

    Attributes:
        settings: with everything that the data decided.
        objective: what the loop trains.
        trained: the model in training, of the type that `stored` opens.
        described: everything that decides what is learned, by name; a resumed run must have an equal description.
        kept: what a checkpoint needs beside the weights to rebuild the model, as plain values.
        state: the checkpoint the run continues from; None where it begins.

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
        """Lines that say what is trained on what."""

    @abstractmethod
    def conclusion(self, stored: Evaluation) -> str:
        """A line that says how good the best weights are, as they were stored."""

    @abstractmethod
    def as_stored(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A copy of the model's weights on the CPU, in the precision in which files hold them."""

    @abstractmethod
    def save(self, weights: dict[str, Tensor], name: str) -> None:
        """Write the folder of a model with these weights, which stand in a file of that name."""

    @abstractmethod
    def card(self, curve: list[CurveEntry], steps_done: int, stored: Evaluation | None) -> str:
        """The model card, in Markdown; `stored` as in `conclusion`, None while the run goes on."""

    @abstractmethod
    def stored(self) -> tuple[Any, Evaluation]:
        """The model that the folder holds, opened again, and how good it is on all validation data."""

    def verdict(self, curve: list[CurveEntry], steps_done: int, stored: Evaluation) -> list[str]:
        """Lines that say what the run is worth; `stored` as in `conclusion`."""
        return run_verdict(curve, self.settings, steps_done)

    def sample(self, step: int) -> str:
        """Something that the model writes by now, to be shown; "" where it writes nothing."""
        return ""


class Reporter:
    """Gets the events of a run. Every method may be overridden; these do nothing.

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
        """Gets the cost after a look. An error that this raises ends the run."""

    def finished(self, prepared: Any, stored: Evaluation) -> None: ...

    def concluded(self, line: str) -> None:
        """Gets each line of the run's verdict, last of all."""

    def warned(self, message: str) -> None: ...

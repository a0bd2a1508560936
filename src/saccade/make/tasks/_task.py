"""The interface of a task: data, model, loss, metrics and picture. All else is the same for all tasks.

A task is a frozen dataclass whose fields are its options, on the command line and in Python. `fitted` fills further
fields from the training data, such as the classes. So a run's folder needs only the task's name and fields to test and
to predict.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_type_hints

import numpy as np

from ...see.monitoring import Observations
from .._task_options import BaseTaskOptions, Recipe
from ..models import Model
from ..training import Objective, Settings
from ._examples import read_lines
from ._space import Between, OneOf, Space, doubled, dropouts, rates

T = TypeVar("T", bound="Task")

_READERS: dict[type, tuple[str, Callable[[str], Any]]] = {  # by a field's type: what a text must be, and its value
    bool: ("true or false", lambda text: {"true": True, "false": False}[text.lower()]),
    int: ("a whole number", int),
    float: ("a number", float),
}


@dataclasses.dataclass(frozen=True)
class Task(BaseTaskOptions, ABC):
    """A task: its data, model, metrics and baselines. Abstract; each subclass has a file of its own.

    Data have the type that `read` returns; a sequence of examples unless a task says otherwise.

    Attributes:
        name: its name in `saccade train`.
        scratch, tuning: the default settings with new weights, and from a checkpoint.
        learned: names of the fields that `fitted` fills.
        reading: names of the fields that may differ for data that are tested or predicted, such as a column.
        requires: modules of optional dependencies, which are imported before anything else.
        extra: the extra of Saccade that installs them.
        unit: what `tokens_per_second` in `curve.jsonl` counts.

    Example:
        >>> import saccade
        >>> task = saccade.tasks.Forecast(past=24, horizon=6)
        >>> isinstance(task, saccade.tasks.Task), task.name, task.unit
        (True, 'forecast', 'windows')
        >>> task.changed({"date": "day"}).date
        'day'
    """

    learned: ClassVar[tuple[str, ...]] = ()
    reading: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = "tasks"
    unit: ClassVar[str] = "tokens"
    compared: ClassVar[int] = 10_000  # examples that `baselines` learn from in a second or two, at the end of a run

    def changed(self: T, options: Mapping[str, Any]) -> T:
        """The task with other values of options in `reading`; numbers, true and false may be texts, as in a command.

        Raises:
            TypeError: another name.
            ValueError: a text that is no such value.
        """
        fields = {field.name for field in dataclasses.fields(self)}
        strange = [name for name in options if name not in fields]
        if strange:
            raise TypeError(f"{strange[0]}: no option of {self.name}; expected one of {', '.join(self.reading)}")
        unknown = [name for name in options if name not in self.reading]
        if unknown:
            raise TypeError(
                f"{unknown[0]}: cannot differ from what {self.name} was trained with; expected one of "
                f"{', '.join(self.reading)}"
            )
        kinds = get_type_hints(type(self))
        return dataclasses.replace(self, **{name: _value(name, given, kinds[name]) for name, given in options.items()})

    # --- data ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def read(self, path: Path) -> Sequence[Any]:
        """The examples of a file or a folder. A fitted task raises an error for examples that it has not learned,
        such as a new label.

        Raises:
            FileNotFoundError, ValueError: what is wrong with it, and where.
        """

    def files(self, path: Path) -> Sequence[Path]:
        """The files that `read` reads, by whose content a run recognises its data."""
        return [path]

    @abstractmethod
    def split(self, data: Sequence[Any], share: float, seed: int) -> tuple[Sequence[Any], Sequence[Any]]:
        """The training examples, and a share of the data for validation."""

    def tested(self, data: Sequence[Any]) -> Sequence[Any]:
        """The test examples among those that were read: all, unless the data mark them.

        Raises:
            ValueError: there are none.
        """
        return data

    def fitted(self: T, training: Sequence[Any]) -> T:
        """The task with the fields that the training data decide, such as the classes. ValueError if they cannot."""
        return self

    def read_by(self, model: Model, data: Sequence[Any]) -> Sequence[Any]:
        """The items of an epoch: the examples, or the windows in which the model reads them."""
        return data

    @abstractmethod
    def inputs(self, texts: Sequence[str]) -> Sequence[Any]:
        """An example without a label for each input."""

    def read_inputs(self, path: Path) -> Sequence[Any]:
        """Examples without labels from a file, by default one for each line; empty ones stay. Errors as of `read`."""
        return self.inputs(read_lines(path))

    def is_empty(self, example: Any) -> bool:
        """Whether an input is empty. It keeps its row, without a prediction."""
        return False

    # --- model --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def new_model(self, training: Sequence[Any]) -> Model:
        """A model with new weights, drawn with PyTorch's generator."""

    @abstractmethod
    def open_model(self, source: Path | str) -> Model:
        """The model of a run's folder or a checkpoint with this task's head; random weights for a missing head."""

    def space(self, recipe: Recipe, *, new: bool) -> Space:
        """The values that a search tries, by names of fields and settings.

        Args:
            recipe: of the runs.
            new: whether weights are new; the sizes of a checkpoint cannot be searched.
        """
        space: dict[str, Between | OneOf] = {"rate": rates(recipe.rate)}
        if recipe.batch is not None:
            space["batch"] = doubled(recipe.batch)
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if new}
        space |= {name: dropouts(usual) for name, usual in fields.items() if name.endswith("dropout")}
        return {**space, **{name: _sizes(self, name) for name in ("layers", "width") if name in fields}}

    @abstractmethod
    def objective(
        self, model: Model, training: Sequence[Any], validation: Sequence[Any], settings: Settings
    ) -> Objective:
        """The objective of the training loop. Its evaluations have the metrics of `scores`."""

    def scored(self, count: int) -> str:
        """Which of `count` validation examples the metrics of an evaluation cover, for a line of output."""
        return "over all validation data"

    @abstractmethod
    def predict(self, model: Model, data: Sequence[Any]) -> Sequence[Any]:
        """The model's output for each example, without dropout."""

    def read_observed(self, path: Path) -> Sequence[Any]:
        """The examples of a file for `observed`. Errors as of `read`."""
        return self.read_inputs(path)

    def observed(self, model: Model, data: Sequence[Any]) -> tuple[Observations, list[str]]:
        """All attention calls of the model for the first example, and a label for each token."""
        raise ValueError(f"{self.name}: reads text; see saccade.look and saccade.view")

    # --- results ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def scores(self, outputs: Sequence[Any], data: Sequence[Any]) -> dict[str, float]:
        """The metrics by name. The first one compares a model with its baseline."""

    def cost(self, scores: Mapping[str, float]) -> float:
        """The number that selects the best weights, low is good: minus the first metric."""
        return -next(iter(scores.values()))

    def looked(self, validation: Sequence[Any]) -> Sequence[Any]:
        """The validation examples whose metrics an evaluation computes."""
        return validation

    def constant(self, model: Model, training: Sequence[Any], tested: Sequence[Any]) -> Baseline | None:
        """One output for all inputs, such as the most frequent class, which a useful model must beat; None if there is
        none."""
        return None

    def quick_baselines(
        self, model: Model, training: Sequence[Any], validation: Sequence[Any], tested: Sequence[Any]
    ) -> list[Baseline]:
        """Baselines that take seconds, for the end of each run. Arguments and errors as of `baselines`."""
        return self.baselines(model, training, validation, tested)

    @property
    def protocol(self) -> str:
        """The way in which the metrics are computed, for a line of a report."""
        return ""

    def validated_by(self, share: float, seed: int) -> str:
        """The validation data of `split`, in words."""
        return f"a share of {share:g} of it (seed {seed})"

    def baselines(
        self, model: Model, training: Sequence[Any], validation: Sequence[Any], tested: Sequence[Any]
    ) -> list[Baseline]:
        """Simple models, trained on the same examples, and their outputs for those tested.

        New weights are drawn with PyTorch's generator, which starts at the run's seed.

        Args:
            model: whose test it is, for what both read alike, such as tokens.

        Raises:
            ValueError: there is none, or the training examples are not enough for it; a test shows the reason instead.
        """
        raise ValueError(f"{self.name} has none")

    def details(self, outputs: Sequence[Any], data: Sequence[Any]) -> Details:
        """Further results for a report."""
        return Details({})

    def picture(self, tested: Tested, kind: str) -> bytes:
        """The task's picture of a test, as "png" or "svg". ValueError if it has none."""
        raise ValueError(f"picture: {self.name} has none")

    def predicted_picture(self, model: Model, data: Sequence[Any], outputs: Sequence[Any], kind: str) -> bytes:
        """The task's picture of predictions, as "png" or "svg". ValueError if it has none."""
        raise ValueError(f"picture: {self.name} has a picture only of tests; see `saccade test --picture`")

    @abstractmethod
    def shown(self, example: Any, output: Any) -> dict[str, Any]:
        """A prediction as plain values, the input first."""

    def line(self, shown: Mapping[str, Any]) -> str:
        """A prediction as a line for a terminal."""
        return "  ".join(str(value) for value in shown.values())


class Details(NamedTuple):
    """Further results of a test: plain values, and a table of them for a terminal ("" for none)."""

    values: dict[str, Any]
    table: str = ""


@dataclasses.dataclass(frozen=True)
class Tested:
    """A model and its outputs for labelled data.

    Args:
        details, table: of the task, for these outputs.
        baselines: outputs of simple models for the same data.
    """

    model: Model
    data: Sequence[Any]
    outputs: Sequence[Any]
    details: dict[str, Any]
    baselines: Sequence[Baseline] = ()
    table: str = ""


@dataclasses.dataclass(frozen=True)
class Baseline:
    """The outputs of a simple model, to compare the trained one with.

    Args:
        name: what the model is, in a few words.
        outputs: of each tested example, in the form of the task's own outputs.

    Example:
        >>> import saccade
        >>> saccade.tasks.Baseline("always the first class", [0, 0, 0]).name
        'always the first class'
    """

    name: str
    outputs: Sequence[Any]


def judging_metric(task: Task, scores: Mapping[str, float]) -> str:
    """The name of the metric that is the `cost`."""
    return next(name for name, value in scores.items() if abs(value) == abs(task.cost(scores)))


def _sizes(task: Task, name: str) -> OneOf:
    """Half, once and twice the field's value, as far as the task accepts them."""
    return OneOf(tuple(value for value in doubled(getattr(task, name)).values if _takes(task, name, value)))


def _takes(task: Task, name: str, value: int) -> bool:
    try:
        dataclasses.replace(task, **{name: value})
    except ValueError:
        return False
    return True


def _value(name: str, given: Any, kind: Any) -> Any:
    """An option's value for a field of this type, such as `int | None`."""
    kinds = get_args(kind) or (kind,)
    if not isinstance(given, str) or str in kinds:
        return given
    expected, read = next(_READERS[known] for known in kinds if known in _READERS)
    try:
        return read(given)
    except (KeyError, ValueError):
        raise ValueError(f"{name}: expected {expected}, got {given!r}") from None


def sampled(data: Sequence[Any], most: int) -> Sequence[Any]:
    """Up to `most` of the examples: a fixed random choice; of windows and nodes every n-th."""
    if len(data) <= most:
        return data
    if not isinstance(data, list):
        return data[:: -(-len(data) // most)]
    return [data[n] for n in sorted(np.random.default_rng(0).permutation(len(data))[:most].tolist())]

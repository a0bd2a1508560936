"""search.json: the trials of a search, and its settings."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ....support._whole_file import whole_file
from ...models.checkpoints.reading import read_json

RUNNING, ENDED, PRUNED, DIVERGED, TOO_LARGE = "running", "ended", "pruned", "diverged", "out of memory"


@dataclasses.dataclass(frozen=True)
class Trial:
    """A run of a search.

    Attributes:
        number: counted from 1.
        settings: what was tried, by option.
        state: "running"; "ended" by itself; "pruned": its looks were worse than those of most other trials; "diverged";
            "out of memory".
        looks: the cost after each look at the validation data, the lower the better.
        metrics, loss, cost: of its best weights, on the validation data, if it ended; runs are judged by `cost`.
        steps, seconds: that it took.

    Example:
        >>> import saccade
        >>> trial = saccade.tasks.Trial(number=1, settings={"rate": 0.0005, "batch": 32})  # as in `SearchResult.trials`
        >>> trial.shown_settings
        {'rate': '0.0005', 'batch': '32'}
    """

    number: int
    settings: dict[str, Any]
    state: str = RUNNING
    looks: tuple[float, ...] = ()
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    loss: float | None = None
    cost: float | None = None
    steps: int = 0
    seconds: float = 0.0

    @property
    def shown_settings(self) -> dict[str, str]:
        """The settings as text for the command line."""
        return {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in self.settings.items()}


@dataclasses.dataclass(frozen=True)
class Trials:
    """The trials of a search in order; a running one is the last."""

    asked: dict[str, Any]
    all: tuple[Trial, ...] = ()

    @property
    def done(self) -> list[Trial]:
        return [trial for trial in self.all if trial.state != RUNNING]

    @property
    def running(self) -> Trial | None:
        return self.all[-1] if self.all and self.all[-1].state == RUNNING else None

    @property
    def best(self) -> Trial | None:
        return next(iter(ranked(self.all)), None)

    def with_trial(self, trial: Trial) -> Trials:
        """The trials with this one, which replaces the one with its number."""
        return dataclasses.replace(self, all=(*self.all[: trial.number - 1], trial))

    def write(self, path: Path) -> None:
        values = {"asked": self.asked, "trials": [dataclasses.asdict(trial) for trial in self.all]}
        with whole_file(path, durable=True) as temporary:
            temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def ranked(trials: Iterable[Trial]) -> list[Trial]:
    """The trials that ended, the best first; in a tie, the trial with the lower loss."""
    ended = [trial for trial in trials if trial.state == ENDED]
    return sorted(ended, key=lambda trial: (trial.cost, trial.loss))


def read_trials(path: Path) -> Trials:
    """Read the file of `Trials.write`. ValueError if it is damaged."""
    values = read_json(path)
    try:
        trials = [Trial(**{**trial, "looks": tuple(trial["looks"])}) for trial in values["trials"]]
        return Trials(values["asked"], tuple(trials))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: damaged ({error})") from None

"""Results of runs in a file: one line of JSON each, appended when a run ends, so that later runs can resume."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ...support._numbers import rounded
from ...support._plain_values import NotJson, parsed_json, plain_values
from .examples import SyntheticTask
from .model import ModelShape
from .training import TrainingBudget, TrainingOutcome

FIGURES = 6  # significant digits of what is written


@dataclass(frozen=True)
class TrainingCase:
    """A run to train: a contender by name, a task and a seed."""

    task: SyntheticTask
    name: str
    seed: int
    shape: ModelShape
    budget: TrainingBudget

    def described(self) -> dict[str, Any]:
        """The run's settings as JSON values. Equal descriptions mean the same run."""
        sizes: dict[str, Any] = json.loads(json.dumps(asdict(self.task)))  # type: ignore[call-overload]
        return {
            "task": self.task.name,
            "mechanism": self.name,
            "seed": self.seed,
            "sizes": sizes,
            "shape": asdict(self.shape),
            "budget": {**asdict(self.budget), "rates": list(self.budget.rates)},
        }


@dataclass(frozen=True)
class FinishedRun:
    """The result of a run.

    groups, chance: of the task. remembers: number of stored values; a_token: of each additional token if it grows with
    length, else 0.
    """

    case: dict[str, Any]
    groups: tuple[str, ...]
    chance: float
    remembers: int
    a_token: int
    outcome: TrainingOutcome

    @property
    def task(self) -> str:
        return str(self.case["task"])

    @property
    def mechanism(self) -> str:
        return str(self.case["mechanism"])

    @property
    def setting(self) -> str:
        """Everything that has to be equal for rows of the same table."""
        return json.dumps({name: self.case[name] for name in ("sizes", "shape", "budget")}, sort_keys=True)


def as_dict(row: FinishedRun) -> dict[str, Any]:
    """The result as JSON values."""
    outcome = {name: plain_values(value, float, digits=FIGURES) for name, value in asdict(row.outcome).items()}
    return {
        **row.case,
        "groups": list(row.groups),
        "chance": rounded(row.chance, FIGURES),
        "remembers": row.remembers,
        "a_token": row.a_token,
        **outcome,
    }


def read(lines: Iterable[str], where: object = "records") -> list[FinishedRun]:
    """Read the rows written by `append`, one in each line.

    Raises:
        ValueError: an invalid line; the message has `where` and the line's number.
    """
    return [_row(line, f"{where}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def load(path: Path) -> list[FinishedRun]:
    """The rows of a file; [] if there is no file."""
    return read(path.read_text(encoding="utf-8").splitlines(), path) if path.exists() else []


def append(path: Path, row: FinishedRun) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(as_dict(row)) + "\n")


def missing(cases: Iterable[TrainingCase], rows: Sequence[FinishedRun]) -> list[TrainingCase]:
    """The cases without a row."""
    done = [row.case for row in rows]
    return [case for case in cases if case.described() not in done]


def _row(line: str, where: str) -> FinishedRun:
    try:
        record = parsed_json(line)
        case = {name: record[name] for name in ("task", "mechanism", "seed", "sizes", "shape", "budget")}
        outcome = TrainingOutcome(**{each.name: record[each.name] for each in fields(TrainingOutcome)})
        outcome = replace(outcome, by_group=tuple(outcome.by_group))
        return FinishedRun(
            case, tuple(record["groups"]), record["chance"], record["remembers"], record["a_token"], outcome
        )
    except (NotJson, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: not a run of `saccade compare --task`: {error}") from None

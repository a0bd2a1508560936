"""Runs many cases, in an order that gives useful results if it is stopped early."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ...support._restored import seeded
from ..attention.timing import thread_count
from .catalogue import contender_named, usual_contenders
from .examples import SyntheticTask
from .model import ModelShape
from .records import FinishedRun, TrainingCase
from .training import Tell, TrainingBudget, run

Begin = Callable[[TrainingCase], Tell | None]  # told of a case before it is run; what it gives is told of its steps
End = Callable[[FinishedRun], object]


def cases(
    tasks: Sequence[SyntheticTask], names: Sequence[str] | None, seeds: int, shape: ModelShape, budget: TrainingBudget
) -> list[TrainingCase]:
    """All combinations of contenders and tasks: first all with the first seed, then with the next.

    Args:
        tasks: at least one.
        names: of contenders, as in `contender_named`; None takes `usual_contenders`.
        seeds: number of runs of each, with seeds from 0.
        shape, budget: the same for all.

    Raises:
        ValueError: an unknown name; no seeds.
    """
    if seeds < 1:
        raise ValueError(f"seeds: must be at least 1, got {seeds}")
    found = [
        TrainingCase(task, name, seed, shape, budget)
        for seed in range(seeds)
        for task in tasks
        for name in (usual_contenders(task) if names is None else names)
    ]
    with seeded(None):
        for name in {case.name for case in found}:
            contender_named(name).body(shape.width, shape.layers, 2)  # refuses what does not fit this width
    return found


def measure(case: TrainingCase, tell: Tell | None = None) -> FinishedRun:
    """Train a case, and count the stored values of its contender."""
    contender, (width, layers) = contender_named(case.name), (case.shape.width, case.shape.layers)
    length = case.task.length
    with seeded(None):
        kept, longer = (contender.remembers(width, layers, length + more) for more in (0, 1))
    outcome = run(contender, case.task, case.seed, case.shape, case.budget, tell)
    return FinishedRun(case.described(), case.task.groups, case.task.chance, kept, longer - kept, outcome)


def go_through(cases: Iterable[TrainingCase], begin: Begin, end: End, threads: int = 1) -> None:
    """Run the cases in order, on so many threads."""
    with thread_count(threads):
        for case in cases:
            end(measure(case, begin(case)))

"""Results of runs as Markdown tables, with conclusions in sentences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ...support._numbers import counted, percent_rounded_down
from ...support._tables import Table
from .copying import Copy, Duplication
from .examples import SyntheticTask
from .model import ModelShape
from .recall import Induction, Needle, Recall
from .records import FinishedRun
from .training import SOLVED, TrainingBudget

TASKS: tuple[type[SyntheticTask], ...] = (Copy, Duplication, Recall, Induction, Needle)
"""In the order of the table."""


class TaskLine(NamedTuple):
    """A contender on a task, over all seeds."""

    task: str
    mechanism: str
    rows: list[FinishedRun]

    @property
    def right(self) -> float:
        """The median accuracy."""
        return statistics.median(row.outcome.right for row in self.rows)

    @property
    def least(self) -> float:
        return min(row.outcome.right for row in self.rows)

    @property
    def solved(self) -> bool:
        """Whether every seed solved the task."""
        return self.least >= SOLVED

    @property
    def kept(self) -> int:
        return self.rows[0].remembers

    @property
    def grows(self) -> bool:
        return self.rows[0].a_token > 0


def lines(rows: Sequence[FinishedRun]) -> list[TaskLine]:
    """A line for each task and contender, in order of their first run.

    Raises:
        ValueError: runs of one task with different sizes, models or budgets.
    """
    by_task: dict[tuple[str, str], TaskLine] = {}
    settings: dict[str, str] = {}
    for row in rows:
        if settings.setdefault(row.task, row.setting) != row.setting:
            raise ValueError(f"records: runs of {row.task} cannot be compared: their sizes, models or budgets differ")
        by_task.setdefault((row.task, row.mechanism), TaskLine(row.task, row.mechanism, [])).rows.append(row)
    return list(by_task.values())


def tasks_of(task_lines: Sequence[TaskLine]) -> list[str]:
    there = {line.task for line in task_lines}
    return [kind.name for kind in TASKS if kind.name in there]


def command(rows: Sequence[FinishedRun]) -> str:
    """The command that repeats these runs."""
    names = tasks_of(lines(rows))
    first, usual = rows[0].case, (ModelShape(), TrainingBudget())
    budget, taps = first["budget"], first["shape"]["taps"]
    given = {  # options with their defaults
        "task": ("all" if len(names) == len(TASKS) else ",".join(names), None),
        "seeds": (len({row.case["seed"] for row in rows}), 1),
        "steps": (budget["steps"], usual[1].steps),
        "rates": tuple(",".join(f"{rate:g}" for rate in rates) for rates in (budget["rates"], usual[1].rates)),
        "taps": (taps, usual[0].taps),
    }
    asked = " ".join(f"--{name} {value}" for name, (value, default) in given.items() if value != default)
    program = "python benchmarks/compare_tasks.py" if "--taps" in asked else "saccade compare"
    return f"{program} {asked}"


def head(rows: Sequence[FinishedRun]) -> list[str]:
    """A title, the command, and the common budget."""
    case = rows[0].case
    shape, budget = case["shape"], case["budget"]
    layers = counted(shape["layers"], "layer")
    near = f"a short convolution over {shape['taps']} tokens" if shape["taps"] else "no convolution"
    first, *others = (f"{rate:g}" for rate in budget["rates"])
    rates = " and then ".join(others)
    again = (
        f" A mechanism that does not solve a task at a rate of {first} is trained again at {rates}." if rates else ""
    )
    counts = sorted({len(line.rows) for line in lines(rows)})
    seeds = counted(counts[0], "seed") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    return [
        "# What each mechanism solves",
        "",
        f"    {command(rows)}",
        "",
        f"Every model: {layers}, {shape['width']} wide, without feed-forward layers, behind sinusoidal positions and "
        f"{near}; attention has one head. Every run: at most {budget['steps']} steps of Adam, each with "
        f"{budget['batch']} new examples, at a rate that rises to {first} and falls to 0; fewer where nothing is left "
        f"to gain.{again} The model that is right most often on a validation set is judged on {budget['held']:,} "
        "examples, which are left out of training wherever they come up.",
        "",
        f"{seeds} each. **Bold**: at least {percent_rounded_down(SOLVED)} right with every seed. Numbers kept: "
        "all layers' state, or keys and values. CPU seconds are of one thread and of all rates together.",
        "",
    ]


def page(rows: Sequence[FinishedRun], refused: dict[str, str]) -> list[str]:
    """All tables as lines of Markdown."""
    table_lines = lines(rows)
    out = [] if len(tasks_of(table_lines)) < 2 else [*summary(table_lines), ""]
    for task in tasks_of(table_lines):
        out += [
            f"## {task}",
            "",
            *_task_description(table_lines, task),
            *detail(table_lines, task),
            "",
            *verdict(table_lines, task),
            "",
        ]
    if refused:
        out += ["Not trained, since these tasks are read in order:", ""]
        out += [f"- {name}: {reason}." for name, reason in refused.items()]
    return out


def summary(task_lines: Sequence[TaskLine]) -> list[str]:
    """Which contender solves which task. Contenders with runs on only one task are listed in its table."""
    tasks, names = tasks_of(task_lines), list(dict.fromkeys(line.mechanism for line in task_lines))
    by_case = {(line.task, line.mechanism): line for line in task_lines}
    heads = ["mechanism", *tasks]
    body = []
    for name in names:
        cells = [by_case.get((task, name)) for task in tasks]
        if sum(cell is not None for cell in cells) > 1:
            body.append([name, *("" if cell is None else _share(cell) for cell in cells)])
    chances = (next(line for line in task_lines if line.task == task).rows[0].chance for task in tasks)
    body.append(["guessing", *map(percent_rounded_down, chances)])
    return Table(heads, body).markdown()


def detail(task_lines: Sequence[TaskLine], task: str) -> list[str]:
    """All results of a task: states of fixed size from small to large, then mechanisms that grow with length."""
    own = sorted((line for line in task_lines if line.task == task), key=lambda line: (line.grows, line.kept))
    groups = own[0].rows[0].groups
    groups = groups if len(groups) > 1 else ()
    heads = ["mechanism", "numbers kept", "parameters", "right", *groups, "steps", "CPU s"]
    body = []
    for line in own:
        each = [statistics.median(row.outcome.by_group[place] for row in line.rows) for place in range(len(groups))]
        steps, seconds = (
            statistics.median(getattr(row.outcome, name) for row in line.rows) for name in ("steps", "cpu_seconds")
        )
        kept = f"{line.rows[0].a_token:,g} a token" if line.grows else f"{line.kept:,}"
        parameters = f"{line.rows[0].outcome.parameters:,}"
        shares = [percent_rounded_down(share) for share in each]
        body.append([line.mechanism, kept, parameters, _share(line), *shares, f"{steps:g}", f"{seconds:.0f}"])
    return Table(heads, body).markdown()


def verdict(task_lines: Sequence[TaskLine], task: str) -> list[str]:
    """The conclusions of a table in sentences."""
    own = [line for line in task_lines if line.task == task]
    fixed = sorted((line for line in own if not line.grows), key=lambda line: line.kept)
    solved = [line for line in fixed if line.solved]
    said = [f"Guessing is right {percent_rounded_down(own[0].rows[0].chance)} of the time."]
    if any(line.grows for line in own):
        said.append(
            _named("Solved by mechanisms that keep every token", [line for line in own if line.grows and line.solved])
        )
        rest = [line for line in own if line.grows and not line.solved]
        said += [_named("Not solved, although every token is kept", rest)] if rest else []
    if fixed:
        least = f"; the smallest has {solved[0].kept:,} numbers ({solved[0].mechanism})" if solved else ""
        said.append(_named("Solved with a state of fixed size", solved, least))
        rest = [line for line in fixed if not line.solved]
        said += [_named("Not solved with", rest)] if rest else []
    return [" ".join(said)]


def _task_description(task_lines: Sequence[TaskLine], task: str) -> list[str]:
    """Description, source and sizes of a task."""
    sizes = next(line for line in task_lines if line.task == task).rows[0].case["sizes"]
    listed = ", ".join(f"{name} {_size(value)}" for name, value in sizes.items())
    known = {kind.name: kind for kind in TASKS}[task]
    return [f"{known.title[0].upper()}{known.title[1:]} ({known.source}): {listed}.", ""]


def _size(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)


def _share(line: TaskLine) -> str:
    """The median, and the minimum if seeds differ. Bold if all seeds solve the task."""
    text = percent_rounded_down(line.right)
    if percent_rounded_down(line.least) != text:
        text += f" (at least {percent_rounded_down(line.least)})"
    return f"**{text}**" if line.solved else text


def _named(what: str, task_lines: Sequence[TaskLine], more: str = "") -> str:
    names = ", ".join(line.mechanism for line in task_lines) if task_lines else "nothing"
    return f"{what}: {names}{more}."

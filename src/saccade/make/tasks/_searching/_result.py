"""The result of a search: its trials as a table and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....support._tables import Table
from .._classes._confusion import written
from .._runs._testing import write_picture
from .._runs._training import TrainedRun
from ._trials import ENDED, PRUNED, Trial, ranked

_COLORS = {ENDED: "tab:blue", PRUNED: "silver"}
_WIDE = 4  # pictures of settings in a row


@dataclasses.dataclass(frozen=True)
class SearchResult:
    r"""The result of `search`; `str` is for reading, `as_dict` for programs.

    Attributes:
        run: of the best trial.
        trials: in their order.
        importance: the share of each setting in the differences between the trials that ended; empty where that is
            unknown.
        logarithmic: the settings whose values were tried by factors, not by differences.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data = pathlib.Path(folder, "reviews.csv")
        ...     _ = data.write_text("text,label\n" + "a good film,positive\na bad film,negative\n" * 20)
        ...     small = dict(layers=1, heads=2, width=8, vocabulary=280, steps=2, precision="no")
        ...     result = saccade.tasks.search("classify", data, folder + "/runs", trials=1, **small)
        >>> [trial.number for trial in result.ranked], result.run.task.name
        ([1], 'classify')
    """

    run: TrainedRun
    trials: Sequence[Trial]
    importance: Mapping[str, float]
    logarithmic: Collection[str] = ()

    @property
    def ranked(self) -> list[Trial]:
        """The trials that ended, the best first, then the others in their order."""
        return [*ranked(self.trials), *(trial for trial in self.trials if trial.state != ENDED)]

    @property
    def best(self) -> Trial:
        return self.ranked[0]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        return {
            "run": str(self.run.folder),
            "best": self.best.number,
            "trials": [dataclasses.asdict(trial) for trial in self.trials],
            "importance": dict(self.importance),
        }

    def __str__(self) -> str:
        states = [trial.state for trial in self.trials]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        lines = [f"{self.run.folder}: {len(states)} trials ({counts}), the best first; on the validation data"]
        lines += Table.of_named({f"trial {trial.number}": self._row(trial) for trial in self.ranked}).lines()
        if self.importance:
            shares = ", ".join(f"{name} {share:.0%}" for name, share in self.importance.items())
            lines.append(f"importance of the settings: {shares}")
        return "\n".join(lines)

    def _row(self, trial: Trial) -> dict[str, str]:
        known = {name: f"{value:.4f}" for name, value in trial.metrics.items()}
        metrics = {name: known.get(name, trial.state if n == 0 else "") for n, name in enumerate(self.best.metrics)}
        loss = "" if trial.loss is None else f"{trial.loss:.4f}"
        return {
            **trial.shown_settings,
            **metrics,
            "loss": loss,
            "steps": f"{trial.steps:,}",
            "s": f"{trial.seconds:.0f}",
        }

    def save_picture(self, path: str | Path) -> None:
        """Write the picture of the trials, .png or .svg, whole or not at all."""
        write_picture(Path(path), self._picture)

    def _picture(self, kind: str) -> bytes:
        """A figure with the metric of each trial in order, and below by each setting."""
        from matplotlib.figure import Figure

        names = list(self.importance) or list(self.best.settings)
        rows = -(-len(names) // _WIDE)
        figure = Figure(figsize=(2.6 * min(len(names), _WIDE) + 1.0, 3.0 + 2.4 * rows), layout="constrained")
        above, below = figure.subfigures(2, 1, height_ratios=[3.0, 2.4 * rows], squeeze=False).flat
        first = above.subplots()
        self._draw_trials(first)
        axes = below.subplots(rows, min(len(names), _WIDE), sharey=True, squeeze=False)
        for one in axes.flat[len(names) :]:
            one.set_axis_off()
        for one, name in zip(axes.flat, names, strict=False):
            self._draw_setting(one, name)
        found = {self._shown(trial) for trial in self.trials if trial.state in _COLORS and trial.looks}
        if len(found) == 1:  # around it an axis has numbers that no trial has, such as an accuracy of 1.04
            first.set_yticks(list(found))
            axes.flat[0].set_yticks(list(found))
        return written(figure, kind)

    def _draw_trials(self, axes: Any) -> None:
        for state, color in _COLORS.items():
            shown = [trial for trial in self.trials if trial.state == state and trial.looks]
            if shown:
                axes.scatter([one.number for one in shown], list(map(self._shown, shown)), color=color, label=state)
        ended = [trial for trial in self.trials if trial.state == ENDED]
        bests = [ranked(ended[: n + 1])[0] for n in range(len(ended))]
        numbers = [*(trial.number for trial in ended), len(self.trials)]
        line = list(map(self._shown, [*bests, bests[-1]]))
        axes.step(numbers, line, where="post", color="tab:orange", label="best so far")
        axes.set(xlabel="trial", ylabel=f"{self._measure[0]}, validation data")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize="small")

    def _draw_setting(self, axes: Any, name: str) -> None:
        shown = [trial for trial in self.trials if trial.state in _COLORS and trial.looks]
        values = [trial.settings[name] for trial in shown]
        if isinstance(values[0], float):
            places = values
            if name in self.logarithmic:
                axes.set_xscale("log")
                ends = sorted({min(values), max(values)})  # between them labels of a narrow axis would collide
                axes.set_xticks(ends, [f"{value:g}" for value in ends])
                axes.minorticks_off()
        else:
            known = sorted(set(values))
            places = list(map(known.index, values))
            axes.set_xticks(range(len(known)), list(map(str, known)))
            axes.set_xlim(-0.5, len(known) - 0.5)
        axes.scatter(places, list(map(self._shown, shown)), color=[_COLORS[one.state] for one in shown], s=16)
        share = self.importance.get(name)
        axes.set_title(name if share is None else f"{name}: {share:.0%}", fontsize="medium")

    @property
    def _measure(self) -> tuple[str, int]:
        """The metric that selects runs, and its sign in reports: -1 if it is the negative of the cost, else 1."""
        cost = self.best.cost
        found = {
            name: sign for name, value in self.best.metrics.items() for sign in (1, -1) if value == sign * (cost or 0.0)
        }
        return next(iter(found.items()), ("loss", 1))

    def _shown(self, trial: Trial) -> float:
        """The final cost of a trial; of a stopped one the lowest cost of its evaluations."""
        cost = min(trial.looks) if trial.cost is None else trial.cost
        return self._measure[1] * cost

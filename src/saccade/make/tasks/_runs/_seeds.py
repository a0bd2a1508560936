"""Runs that differ only in their seed: the spread of their metrics."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....support._tables import Table
from ...training.run_folder.layout import TASK
from ._testing import TestReport, test

PREFIX = "seed-"


def seed_folder(out: Path, seed: int) -> Path:
    """The folder of a seed's run."""
    return out / f"{PREFIX}{seed}"


def check_for_seeds(out: Path, seeds: Iterable[int]) -> None:
    """FileExistsError if a folder contains anything but runs of these seeds: a test would include other runs."""
    wanted = {seed_folder(out, seed).name for seed in seeds}
    others = sorted(path.name for path in out.glob("*") if path.name not in wanted and not path.name.startswith("."))
    if others:
        raise FileExistsError(
            f"{out}: holds {others[0]}, expected a new folder, or a folder with only runs of the same --seeds; "
            "choose another --out"
        )


def seed_folders(folder: Path) -> list[Path]:
    """The run folders of all seeds in `folder`, by seed; empty if `folder` is itself a run, or has no such folders."""
    if (folder / TASK).exists():
        return []
    folders = [path for path in folder.glob(f"{PREFIX}*") if (path / TASK).exists()]
    return sorted(folders, key=lambda path: (len(path.name), path.name))


@dataclasses.dataclass(frozen=True)
class SeedsReport:
    r"""The result of `test_seeds`; `str` is for reading, `as_dict` for programs.

    Attributes:
        run: the folder of all runs.
        reports: of each run.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data = pathlib.Path(folder, "reviews.csv")
        ...     _ = data.write_text("text,label\n" + "a good film,positive\na bad film,negative\n" * 20)
        ...     small = dict(layers=1, heads=2, width=8, vocabulary=280, steps=2, precision="no")
        ...     for seed in (0, 1):
        ...         _ = saccade.tasks.train("classify", data, f"{folder}/run/seed-{seed}", seed=seed, **small)
        ...     report = saccade.tasks.test_seeds(folder + "/run", data)
        >>> {name: len(values) for name, values in report.metrics.items()}  # mean and standard deviation
        {'accuracy': 2, 'macro F1': 2, 'calibration error': 2}
    """

    run: Path
    reports: Sequence[TestReport]

    @property
    def metrics(self) -> dict[str, tuple[float, float]]:
        """The mean of each metric over the seeds, and the standard deviation (of the sample; of one run 0)."""
        return spread([report.metrics for report in self.reports])

    @property
    def baselines(self) -> dict[str, dict[str, tuple[float, float]]]:
        """The mean and spread of the baselines: each seed splits the data differently, so they differ, too."""
        kinds: dict[str, list[dict[str, float]]] = {}
        for report in self.reports:
            for name, metrics in report.baselines.items():
                kinds.setdefault(name, []).append(metrics)
        return {name: spread(found) for name, found in kinds.items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        return {
            "run": str(self.run),
            "metrics": _named(self.metrics),
            "baselines": {name: _named(found) for name, found in self.baselines.items()},
            "reports": [report.as_dict() for report in self.reports],
        }

    def __str__(self) -> str:
        first, task = self.reports[0], self.reports[0].task
        mine = task.cost(_means(self.metrics))
        better = [name for name, found in self.baselines.items() if task.cost(_means(found)) < mine]
        lines = [f"The baseline is better than this model: {name}." for name in better]
        seeds = ", ".join(report.run.name.removeprefix(PREFIX) for report in self.reports)
        count = len(first.tested.data)
        lines.append(f"{self.run}, seeds {seeds}, on {first.data}: {count:,} examples; mean and standard deviation")
        rows = {"this model": self.metrics, **self.baselines}
        shown = {
            title: {name: f"{mean:.4f} ± {deviation:.4f}" for name, (mean, deviation) in found.items()}
            for title, found in rows.items()
        }
        notes = dict.fromkeys(report.note for report in self.reports if report.note)
        return "\n".join(
            [*lines, *Table.of_named(shown).lines(), *([first.protocol] if first.protocol else []), *notes]
        )

    def save_picture(self, path: str | Path) -> None:
        """The picture of the first seed's run."""
        self.reports[0].save_picture(path)


def test_seeds(folder: str | Path, data: str | Path, **more: Any) -> SeedsReport:
    r"""`test` for the run of each seed in a folder, as `saccade train ... --seeds` writes them.

    Args:
        folder: with the runs `seed-0` and so on.
        data: a file or a folder, as the task reads it.
        more: other arguments of `test`.

    Raises:
        ValueError: no runs of several seeds. Other errors as of `test`.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data = pathlib.Path(folder, "reviews.csv")
        ...     _ = data.write_text("text,label\n" + "a good film,positive\na bad film,negative\n" * 20)
        ...     small = dict(layers=1, heads=2, width=8, vocabulary=280, steps=2, precision="no")
        ...     for seed in (0, 1):
        ...         _ = saccade.tasks.train("classify", data, f"{folder}/run/seed-{seed}", seed=seed, **small)
        ...     report = saccade.tasks.test_seeds(folder + "/run", data, baseline=False)
        >>> len(report.reports)
        2
    """
    folders = seed_folders(Path(folder))
    if not folders:
        raise ValueError(f"{folder}: holds no runs of several seeds; expected folders {PREFIX}0 and so on")
    return SeedsReport(Path(folder), [test(run, data, **more) for run in folders])


test_seeds.__test__ = False  # type: ignore[attr-defined]  # no test of pytest's, whatever its name


def spread(rows: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """The mean of each metric, and the standard deviation of the sample; of one run 0."""
    columns = {name: [metrics[name] for metrics in rows] for name in rows[0]}
    return {
        name: (statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)
        for name, values in columns.items()
    }


def _means(scores: dict[str, tuple[float, float]]) -> dict[str, float]:
    return {name: mean for name, (mean, _) in scores.items()}


def _named(scores: dict[str, tuple[float, float]]) -> dict[str, dict[str, float]]:
    return {name: {"mean": mean, "deviation": deviation} for name, (mean, deviation) in scores.items()}

"""What helps where there are few data and little time: each remedy on the same sentences, over several seeds.

    python benchmarks/task_remedies.py DATA RUNS [--seeds 3] [--text FILE] [--checkpoint FOLDER]
        [--out benchmarks/results/task-remedies.md]

DATA is a folder with train.tsv, dev.tsv and test.tsv, tables with a column `label` and a column `text`, such as SST-2's
sentences. RUNS keeps all runs; one that is there is not trained again, but for those that lose heads. Everything is
chosen by dev.tsv: the best weights of a run, and of each way of training the rate, by one seed. test.tsv is read for
the figures alone.

The whole model has 3 blocks of 4 heads and width 128 and is trained

- from random weights,
- from an encoder that has guessed masked pieces of train.tsv (and of --text): all weights, the last block, changes of
  rank 8.

That with all weights is what heads are removed from (half of them; then, in other folders, two epochs to learn on), and
the teacher of students of a third of its parameters: trained on the truth alone, taught, and taught first to guess
masked pieces by the pre-trained encoder and then the classes by the teacher.

--checkpoint is a published encoder, such as MiniLM. It is tuned with one seed: all weights, the last two blocks,
changes of rank 8, each at a rate of its own (`PUBLISHED`); and half of its heads are removed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from saccade import tasks
from saccade.tasks._examples import read_table
from saccade.training import Reporter

WHOLE = {"layers": 3, "width": 128, "heads": 4, "dropout": 0.2}
STUDENT = {"layers": 1, "width": 64}
RATES = (3e-4, 1e-3)
TUNED = {"epochs": 8}
MASKED = {"epochs": 40, "rate": 1e-3}
PUBLISHED = {
    "all weights": {"rate": 1e-4},
    "`--last 2`": {"last": 2, "rate": 3e-4},
    "`--lora 8`": {"lora": 8, "rate": 1e-3},
}
Train = Callable[..., Any]


class Shown(Reporter):
    """A line for each look."""

    def looked(self, entry: dict[str, float], sample: str, best: bool) -> None:
        shown = {name: value for name, value in entry.items() if name in ("step", "accuracy", "perplexity", "seconds")}
        print("  ", shown, "(best)" if best else "", flush=True)


@dataclasses.dataclass
class Row:
    """A remedy's figures, one of each seed."""

    name: str
    accuracies: list[float] = dataclasses.field(default_factory=list)
    minutes: list[float] = dataclasses.field(default_factory=list)
    parameters: int = 0
    remark: str = ""

    def add(self, folder: Path, data: Path) -> None:
        report = tasks.test(folder, data / "test.tsv", baseline=False)
        self.accuracies.append(report.metrics["accuracy"])
        self.parameters = sum(one.numel() for one in report.tested.model.parameters())
        self.minutes.append(minutes_of(folder))

    def line(self) -> str:
        spread = f" ± {100 * statistics.stdev(self.accuracies):.1f}" if len(self.accuracies) > 1 else ""
        time = f"{statistics.fmean(self.minutes):.1f}" if any(self.minutes) else "0"
        mean = 100 * statistics.fmean(self.accuracies)
        return f"| {self.name} | {self.parameters:,} | {mean:.1f}{spread} | {time} | {self.remark} |"

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)


def minutes_of(folder: Path) -> float:
    curve = folder / "curve.jsonl"
    return json.loads(curve.read_text().splitlines()[-1])["seconds"] / 60 if curve.exists() else 0.0


def trained(folder: Path, train: Train, **options: Any) -> Path:
    """The run of a folder, trained if it is not there, or gone on with if it was stopped."""
    if not (folder / "README.md").exists() or "best weights, on" not in (folder / "README.md").read_text():
        print(folder, options, flush=True)
        given = {"resume": (folder / "checkpoints").is_dir(), "reporter": Shown(), "tensorboard": False, **options}
        train(out=folder, **given)
    return folder


def dev_accuracy(folder: Path) -> float:
    return max(json.loads(line)["accuracy"] for line in (folder / "curve.jsonl").read_text().splitlines())


def with_best_rate(folder: Path, seeds: int, train: Train, **options: Any) -> tuple[list[Path], float]:
    """The runs of all seeds at the rate that is best on dev.tsv with seed 0."""

    def run(rate: float, seed: int) -> Path:
        return trained(folder / f"rate-{rate:g}" / f"seed-{seed}", train, rate=rate, seed=seed, **options)

    best = max(RATES, key=lambda rate: dev_accuracy(run(rate, 0)))
    return [run(best, seed) for seed in range(seeds)], best


def texts_of(data: Path, extra: Path | None, runs: Path) -> Path:
    """The sentences to guess pieces of, a line each."""
    path = runs / "texts.txt"
    lines = [str(text) for _, (text,) in read_table(data / "train.tsv", ("text",))]
    if extra is not None:
        lines += extra.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@dataclasses.dataclass
class Group:
    """The rows of one model; the others are compared with that of `whole`."""

    title: str
    whole: str
    rows: list[Row] = dataclasses.field(default_factory=list)

    def add(self, name: str, folders: list[Path], data: Path, remark: str) -> None:
        row = Row(name, remark=remark)
        for folder in folders:
            row.add(folder, data)
        print(row.line(), flush=True)
        self.rows.append(row)

    def page(self) -> list[str]:
        whole = next(row for row in self.rows if row.name == self.whole)
        lines = [f"## {self.title}", "", "| | parameters | accuracy, % | minutes | |", "|---|---|---|---|---|"]
        lines += [*(row.line() for row in self.rows), ""]
        for row in self.rows:
            if row is not whole:
                share = f"{row.parameters / whole.parameters:.0%} of its parameters"
                points, relative = 100 * (row.mean - whole.mean), row.mean / whole.mean - 1
                lines.append(f"- {row.name}: {points:+.1f} points ({relative:+.1%}) against {whole.name}; {share}.")
        return [*lines, ""]


def own(data: Path, runs: Path, seeds: int, extra: Path | None) -> Group:
    """A small encoder: from random weights, pre-trained on its own text, with fewer heads, and its students."""
    train, judged, texts = data / "train.tsv", data / "dev.tsv", texts_of(data, extra, runs)

    def classify(out: Path, **options: Any) -> Any:
        return tasks.train("classify", train, out, validation=judged, **options)

    def masked(out: Path, **options: Any) -> Any:
        return tasks.train("mlm", texts, out, **options)

    group = Group("A small encoder of its own", "pre-trained, all weights")
    found, rate = with_best_rate(runs / "anew", seeds, classify, **WHOLE, **TUNED)
    group.add("random weights", found, data, f"rate {rate:g}")
    pieces = trained(runs / "pieces", masked, **WHOLE, **MASKED)
    before = f"after {minutes_of(pieces):.1f} minutes of `mlm`"
    whole: list[Path] = []
    for name, options in (("all weights", {}), ("`--last 1`", {"last": 1}), ("`--lora 8`", {"lora": 8})):
        folder = runs / f"from-{'-'.join(options) or 'all'}"
        found, rate = with_best_rate(folder, seeds, classify, initial=pieces, **TUNED, **options)
        whole = whole or found
        group.add(f"pre-trained, {name}", found, data, f"rate {rate:g}; {before}")
    pruned(group, data, runs, whole)
    group.rows += students(data, runs, seeds, whole[0], pieces, texts)
    return group


def published(data: Path, runs: Path, checkpoint: Path) -> Group:
    """A published encoder, tuned."""
    group = Group("A published encoder, tuned", "all weights")

    def classify(out: Path, **options: Any) -> Any:
        return tasks.train("classify", data / "train.tsv", out, validation=data / "dev.tsv", **options)

    for number, (name, options) in enumerate(PUBLISHED.items()):
        folder = trained(runs / f"published-{number}", classify, initial=checkpoint, epochs=4, **options)
        group.add(name, [folder], data, f"rate {options['rate']:g}")
    pruned(group, data, runs / "published", [runs / "published-0"])
    return group


def pruned(group: Group, data: Path, runs: Path, whole: list[Path]) -> None:
    """Half of the heads of each seed's model."""
    ways: dict[str, dict[str, Any]] = {"half of its heads removed": {}, "and two epochs to learn on": {"epochs": 2}}
    for name, options in ways.items():
        folders, ratios = [], []
        for seed, folder in enumerate(whole):
            out = runs / f"half-{len(options)}" / f"seed-{seed}"
            made = tasks.prune(folder, out, keep=0.5, overwrite=out.exists(), **options)
            ratios.append(made.forward.after / made.forward.before)
            folders.append(out)
        group.add(name, folders, data, f"a forward takes {statistics.median(ratios):.2f} of its time")


def students(data: Path, runs: Path, seeds: int, teacher: Path, pieces: Path, texts: Path) -> list[Row]:
    """A third of the parameters: the truth alone, a teacher, a teacher before."""
    train, judged = data / "train.tsv", data / "dev.tsv"

    def taught(out: Path, student: Any, **options: Any) -> Any:
        return tasks.distill(teacher, student, train, out, validation=judged, **options)

    def pieces_taught(out: Path, **options: Any) -> Any:
        return tasks.distill(pieces, STUDENT, texts, out, weight=0.5, relations=0.1, **options)

    first = trained(runs / "student-pieces", pieces_taught, **MASKED)
    rows = []
    ways = {
        "a student of a third, the truth alone": {"student": STUDENT, "weight": 0.0},
        "taught (`distill`)": {"student": STUDENT, "weight": 0.9},
        "taught pieces, then classes": {"student": first, "weight": 0.9},
    }
    for number, (name, options) in enumerate(ways.items()):
        found, rate = with_best_rate(runs / f"student-{number}", seeds, taught, **TUNED, **options)
        rows.append(Row(name, remark=f"rate {rate:g}"))
        for folder in found:
            rows[-1].add(folder, data)
        print(rows[-1].line(), flush=True)
    return rows


def page(groups: list[Group], data: Path, runs: Path, seeds: int) -> str:
    run = next(runs.glob("anew/rate-*/seed-0"))
    simple = tasks.test(run, data / "test.tsv").baselines
    lines = [
        "# Remedies on the sentences of SST-2",
        "",
        "    python benchmarks/task_remedies.py DATA RUNS [--checkpoint MiniLM's folder]",
        "",
        f"Method: the docstring of the command. {seeds} seeds, one of a published encoder, {torch.get_num_threads()} "
        "threads. Accuracy on the test set, mean and standard deviation; minutes of the last run alone.",
        "",
        *(f"{name}: {100 * found['accuracy']:.1f} %." for name, found in simple.items()),
        "",
        *(line for group in groups for line in group.page()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--text", type=Path, help="more texts to guess pieces of, a line each")
    parser.add_argument("--checkpoint", type=Path, help="the folder of a published encoder")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    groups = [own(options.data, options.runs, options.seeds, options.text)]
    if options.checkpoint is not None:
        groups.append(published(options.data, options.runs, options.checkpoint))
    text = page(groups, options.data, options.runs, options.seeds)
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

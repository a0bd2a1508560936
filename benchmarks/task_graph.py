"""`saccade train graph` on Cora, beside a GCN and the published figures: ten seeds, a run each.

    python benchmarks/task_graph.py cora.npz [--seeds 10] [--runs runs/cora] [--out benchmarks/results/task-graph.md]

The file has the Planetoid split: 140 nodes to train on, 500 to validate on, 1,000 to test with. Nothing is chosen by
the test nodes. A run whose folder is there already is resumed, or only tested if it is over, so a script that was
stopped goes on. Times are of whatever else the machine does: they say how long it takes, not how fast it is.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

from saccade import tasks
from saccade.tasks._graphs._baselines import graph_convolution
from saccade.tasks._runs._training import open_run

OPTIONS = {"scale": "rows", "decay": 0.0, "beta2": 0.999, "precision": "no", "tensorboard": False}
PUBLISHED = {"GAT": "83.0 +- 0.7", "GCN": "81.5"}


@dataclass(frozen=True)
class SeedResult:
    """Shares of right answers of one seed."""

    seed: int
    validation: float
    test: float
    gcn: float
    steps: int  # until the run ended
    best: int  # of the weights that were kept
    minutes: float


def measure(data: Path, folder: Path, seed: int) -> SeedResult:
    out = folder / f"seed-{seed}"
    run = tasks.train("graph", data, out, seed=seed, resume=out.exists(), **OPTIONS)
    curve = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    best = min(curve, key=lambda entry: entry["validation_loss"])  # as the task chooses
    report = tasks.test(run, data, baseline=False)
    last = curve[-1]
    return SeedResult(
        seed,
        best["accuracy"],
        report.metrics["accuracy"],
        gcn_accuracy(run.task, data, seed),
        last["step"],
        best["step"],
        last["seconds"] / 60,
    )


def gcn_accuracy(task: tasks.ClassifyNodes, data: Path, seed: int) -> float:
    nodes = task.read(data)
    training, _ = task.split(nodes, 0.1, seed)
    tested = task.tested(nodes)
    graph = task.tensors(nodes.graph)
    numbers, classes = training.numbers.tolist(), task.truth(training).tolist()
    torch.manual_seed(seed)
    outputs = graph_convolution(graph, numbers, classes, graph, len(task.labels))
    return task.scores(list(outputs[tested.numbers]), tested)["accuracy"]


def spread(values: list[float]) -> str:
    return f"{100 * statistics.mean(values):.2f} +- {100 * statistics.stdev(values):.2f}"


def features_alone(data: Path, run: Path) -> str:
    report = tasks.test(run, data)
    name, metrics = next(iter(report.baselines.items()))
    return f"| {name} | {100 * metrics['accuracy']:.2f} | |"


def page(results: list[SeedResult], plain: str, parameters: int) -> str:
    rows = [
        f"| {r.seed} | {100 * r.validation:.1f} | {100 * r.test:.1f} | {100 * r.gcn:.1f} | {r.best:,} | {r.steps:,} "
        f"| {r.minutes:.1f} |"
        for r in results
    ]
    return "\n".join(
        [
            "# `saccade train graph` on Cora",
            "",
            f"Planetoid split (140 / 500 / 1,000), {len(results)} seeds, test accuracy in percent, mean and standard "
            "deviation over seeds.",
            "",
            "| | test accuracy | published |",
            "|---|---:|---:|",
            f"| GAT, {parameters:,} parameters | {spread([r.test for r in results])} | {PUBLISHED['GAT']} |",
            f"| GCN, the baseline | {spread([r.gcn for r in results])} | {PUBLISHED['GCN']} |",
            plain,
            "",
            "    python benchmarks/task_graph.py cora.npz",
            "",
            "| seed | GAT, validation | GAT, test | GCN, test | step kept | steps | minutes |",
            "|---:|---:|---:|---:|---:|---:|---:|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--runs", type=Path, default=Path("runs/cora"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    results = []
    for seed in range(given.seeds):
        results.append(measure(given.data, given.runs, seed))
        print(results[-1], flush=True)
    first = given.runs / "seed-0"
    parameters = sum(weights.numel() for weights in open_run(first, {}).model.parameters())
    text = page(results, features_alone(given.data, first), parameters)
    print(text)
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

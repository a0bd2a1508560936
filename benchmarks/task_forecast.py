"""How well `saccade.tasks` forecasts ETTh1, beside published figures.

    python benchmarks/task_forecast.py ETTh1.csv [OPTION=VALUE ...] --out runs/etth1 [--past 336]
        [--horizons 96 192 336 720] [--seeds 0] [--repeat-only]

ETTh1.csv is the table of zhouhaoyi/ETDataset. The usual protocol: of its first 14,400 rows 8,640 train, 2,880 validate
and 2,880 test; every column is scaled by mean and deviation of the first 8,640; windows begin at every hour, the first
of them looks back into the rows before its part; all seven columns are forecast; errors are over everything, scaled.
So the files of validation and test begin `past` rows early.

Published figures left out what did not fill a last batch of 32 windows (128 for PatchTST): `dropped` is that metric for
32. Last values repeated have published figures, which must come out to the last digit before anything is trained.

OPTION=VALUE is an option of `saccade train forecast`, such as rate=1e-3. Each run appends a line of JSON to
OUT/results.jsonl.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from saccade import tasks
from saccade.tasks import Forecast
from saccade.tasks._series._linear import repeated

PARTS = {"train": (0, 8640), "validation": (8640, 11520), "test": (11520, 14400)}
REPEATED = {96: 1.295, 192: 1.325, 336: 1.323, 720: 1.339}  # MSE, published with the last partial batch dropped
DROPPED = 32


def main() -> None:
    given = _arguments()
    files = prepare(given.table, given.out / f"data-{given.past}", given.past)
    for horizon in given.horizons:
        check_repeated(files, given.past, horizon)
    for horizon in () if given.repeat_only else given.horizons:
        for seed in given.seeds:
            found = measured(files, given, horizon, seed)
            print(json.dumps(found), flush=True)
            with (given.out / "results.jsonl").open("a") as file:
                file.write(json.dumps(found) + "\n")


def prepare(table: Path, out: Path, past: int) -> dict[str, Path]:
    """The three files of the protocol, each with `past` rows before its part."""
    with table.open(newline="") as file:
        head, *rows = csv.reader(file)
    out.mkdir(parents=True, exist_ok=True)
    files = {name: out / f"{name}.csv" for name in PARTS}
    for name, (first, last) in PARTS.items():
        with files[name].open("w", newline="") as file:
            csv.writer(file).writerows([head, *rows[max(first - past, 0) : last]])
    return files


def check_repeated(files: dict[str, Path], past: int, horizon: int) -> None:
    """The published figure of last values repeated, which no model has a part in."""
    task = Forecast(past=past, horizon=horizon)
    task = task.fitted(task.read(files["train"]))
    data = task.read(files["test"])
    outputs = repeated(task.scaled(data.table), data)
    whole, dropped = task.scores(outputs, data)["MSE"], without_last_batch(task, outputs, data)["MSE"]
    told = f"horizon {horizon}: last value repeated {whole:.4f}, without the last partial batch {dropped:.4f}"
    print(f"{told}, published {REPEATED[horizon]}", flush=True)
    if round(dropped, 3) != REPEATED[horizon]:
        raise SystemExit("the protocol is another one")


def without_last_batch(task: Forecast, outputs: list[np.ndarray], data: Any) -> dict[str, float]:
    count = len(data) // DROPPED * DROPPED
    return task.scores(outputs[:count], data[:count])


def measured(files: dict[str, Path], given: argparse.Namespace, horizon: int, seed: int) -> dict[str, Any]:
    """Train and test one model."""
    began = time.perf_counter()
    options = {name: json.loads(value) for name, value in (option.split("=") for option in given.options)}
    run = tasks.train(
        "forecast",
        files["train"],
        given.out / f"past-{given.past}-horizon-{horizon}-seed-{seed}",
        validation=files["validation"],
        overwrite=True,
        **{"past": given.past, "horizon": horizon, "seed": seed, "precision": "no", **options},
    )
    minutes = (time.perf_counter() - began) / 60
    report = tasks.test(run, files["test"])
    report.save_picture(run.folder / "picture.png")
    models = {"PatchTST": report.tested.outputs, **{one.name: one.outputs for one in report.tested.baselines}}
    curve = [json.loads(line) for line in (run.folder / "curve.jsonl").read_text().splitlines()]
    return {
        "past": given.past,
        "horizon": horizon,
        "seed": seed,
        "minutes": round(minutes, 1),
        "looks": len(curve),
        "validation MSE": min(entry["MSE"] for entry in curve),
        "parameters": sum(weight.numel() for weight in run.model.parameters()),
        "options": given.options,
        "test": {"PatchTST": report.metrics, **report.baselines},
        "dropped": {
            name: without_last_batch(report.task, list(outputs), report.tested.data) for name, outputs in models.items()
        },
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--past", type=int, default=336)
    parser.add_argument("--horizons", type=int, nargs="+", default=list(REPEATED))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--repeat-only", action="store_true")
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    main()

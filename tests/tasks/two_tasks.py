"""What each of two processes does in test_processes.py; run by `torchrun`. Each writes what it has into a file.

torchrun --nproc-per-node 2 two_tasks.py FOLDER, in which there are reviews.csv, series.csv and tones/
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from saccade.tasks._runs._prepared import PreparedTaskRun
from saccade.tasks._runs._training import request
from saccade.training import Monitor, train
from saccade.training.processes import accelerator_for

LOOP = {"steps": 6, "every": 2, "batch": 13, "rate": 1e-2, "precision": "no", "tensorboard": False, "seed": 3}
SIZES = {"layers": 1, "heads": 2, "width": 8}
RUNS = {
    "classify": ("reviews.csv", {**SIZES, "vocabulary": 300}),
    "forecast": ("series.csv", {**SIZES, "past": 29, "horizon": 7, "patch": 5, "stride": 3, "hidden": 16}),
    "speech": ("tones", {**SIZES, "mask_time": 0.0, "mask_channels": 0.2}),
}


class Looks(Monitor):
    def __init__(self):
        self.found = []

    def evaluated(self, step, training_loss, evaluation, seconds, weights):
        self.found.append([step, training_loss, evaluation.loss, evaluation.judged])


def run(task: str, folder: Path) -> dict[str, object]:
    """Train a small model; its last weights in this process, and all looks."""
    name, options = RUNS[task]
    prepared, looks = (
        PreparedTaskRun.of(request(task, folder / name, folder / "out", {**options, **LOOP}), None),
        Looks(),
    )
    for part in prepared.trained.modules():
        if hasattr(part, "layer_drop"):  # as published models of sounds have it
            part.layer_drop = 0.5
    train(prepared.objective, prepared.settings, looks, accelerator=accelerator_for(prepared.settings))
    weights = {name: value.detach().clone() for name, value in prepared.trained.state_dict().items()}
    return {"weights": weights, "looks": looks.found}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    made = {task: run(task, folder) for task in RUNS}
    torch.save(made, folder / f"made-{torch.distributed.get_rank()}")

"""Steps per second of `saccade train classify` beside transformers' Trainer: the same model, data, batch and optimizer.

    python benchmarks/task_speed.py [--rounds 5] [--out benchmarks/results/task-speed.md]

A BERT of 4 layers, width 256, 4 heads, begun from one folder of random weights, fine-tuned in float32 on texts of mixed
lengths (log-normal, 4 to 250 tokens), 32 to a step, AdamW, no looks in between. The Trainer pads each batch to its
longest text, once with batches at random, as it comes, once with texts of alike length together. All ways take turns;
a figure is the median over the rounds of the second epoch's steps per second.

What it must cost: 6 multiply-adds per weight of the blocks and real token, forward and backward together; padding makes
tokens of the longest text's number.
"""

from __future__ import annotations

import argparse
import csv
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import saccade

EXAMPLES, BATCH, EPOCHS = 1920, 32, 2
STEPS = EXAMPLES // BATCH
SIZES = {"layers": 4, "width": 256, "heads": 4, "vocabulary": 400, "dropout": 0.1}
COMMON = {"batch": BATCH, "rate": 1e-4, "warmup": 1, "precision": "no", "patience": 99, "every": EPOCHS * STEPS}


def write_data(path: Path, count: int, seed: int) -> list[tuple[str, str]]:
    draw = random.Random(seed)
    words = [f"{first}{second}" for first in "bcdfglmnprst" for second in ("a", "e", "i", "o", "u")]
    rows = []
    for _ in range(count):
        length = min(max(round(draw.lognormvariate(3.3, 0.8)), 2), 248)
        rows.append((" ".join(draw.choices(words, k=length)), draw.choice("ab")))
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    return rows


class Clock(saccade.training.Reporter):
    """When each step was over."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def step(self, step: int, loss: float, norm: float, rate: float, tokens_per_second: float) -> None:
        self.times.append(time.perf_counter())

    @property
    def rate(self) -> float:
        """Steps per second of the second epoch."""
        return STEPS / (self.times[2 * STEPS - 1] - self.times[STEPS - 1])


def ours(folder: Path, begun: Path) -> float:
    clock = Clock()
    options: dict[str, Any] = {**COMMON, "steps": EPOCHS * STEPS}
    with tempfile.TemporaryDirectory() as out:
        saccade.tasks.train(
            "classify",
            folder / "train.csv",
            Path(out) / "run",
            validation=folder / "few.csv",
            initial=begun,
            reporter=clock,
            **options,
        )
    return clock.rate


def trainer(folder: Path, begun: Path, rows: list[tuple[str, str]], grouped: bool) -> float:
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(begun)
    tokenizer = transformers.AutoTokenizer.from_pretrained(begun)
    data = [{**tokenizer(text), "labels": "ab".index(label)} for text, label in rows]
    clock = Clock()

    class Told(transformers.TrainerCallback):
        def on_step_end(self, *given: Any, **more: Any) -> None:
            clock.times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as out:
        arguments = transformers.TrainingArguments(
            out,
            per_device_train_batch_size=BATCH,
            num_train_epochs=EPOCHS,
            learning_rate=1e-4,
            train_sampling_strategy="group_by_length" if grouped else "random",
            save_strategy="no",
            report_to=[],
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        collate = transformers.DataCollatorWithPadding(tokenizer)
        transformers.Trainer(model, arguments, collate, data, callbacks=[Told()]).train()
    return clock.rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows, _ = write_data(folder / "train.csv", EXAMPLES, 3), write_data(folder / "few.csv", 40, 5)
        begun = folder / "begun"
        saccade.tasks.train("classify", folder / "train.csv", begun, **{**COMMON, **SIZES, "steps": 1})
        ways = {
            "saccade train classify": lambda: ours(folder, begun),
            "Trainer": lambda: trainer(folder, begun, rows, grouped=False),
            "Trainer, texts of alike length together": lambda: trainer(folder, begun, rows, grouped=True),
        }
        found: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(given.rounds):
            turn = number % len(ways)
            for way in [*list(ways)[turn:], *list(ways)[:turn]]:
                found[way].append(ways[way]())
            print({way: round(rates[-1], 2) for way, rates in found.items()}, flush=True)
    mine = found["saccade train classify"]
    lines = [
        f"{torch.get_num_threads()} threads, {platform.machine()}, medians of {given.rounds} rounds.",
        "",
        "| | steps per second | saccade is faster by |",
        "|---|---|---|",
        *(
            f"| {way} | {statistics.median(rates):.2f} | "
            f"{statistics.median(own / rate for own, rate in zip(mine, rates, strict=True)):.2f} |"
            for way, rates in found.items()
        ),
    ]
    print("\n".join(lines))
    if given.out is not None:
        given.out.write_text(
            "# Training a classifier: steps per second\n\n" + "\n".join(lines) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()

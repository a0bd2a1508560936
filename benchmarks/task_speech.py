"""`saccade train speech` on spoken digits: as classes and as written words, known speakers and one who is left out.

    python benchmarks/task_speech.py recordings/ [--runs runs/digits] [--only classes] [--out results.md]

The folder has `{digit}_{speaker}_{index}.wav`. Those of index 0 to 4 are the test set, as published; a tenth of the
others decides when to stop. With a speaker left out the model learns from the other speakers alone (of theirs also
index 0 to 4 is left out), is judged while it learns by another speaker, and tested on all of the first one's
recordings. Nothing is chosen by test recordings. A run whose folder is there already is resumed, or only tested if it
is over. Times are of whatever else the machine does: they say how long it takes, not how fast it is.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade import tasks

NAMES = "zero one two three four five six seven eight nine".split()
TESTED = 5  # index 0 to 4
HEADS = {"classes": {}, "words": {"text": "text"}}
OPTIONS = {"precision": "no", "tensorboard": False, "patience": 40}


@dataclass(frozen=True)
class Recording:
    path: Path
    digit: int
    speaker: str
    index: int


def recordings(folder: Path) -> list[Recording]:
    """ValueError where there are none."""
    found = []
    for path in sorted(folder.resolve().glob("*_*_*.wav")):
        digit, speaker, index = path.stem.split("_")
        found.append(Recording(path, int(digit), speaker, int(index)))
    if not found:
        raise ValueError(f"{folder}: no files named {{digit}}_{{speaker}}_{{index}}.wav")
    return found


def write_table(path: Path, chosen: list[Recording]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = [(one.path, one.digit, NAMES[one.digit]) for one in chosen]
        csv.writer(file).writerows([("file", "label", "text"), *rows])
    return path


@dataclass(frozen=True)
class Split:
    """Tables of a run; without `validation` a tenth of `training` is split off."""

    name: str
    training: Path
    validation: Path | None
    test: Path


def known_speakers(recordings: list[Recording], folder: Path) -> Split:
    def table(name: str, wanted: Callable[[Recording], bool]) -> Path:
        return write_table(folder / f"{name}.csv", [one for one in recordings if wanted(one)])

    training, test = table("training", lambda one: one.index >= TESTED), table("test", lambda one: one.index < TESTED)
    return Split("known speakers", training, None, test)


def left_out(recordings: list[Recording], folder: Path, speaker: str) -> Split:
    """The next speaker in the alphabet judges while the model learns."""
    speakers = sorted({one.speaker for one in recordings})
    judge = speakers[(speakers.index(speaker) + 1) % len(speakers)]

    def table(name: str, wanted: Callable[[Recording], bool]) -> Path:
        return write_table(folder / f"{name}-without-{speaker}.csv", [one for one in recordings if wanted(one)])

    return Split(
        f"without {speaker}",
        table("training", lambda one: one.index >= TESTED and one.speaker not in (speaker, judge)),
        table("validation", lambda one: one.index >= TESTED and one.speaker == judge),
        table("test", lambda one: one.speaker == speaker),
    )


def measure(split: Split, head: str, folder: Path) -> dict[str, Any]:
    out = folder / f"{head}-{split.name.replace(' ', '-')}"
    options = {**OPTIONS, **HEADS[head]}
    run = tasks.train("speech", split.training, out, validation=split.validation, resume=out.exists(), **options)
    curve = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    report = tasks.test(run, split.test)
    report.save_picture(folder / f"{out.name}.png")
    print(report, flush=True)
    return {
        "minutes": curve[-1]["seconds"] / 60,
        "steps": curve[-1]["step"],
        "model": report.metrics,
        **report.baselines,
    }


def page(results: dict[tuple[str, str], dict[str, Any]]) -> str:
    lines = ["# `saccade train speech` on spoken digits", "", "`python benchmarks/task_speech.py recordings/`", ""]
    for head in dict.fromkeys(head for head, _ in results):
        mine = {name: values for (one, name), values in results.items() if one == head}
        metrics = list(next(iter(mine.values()))["model"])
        lines += [f"## {head}", "", f"| test set | model | {' | '.join(metrics)} | steps | minutes |"]
        lines.append("|---" * (len(metrics) + 4) + "|")
        for name, values in mine.items():
            for model, found in values.items():
                if isinstance(found, dict):
                    cells = " | ".join(f"{100 * found[metric]:.2f}" for metric in metrics)
                    cost = f"{values['steps']:,} | {values['minutes']:.1f}" if model == "model" else " | "
                    lines.append(f"| {name} | {model} | {cells} | {cost} |")
        lines.append("")
    return "\n".join([*lines, "All metrics in per cent."]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/digits"))
    parser.add_argument("--only", choices=HEADS, help="one of the two heads")
    parser.add_argument("--left-out", nargs="*", help="speakers to leave out, one run each; by default every one")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/task-speech.md"))
    given = parser.parse_args()
    found = recordings(given.recordings)
    speakers = sorted({one.speaker for one in found}) if given.left_out is None else given.left_out
    splits = [known_speakers(found, given.runs), *(left_out(found, given.runs, speaker) for speaker in speakers)]
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for split in splits:
        for head in [given.only] if given.only else HEADS:
            results[head, split.name] = measure(split, head, given.runs)
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()

from __future__ import annotations

import csv
import random

import pytest

from saccade import tasks

GOOD, BAD = "good great lovely fine".split(), "bad awful poor dull".split()
FILLING = "the film plot actor scene was with a of story".split()
# A model of a few thousand weights that learns the reviews by heart in a second.
SMALL = {
    "width": 24, "layers": 1, "heads": 2, "vocabulary": 300, "steps": 80, "rate": 6e-3, "batch": 19, "precision": "no"
}  # fmt: skip


def reviews(count: int, seed: int) -> list[tuple[str, str]]:
    """Texts with one word that tells their class."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        label = draw.choice(["negative", "positive"])
        words = [draw.choice(FILLING) for _ in range(draw.randrange(2, 9))]
        words.insert(draw.randrange(len(words)), draw.choice(GOOD if label == "positive" else BAD))
        made.append((" ".join(words), label))
    return made


def write_csv(path, rows, columns=("text", "label")):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Accelerate keeps device and precision for the life of the process."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """reviews.csv to train on, unseen.csv to test with."""
    folder = tmp_path_factory.mktemp("reviews")
    write_csv(folder / "reviews.csv", reviews(211, 3))
    write_csv(folder / "unseen.csv", reviews(101, 5))
    return folder


@pytest.fixture(scope="session")
def learned(files):
    """A run that has learned the reviews; trained once, and never written to."""
    return tasks.train("classify", files / "reviews.csv", files / "learned", **SMALL)

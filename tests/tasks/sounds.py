"""Sounds that a small model learns by heart in seconds: tones of three classes, and words whose letters are tones."""

from __future__ import annotations

import numpy as np
import soundfile

RATE = 4000
LETTERS = {"a": 400, "b": 800, "c": 1500}  # hertz
# A model of a few thousand weights.
SMALL = {
    "width": 24, "layers": 1, "heads": 2, "dropout": 0.0, "mask_time": 0.0, "mask_channels": 0.0, "speed": 0.0,
    "noise": 0.0, "rate": 6e-3, "batch": 19, "precision": "no",
}  # fmt: skip


def tone(hertz, seconds: float, rate: int = RATE) -> np.ndarray:
    """float64 (S,): a wave of one frequency, or of one that moves from the first of a pair to the second."""
    ends = np.broadcast_to(hertz, 2)
    frequencies = np.linspace(*ends, round(seconds * rate))
    return 0.3 * np.sin(2 * np.pi * (np.cumsum(frequencies) - frequencies[0]) / rate)


def melody(label: str, draw: np.random.Generator) -> np.ndarray:
    start, end = {"low": (400, 400), "high": (1300, 1300), "rising": (400, 1300)}[label]
    wave = tone((start * draw.uniform(0.9, 1.1), end * draw.uniform(0.9, 1.1)), draw.uniform(0.15, 0.3))
    return wave + 0.02 * draw.standard_normal(len(wave))


def spoken(text: str, draw: np.random.Generator) -> np.ndarray:
    """A tone each letter, with a short pause behind it; a space is a longer pause."""
    parts = []
    for letter in text:
        if letter != " ":
            parts.append(tone(LETTERS[letter] * draw.uniform(0.97, 1.03), draw.uniform(0.05, 0.08)))
        parts.append(np.zeros(round((0.1 if letter == " " else 0.03) * RATE)))
    wave = np.concatenate(parts)
    return wave + 0.01 * draw.standard_normal(len(wave))


def write_classes(folder, count: int, seed: int):
    """A folder for each class, `count` sounds in all."""
    draw = np.random.default_rng(seed)
    for n in range(count):
        label = ("high", "low", "rising")[n % 3]
        (folder / label).mkdir(parents=True, exist_ok=True)
        soundfile.write(folder / label / f"{n:03}.wav", melody(label, draw), RATE)
    return folder


def write_words(folder, count: int, seed: int):
    """words.csv with paths and texts of one or two words."""
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    rows = ["file,text"]
    for n in range(count):
        words = ["".join(draw.choice([*LETTERS], draw.integers(1, 4))) for _ in range(draw.integers(1, 3))]
        soundfile.write(folder / f"{n:03}.wav", spoken(" ".join(words), draw), RATE)
        rows.append(f"{n:03}.wav,{' '.join(words)}")
    (folder / "words.csv").write_text("\n".join(rows) + "\n")
    return folder / "words.csv"

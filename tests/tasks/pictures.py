"""Images of three classes that a small model learns by heart in seconds, and the files they stand in."""

from __future__ import annotations

import numpy as np
from PIL import Image

# A model of a few thousand weights.
SMALL = {
    "width": 24, "layers": 1, "heads": 2, "patch": 3, "dropout": 0.0, "shift": 0.0, "steps": 110, "rate": 6e-3,
    "batch": 19, "precision": "no",
}  # fmt: skip
HEIGHT, WIDTH = 13, 11


def drawn(label: str, draw: np.random.Generator) -> np.ndarray:
    """uint8 (13, 11): a horizontal line, a vertical line or a square somewhere, in noise."""
    pixels = draw.integers(0, 60, (HEIGHT, WIDTH))
    top, left = draw.integers(0, HEIGHT - 4), draw.integers(0, WIDTH - 4)
    if label == "flat":
        pixels[top + 2, 1:-1] += 180
    elif label == "steep":
        pixels[1:-1, left + 2] += 180
    else:
        pixels[top : top + 4, left : left + 4] += 180
    return pixels.astype(np.uint8)


def write_classes(folder, count: int, seed: int):
    """A folder for each class, `count` images in all."""
    draw = np.random.default_rng(seed)
    for n in range(count):
        label = ("flat", "square", "steep")[n % 3]
        (folder / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(drawn(label, draw)).save(folder / label / f"{n:03}.png")
    return folder

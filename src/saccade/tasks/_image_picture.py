"""The picture of a test on images: what is taken for what, and where the model looked when it was wrong.

Shape legend: N images shown, P patches of an image, S special tokens, C channels, H height, W width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._evaluating import evaluating
from ..models import Model
from ..nn import Observation
from ..nn.attention import weights_of
from ._class_results import SHOWN
from ._confusion import Counts, draw_confusion, side_of, written

LOWER = 4.2  # inches below the matrix


@dataclasses.dataclass(frozen=True)
class ImagePanel:
    """An image of the picture.

    Args:
        pixels: uint8 (H, W, C), as the model reads it.
        weights: (S + P,), what the class token attends to.
        grid: rows and columns of patches.
        truth, found: classes.
        sure: the probability of `found`.
    """

    pixels: np.ndarray
    weights: np.ndarray
    grid: tuple[int, int]
    truth: str
    found: str
    sure: float

    def draw(self, above: Any, below: Any) -> None:
        from ..viewer import draw

        above.imshow(self.pixels.squeeze(), cmap="gray", vmin=0, vmax=255)
        above.set_title(f"{self.truth}\ntaken for {self.found} ({self.sure:.2f})", fontsize="small")
        special = len(self.weights) - self.grid[0] * self.grid[1]
        draw(self.weights, image=self.pixels, patches=self.grid, skip=special, ax=below)


def class_token_attention(model: Model, values: Tensor) -> np.ndarray:
    """What the class token's output is made of in the last layer: exact weights (N, S + P), the mean over heads."""
    calls: list[Observation] = []
    with evaluating(model), torch.no_grad():
        model(values, observe=lambda layer, call: calls.append(call))
        weights = weights_of(calls[-1], rows=[0])
    return weights.mean(1)[:, 0].float().cpu().numpy()


def image_picture(labels: Sequence[str], counts: Counts, panels: Sequence[ImagePanel], kind: str) -> bytes:
    """The confusion matrix above; below it images, and each once more under the attention to its patches."""
    from matplotlib.figure import Figure

    side = side_of(labels)
    figure = Figure(figsize=(max(side + 1, 1.5 * SHOWN), side + LOWER), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[side, LOWER], squeeze=False).flat
    draw_confusion(above, labels, counts)
    which = "Wrong, and most sure of it" if panels[0].truth != panels[0].found else "Right, and least sure of it"
    what = "images, and the class token's attention in the last layer (mean over heads)"
    below.suptitle(f"{which}: {what}", fontsize="small")
    axes = below.subplots(2, SHOWN, squeeze=False)
    for each in axes.flat:
        each.set_axis_off()
    for panel, (first, second) in zip(panels, axes.T, strict=False):
        panel.draw(first, second)
    return written(figure, kind)

"""The picture of a test on images: the confusion matrix, and attention of the worst predictions.

Shape legend: N images shown, P patches of an image, S special tokens, C channels, H height, W width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....operator.nn import Observation
from ....operator.nn.attention import weights_of
from ....support._restored import evaluating
from ...models import Model
from .._classes._confusion import Counts, draw_confusion_left, side_of, written
from .._classes._results import SHOWN, heading_of_worst, named_as

WORDS = 1.1  # inches of the heading, the titles and the scale
HIGHEST = 3.0  # inches of an image


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

    @property
    def of_patches(self) -> np.ndarray:
        """The weights of the patches at their places in the image, without special tokens."""
        rows, columns = self.grid
        return self.weights[len(self.weights) - rows * columns :].reshape(rows, columns)

    def draw(self, above: Any, below: Any, least: float, most: float) -> Any:
        """Draw the image, and below it the weights from `least` to `most`, whose matplotlib image is returned."""
        height, width = self.pixels.shape[:2]
        place = (-0.5, width - 0.5, height - 0.5, -0.5)
        above.imshow(self.pixels.squeeze(), cmap="gray", vmin=0, vmax=255, extent=place)
        above.set_title(named_as(self.truth, self.found, self.sure), fontsize=7, parse_math=False)
        return below.imshow(self.of_patches, cmap="viridis", vmin=least, vmax=most, extent=place)


def class_token_attention(model: Model, values: Tensor) -> np.ndarray:
    """Exact weights (N, S + P) of the class token in the last layer, the mean over heads."""
    calls: list[Observation] = []
    with evaluating(model), torch.no_grad():
        model(values, observe=lambda layer, call: calls.append(call))
        weights = weights_of(calls[-1], rows=[0])
    return weights.mean(1)[:, 0].float().cpu().numpy()


def image_picture(labels: Sequence[str], counts: Counts, panels: Sequence[ImagePanel], kind: str) -> bytes:
    """The confusion matrix; below it images, each with the attention to its patches, on one scale."""
    from matplotlib.figure import Figure

    side = side_of(labels)
    wide = max(side + 1, 1.5 * SHOWN)
    height, width = panels[0].pixels.shape[:2]
    lower = WORDS + 2 * min(wide / SHOWN * height / width, HIGHEST)
    figure = Figure(figsize=(wide, side + lower), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[side, lower], squeeze=False).flat
    draw_confusion_left(above, wide, labels, counts)
    which = heading_of_worst([panel.truth == panel.found for panel in panels])
    what = "images, and the class token's attention in the last layer (mean over heads)"
    below.suptitle(f"{which}: {what}", fontsize="small")
    axes = below.subplots(2, SHOWN, squeeze=False)
    for each in axes.flat:
        each.set_axis_off()
    weights = np.concatenate([panel.of_patches.ravel() for panel in panels])
    for panel, (first, second) in zip(panels, axes.T, strict=False):
        shades = panel.draw(first, second, weights.min(), weights.max())
    bar = below.colorbar(shades, ax=axes, location="bottom", shrink=0.4, aspect=40, pad=0.02)
    bar.set_label("weight of a patch", fontsize=7)
    bar.ax.tick_params(labelsize=7)
    return written(figure, kind)

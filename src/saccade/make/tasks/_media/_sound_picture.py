"""The picture of a test on sounds: the confusion matrix, and attention over time.

Shape legend: L frames, H heads, R rows of a map, M mel bands, F frames of a spectrogram, V tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....operator.nn import Observation
from ....operator.nn.attention import weights_of
from ....operator.nn.stacks import LayerObserver
from ....support._restored import evaluating
from ...models import Model
from .._classes._confusion import Counts, draw_confusion_left, side_of, written
from .._classes._results import SHOWN

COLUMNS = 3  # sounds side by side
HIGH, WIDE = 3.0, 3.6  # inches of each
MOST = 10.0  # seconds of a sound that is drawn, if there are shorter ones


@dataclasses.dataclass(frozen=True)
class SoundPanel:
    """A sound of the picture.

    Args:
        spectrogram: (M, F).
        weights: (R, L), what is attended to in time.
        rows: names of them.
        marks: the frame that each row is about, if it is about one.
    """

    title: str
    spectrogram: np.ndarray
    seconds: float
    weights: np.ndarray
    rows: tuple[str, ...]
    marks: tuple[int, ...] = ()

    def draw(self, axes: Any) -> None:
        from ....see.viewer import draw

        draw(
            self.weights,
            queries=self.rows,
            sound=self.spectrogram,
            seconds=self.seconds,
            ax=axes,
        )
        axes.set_title(self.title, fontsize="small", parse_math=False)
        if self.marks:
            times = (np.array(self.marks) + 0.5) * self.seconds / self.weights.shape[1]
            rows = np.arange(len(self.marks)) if len(self.marks) > 1 else self.weights[0, list(self.marks)]
            axes.plot(times, rows, "o", color="#d1495b", markersize=3)


def heard(model: Model, run: Callable[[LayerObserver], Tensor]) -> tuple[Tensor, np.ndarray]:
    """The outputs of a model for one sound, and the exact weights (H, L, L) of its last layer.

    Args:
        run: calls the model, observed.
    """
    calls: list[Observation] = []
    with evaluating(model), torch.no_grad():
        result = run(lambda layer, call: calls.append(call))
        weights = weights_of(calls[-1])[0]
    return result[0], weights.float().cpu().numpy()


def rows_of_heads(weights: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """The attention of each head, its mean (H, L) over queries, since the classifier reads the mean of frames."""
    return weights.mean(1), tuple(f"head {n}" for n in range(1, len(weights) + 1))


def rows_of_characters(weights: np.ndarray, frames: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...], list[int]]:
    """Attention of the first frame of each character, the mean (R, L) over heads; the characters; their frames.

    Args:
        frames: the character that each frame writes, "" for the blank. If no frame writes one,
            the mean over all frames is the only row.
    """
    starts = [n for n, one in enumerate(frames) if one and (n == 0 or frames[n - 1] != one)]
    if not starts:
        return weights.mean((0, 1))[None], ("all frames",), []
    return weights.mean(0)[starts], tuple("space" if frames[n] == " " else frames[n] for n in starts), starts


def worst_texts(truth: Sequence[str], texts: Sequence[str], seconds: Sequence[float]) -> list[int]:
    """Numbers of the sounds with the most edits for each character of the text; sounds of at most `MOST` seconds come
    first."""
    import jiwer

    errors = [0.0 if one == other else float(jiwer.cer(one, other)) for one, other in zip(truth, texts, strict=True)]
    return np.lexsort((-np.array(errors), np.array(seconds) > MOST))[:SHOWN].tolist()


def picture_of_panels(
    panels: Sequence[SoundPanel], heading: str, kind: str, classes: tuple[Sequence[str], Counts] | None
) -> bytes:
    """Sounds with the attention over time; above them the confusion matrix where there are classes.

    Args:
        heading: which sounds these are.
    """
    from matplotlib.figure import Figure

    rows = -(-len(panels) // COLUMNS)
    side = 0.0 if classes is None else side_of(classes[0])
    wide = max(side + 1, WIDE * COLUMNS)
    figure = Figure(figsize=(wide, side + HIGH * rows + 0.4), layout="constrained")
    below = figure
    what = "mean over heads; dots: the frames that write the characters"
    if classes is not None:
        above, below = figure.subfigures(2, 1, height_ratios=[side, HIGH * rows + 0.4], squeeze=False).flat
        draw_confusion_left(above, wide, *classes)
        what = "a row for each head, the mean over frames"
    elif not any(panel.marks for panel in panels):
        what = "mean over heads"
    below.suptitle(f"{heading}: spectrogram, and attention in the last layer ({what})", fontsize=9)
    axes = below.subplots(rows, COLUMNS, squeeze=False).ravel()
    for each in axes[len(panels) :]:
        each.set_axis_off()
    for panel, each in zip(panels, axes, strict=False):
        panel.draw(each)
    return written(figure, kind)

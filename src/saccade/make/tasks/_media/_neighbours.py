"""The baseline of images: nearest neighbours on pixels, in bounded memory.

Shape legend: N images to judge, M known ones, D pixels of an image, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ._images import ImageExample, spread, thumbnails, usual_size

COUNTS = (1, 3, 5, 9, 15)  # k, of which the validation examples choose one
SIDE = 32  # pixels of the longer side
KNOWN = 2**30  # bytes of all pixels that are compared with
CHUNK = 4096  # images judged at once


def nearest_neighbours(
    training: Sequence[ImageExample],
    validation: Sequence[ImageExample],
    tested: Sequence[ImageExample],
    labels: Sequence[str],
) -> tuple[np.ndarray, str]:
    """The classes of the k most similar training images, by the distance of their pixels.

    k is the one of `COUNTS` that is right most often on the validation examples (of equally good ones the smallest).
    Images are made small, at most `SIDE` pixels. Of more training images than fill `KNOWN` bytes only as many, evenly
    spread, are compared with.

    Returns:
        The shares (N, K) of the classes among the neighbours of those tested, and what it is in a few words.
    """
    size, channels = usual_size(training, SIDE), 1 if all(example.grey for example in training) else 3
    known = spread(training, KNOWN // (4 * channels * size[0] * size[1]))
    finder = _Finder(known, labels, size, channels)
    truth = [example.label for example in validation]
    found = finder.neighbours(validation)
    right = [float(np.mean(finder.names(found, k) == truth)) for k in finder.counts]
    k = finder.counts[int(np.argmax(right))]
    of_all = "" if len(known) == len(training) else f", {len(known):,} of {len(training):,} images"
    return finder.shares(finder.neighbours(tested), k), f"nearest neighbours on pixels (k = {k}{of_all})"


class _Finder:
    def __init__(self, known: Sequence[ImageExample], labels: Sequence[str], size: tuple[int, int], channels: int):
        from sklearn.neighbors import NearestNeighbors

        self.counts = [count for count in COUNTS if count <= len(known)]
        self._size, self._channels, self._labels = size, channels, np.array(labels)
        self._classes = np.array([labels.index(example.label or "") for example in known])
        self._index: Any = NearestNeighbors(n_neighbors=self.counts[-1], algorithm="brute").fit(self._pixels(known))

    def neighbours(self, examples: Sequence[ImageExample]) -> np.ndarray:
        """The classes (N, largest of `counts`) of the nearest training images, the nearest first."""
        chunks = [examples[start : start + CHUNK] for start in range(0, len(examples), CHUNK)]
        return np.concatenate(
            [self._classes[self._index.kneighbors(self._pixels(chunk), return_distance=False)] for chunk in chunks]
        )

    def shares(self, values: np.ndarray, k: int) -> np.ndarray:
        """(N, K): the share of each class among the first k."""
        return (values[:, :k, None] == np.arange(len(self._labels))).mean(axis=1)

    def names(self, values: np.ndarray, k: int) -> np.ndarray:
        return self._labels[self.shares(values, k).argmax(axis=1)]

    def _pixels(self, examples: Sequence[ImageExample]) -> np.ndarray:
        """(N, D) float32."""
        pixels = np.empty((len(examples), self._channels * self._size[0] * self._size[1]), np.float32)
        for row, thumbnail in zip(pixels, thumbnails(examples, self._size, self._channels), strict=True):
            row[:] = thumbnail
        return pixels

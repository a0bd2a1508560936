"""Images from files: decoded, and kept as the model reads them.

Shape legend: N images of all, B of a batch, C channels, H height, W width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...models.signals.images import EIGHT_BITS, ImageInputs, open_image, to_rgb
from ._files import Media

if TYPE_CHECKING:
    from PIL import Image

IMAGES = Media("an image", tuple(".png .jpg .jpeg .bmp .gif .tif .tiff .webp .pgm .ppm .pbm".split()))
GREY = ("1", "L", "LA", "La")
MEMORY = 2**31  # bytes of decoded images that are kept; of more, each batch is read anew
SAMPLE = 4096  # images over which mean and deviation are taken
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # by channels


@dataclasses.dataclass(frozen=True)
class ImageExample:
    """An image of a class, not decoded.

    Args:
        label: None if it is unknown.
        place: for messages: `birds.csv: line 7`, or the file.
        shape: its height and width.
        grey: whether it has no colours.
    """

    path: Path
    label: str | None
    place: str
    shape: tuple[int, int]
    grey: bool


def read_image(path: Path, label: str | None, place: str) -> ImageExample:
    """An image, decoded once to find broken ones before training. ValueError for a broken one."""
    image = decoded(path)
    return ImageExample(path, label, place, (image.height, image.width), image.mode in GREY)


def decoded(path: Path, channels: int | None = None) -> Image.Image:
    """An upright 8-bit image with this number of channels (1, 3 or 4; None keeps its own). Transparent pixels become
    white.

    Raises:
        FileNotFoundError: no such file. ValueError: broken, or without a range of values.
    """
    image = open_image(path)
    if image.mode not in EIGHT_BITS:
        image = _in_eight_bits(image, path)
    if channels is None or channels == 4:
        return image if channels is None else image.convert("RGBA")
    as_it_is = image.mode == _MODES[channels] and "transparency" not in image.info
    return image if as_it_is else to_rgb(image).convert(_MODES[channels])


def _in_eight_bits(image: Image.Image, path: Path) -> Image.Image:
    """The upper half of 16 bits."""
    from PIL import Image as pillow

    values = np.asarray(image)
    if not np.issubdtype(values.dtype, np.integer) or values.min() < 0 or values.max() >= 2**16:
        raise ValueError(f"{path}: the mode {image.mode!r} has no fixed range; save it with 8 or 16 bits a channel")
    return pillow.fromarray((values >> 8).astype(np.uint8))


class PixelStore:
    """Decoded images. All are kept if together they take at most `memory` bytes; otherwise each is decoded when it is
    read.

    Args:
        inputs: the model's `ImageInputs` (size, channels).
        examples: N images.
    """

    def __init__(self, inputs: ImageInputs, examples: Sequence[ImageExample], memory: int = MEMORY):
        self.inputs, self._examples = inputs, examples
        first = self._read(0)
        self._kept: np.ndarray | None = None
        if first.nbytes * len(examples) <= memory:
            self._kept = np.empty((len(examples), *first.shape), np.uint8)
            for n in range(len(examples)):
                self._kept[n] = self._read(n, first.shape)

    def pixels(self, numbers: Sequence[int]) -> np.ndarray:
        """uint8 (B, H, W, C) of the images with these numbers."""
        if self._kept is not None:
            return self._kept[list(numbers)]
        return np.stack([self._read(n) for n in numbers])

    def _read(self, number: int, shape: tuple[int, ...] | None = None) -> np.ndarray:
        example = self._examples[number]
        pixels = self.inputs.pixels(decoded(example.path, self.inputs.channels), example.place)
        if shape is not None and pixels.shape != shape:
            raise ValueError(f"{example.place}: becomes {pixels.shape[:2]} pixels, the first image {shape[:2]}")
        return pixels


def usual_size(examples: Sequence[ImageExample], longest: int, multiple: int = 1) -> tuple[int, int]:
    """(H, W) for all images: their median height and width, in proportion no longer than `longest`.

    Args:
        multiple: both sides are multiples of it, and not 0.
    """
    height, width = np.median([example.shape for example in examples], axis=0)
    scale = min(1.0, longest / max(height, width))
    sides = [max(int(side * scale / multiple + 1e-9), 1) * multiple for side in (height, width)]
    return sides[0], sides[1]


def spread(examples: Sequence[ImageExample], most: int) -> list[ImageExample]:
    """Up to `most` of the examples, evenly spread."""
    places = np.linspace(0, len(examples) - 1, min(most, len(examples)))
    return [examples[round(place)] for place in places]


def pixel_statistics(
    examples: Sequence[ImageExample], size: tuple[int, int], channels: int
) -> tuple[list[float], list[float]]:
    """Mean and deviation of each channel, from 0 to 1, over at most `SAMPLE` images, evenly spread."""
    sums, squares, count = np.zeros(channels), np.zeros(channels), 0
    for flat in thumbnails(spread(examples, SAMPLE), size, channels):
        pixels = flat.reshape(-1, channels).astype(np.float64)
        sums, squares, count = sums + pixels.sum(0), squares + (pixels**2).sum(0), count + len(pixels)
    mean = sums / count
    deviation = np.sqrt(np.maximum(squares / count - mean**2, 0))
    flat_ones = deviation < 1e-3  # images without any contrast are left as they are
    return mean.round(4).tolist(), np.where(flat_ones, 1.0, deviation).round(4).tolist()


def thumbnails(examples: Iterable[ImageExample], size: tuple[int, int], channels: int) -> Iterator[np.ndarray]:
    """Each image as float32 (H W C,) from 0 to 1, resized to (H, W)."""
    inputs = ImageInputs(channels, size)
    for example in examples:
        pixels = inputs.pixels(decoded(example.path, channels), example.place)
        yield pixels.reshape(-1).astype(np.float32) / 255

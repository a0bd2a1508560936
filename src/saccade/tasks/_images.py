"""Labelled images from files: a folder with a folder for each class, or a table of paths.

Every error names the file, and the line of the table where there is one.

Shape legend: N images of all, B of a batch, C channels, H height, W width.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..models.signals.images import EIGHT_BITS, ImageInputs, open_image, to_rgb
from ._examples import read_lines, read_table

if TYPE_CHECKING:
    from PIL import Image

ENDINGS = tuple(".png .jpg .jpeg .bmp .gif .tif .tiff .webp .pgm .ppm .pbm".split())
GREY = ("1", "L", "LA", "La")
MEMORY = 2**31  # bytes of decoded images that are kept; of more, each batch is read anew
SAMPLE = 4096  # images over which mean and deviation are taken
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # by channels
_NAMED = 3  # broken files in a warning

Found = tuple[Path, "str | None", str]
"""A file, its class, and where it stands."""


@dataclasses.dataclass(frozen=True)
class ImageExample:
    """An image of a class, not decoded.

    Args:
        label: None where nothing says.
        place: for messages: `birds.csv: line 7`, or the file.
        shape: its height and width.
        grey: whether it has no colours.
    """

    path: Path
    label: str | None
    place: str
    shape: tuple[int, int]
    grey: bool


def in_class_folders(path: Path) -> list[Found]:
    """The images of each folder in `path`, which is named as their class."""
    classes = [folder for folder in sorted(path.iterdir()) if folder.is_dir() and not folder.name.startswith(".")]
    found: list[Found] = []
    for folder in classes:
        files = images_below(folder)
        if not files:
            raise ValueError(f"{folder}: holds no images; remove the folder, or put images of the class in it")
        found += [(file, folder.name, str(file)) for file in files]
    if not found:
        raise ValueError(f"{path}: holds no examples; expected a folder for each class with images in it")
    return found


def images_below(folder: Path) -> list[Path]:
    """The image files of a folder and of those in it, in order."""
    return [file for file in sorted(folder.rglob("*")) if file.suffix.lower() in ENDINGS and file.is_file()]


def in_table(path: Path, columns: Sequence[str]) -> list[tuple[Path, tuple[Any, ...], str]]:
    """Of each row the file that its first column names, relative to the table; the other columns; and its place."""
    found = []
    for place, (name, *rest) in read_table(path, columns):
        if not isinstance(name, str) or not name:
            raise ValueError(f"{place}: expected the path of an image, got {name!r:.40}")
        found.append((_existing(path.parent / name, place), tuple(rest), place))
    return found


def in_list(path: Path) -> list[Found]:
    """The images that a file has a path a line of, relative to the file."""
    places = [(line, f"{path}: line {n}") for n, line in enumerate(read_lines(path), 1)]
    return [(_existing(path.parent / line, place), None, place) for line, place in places]


def _existing(path: Path, place: str) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{place}: {path}: no such image file")
    return path


def checked_images(found: Iterable[Found], skip_broken: bool) -> list[ImageExample]:
    """The images, each decoded once, so that a broken one is found before anything is trained.

    Raises:
        ValueError: a broken one, unless they are to be left out; a warning counts them then. None that is left.
    """
    examples: list[ImageExample] = []
    broken: list[str] = []
    for path, label, place in found:
        try:
            image = decoded(path)
        except ValueError as error:
            if not skip_broken:
                where = "" if place == str(path) else f"{place}: "
                raise ValueError(f"{where}{error}; remove it, or let skip_broken leave it out") from None
            broken.append(str(path))
            continue
        examples.append(ImageExample(path, label, place, (image.height, image.width), image.mode in GREY))
    if not examples:
        raise ValueError(f"{broken[0]}: no image is left, all {len(broken)} are broken")
    if broken:
        more = f" and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
        warnings.warn(
            f"{len(broken)} of {len(broken) + len(examples)} images are broken and left out: "
            f"{', '.join(broken[:_NAMED])}{more}",
            stacklevel=2,
        )
    return examples


def decoded(path: Path, channels: int | None = None) -> Image.Image:
    """An image in 8 bits, upright, in as many channels (1, 3 or 4; None: as it is); transparent pixels become white.

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
    """Images as a model reads them: decoded once and kept where they fit into memory.

    Args:
        inputs: of the model.
        examples: N images.
        memory: bytes that may be kept.
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
        multiple: of what both sides are; at least once.
    """
    height, width = np.median([example.shape for example in examples], axis=0)
    scale = min(1.0, longest / max(height, width))
    sides = [max(int(side * scale / multiple + 1e-9), 1) * multiple for side in (height, width)]
    return sides[0], sides[1]


def spread(examples: Sequence[ImageExample], most: int) -> list[ImageExample]:
    """At most so many of the examples, evenly spread."""
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

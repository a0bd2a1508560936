"""Image preprocessing by preprocessor_config.json: `pixel_values` from files, PIL images and arrays.

Shape legend: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ....support._extras import installing
from ..checkpoints.settings import CheckpointSettings, processor_settings

if TYPE_CHECKING:
    from PIL import Image

KINDS = {"ViT": (224, None, 2), "DeiT": (256, 224, 3)}  # defaults for size, crop and filter
FILTERS = range(6)  # Pillow's filter numbers
MOST = 2**14  # maximum side of an image in pixels
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
"""Accepted formats, by Pillow's names, independent of the file's name. Some others run programs, such as EPS."""
EIGHT_BITS = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")


@dataclass(frozen=True)
class ImageInputs:
    """Preprocessing of an image: resizing, centre crop, rescaling, and normalisation by mean and standard deviation.

    Equal to transformers' ViTImageProcessor and DeiTImageProcessor with Pillow. For models with three channels images
    are converted to RGB, with white in place of transparency.

    Attributes:
        channels: C, of the model.
        resize: target (H, W); an int is the target of the shorter side; None keeps the size.
        longest: maximum of the longer side if `resize` is an int; None is unlimited.
        resample: Pillow's number of the filter.
        crop: (H, W); smaller images are padded with 0. None does not crop.
        factor: of the values 0 ... 255; None is 1.
        mean, deviation: of each channel; None does not normalise.
    """

    channels: int = 3
    resize: tuple[int, int] | int | None = (224, 224)
    longest: int | None = None
    resample: int = 2
    crop: tuple[int, int] | None = None
    factor: float | None = 1 / 255
    mean: tuple[float, ...] | None = None
    deviation: tuple[float, ...] | None = None

    @classmethod
    def of_folder(cls, folder: Path | None, channels: int) -> ImageInputs:
        """Read the processor's settings from a model's folder.

        Raises:
            FileNotFoundError: no such file. ValueError: another kind of processor, or unsupported settings.
        """
        settings, kind = processor_settings(folder, "image_processor", KINDS)
        size, crop, resample = KINDS[kind]
        settings.only("do_pad", False)
        settings.only("crop_pct", None)
        scaled, normal = settings.flag("do_rescale", True), settings.flag("do_normalize", True)
        resized, cropped = settings.flag("do_resize", True), settings.flag("do_center_crop", crop is not None)
        square = _size(settings, "crop_size", crop or size) if cropped else None
        if isinstance(square, int):
            raise settings.error("crop_size", "a height and a width")
        return cls(
            channels,
            _size(settings, "size", size) if resized else None,
            _longest(settings),
            settings.choice("resample", {n: n for n in FILTERS}, resample),
            square,
            settings.number("rescale_factor", 1 / 255) if scaled else None,
            _by_channel(settings, "image_mean", channels) if normal else None,
            _by_channel(settings, "image_std", channels) if normal else None,
        )

    def __call__(self, images: Any) -> Tensor:
        """Preprocess images to float32 (B, C, H, W).

        Args:
            images: a path, a PIL image, or a uint8 array or tensor (H, W), (H, W, C) or (C, H, W); or a list of these.

        Raises:
            ImportError: without Pillow. FileNotFoundError: no such file. TypeError: not images, or arrays of floats.
            ValueError: damaged files, an empty list, other channels, more than 8 bits, images of different sizes
                without resizing.
        """
        if not isinstance(images, (list, tuple)):
            images = list(images) if isinstance(images, (np.ndarray, Tensor)) and images.ndim == 4 else [images]
        if not len(images):
            raise ValueError("images: empty, expected at least one image")
        arrays = [self._one(image, f"images[{n}]") for n, image in enumerate(images)]
        shapes = {values.shape for values in arrays}
        if len(shapes) > 1:
            sizes = ", ".join(str(shape[1:]) for shape in sorted(shapes))
            raise ValueError(f"images: different sizes {sizes}, and the model's settings do not resize them to one")
        return torch.from_numpy(np.stack(arrays))

    def _one(self, source: Any, name: str) -> np.ndarray[Any, Any]:
        return self.values(self.pixels(source, name)[None])[0]

    def pixels(self, source: Any, name: str) -> np.ndarray[Any, Any]:
        """Resize and crop an image to uint8 (H, W, C); `name` is for errors, which are as of `__call__`."""
        if self.channels not in (1, 3, 4):
            raise ValueError(f"{name}: images need a model of 1, 3 or 4 channels, got one of {self.channels}")
        pixels = _array(source, name, self.channels)
        if pixels.shape[-1] != self.channels:
            raise ValueError(f"{name}: expected {self.channels} channels, got {pixels.shape[-1]}")
        return _cropped(self._resized(pixels), self.crop)

    def values(self, pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Rescale and normalise uint8 (B, H, W, C) to float32 (B, C, H, W)."""
        values: np.ndarray[Any, Any] = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
        # Rounds as published: the product in float64, the rest in float32.
        values = (values if self.factor is None else values * np.float64(self.factor)).astype(np.float32)
        if self.mean is not None and self.deviation is not None:
            mean, deviation = (np.asarray(each, np.float32)[:, None, None] for each in (self.mean, self.deviation))
            values = (values - mean) / deviation
        return values

    def _resized(self, pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if self.resize is None:
            return pixels
        from PIL import Image

        height, width = pixels.shape[:2]
        sides = self.resize
        size = sides if isinstance(sides, tuple) else _in_proportion(height, width, sides, self.longest)
        planes = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
        resized = np.asarray(Image.fromarray(planes).resize(size[::-1], Image.Resampling(self.resample)))
        return resized[..., None] if resized.ndim == 2 else resized


def _array(source: Any, name: str, channels: int) -> np.ndarray[Any, Any]:
    """Convert any supported image to uint8 (H, W, C)."""
    if isinstance(source, (str, Path)):
        image: Any = open_image(Path(source))
    elif isinstance(source, (np.ndarray, Tensor)):
        return _from_numbers(source.detach().cpu().numpy() if isinstance(source, Tensor) else source, name, channels)
    else:
        image = source
    pil = _pillow()
    if not isinstance(image, pil.Image):
        raise TypeError(f"{name}: expected a path, a PIL image or an array, got {type(source).__name__}")
    if image.mode not in EIGHT_BITS:
        raise ValueError(f"{name}: expected an image of 8 bits a channel, got mode {image.mode!r}; convert it first")
    if 0 in image.size:
        raise ValueError(f"{name}: expected at least one pixel, got {image.size}")
    try:
        pixels = np.array(to_rgb(image) if channels == 3 else image)
    except (OSError, SyntaxError) as error:  # Pillow decodes lazily
        raise ValueError(f"{name}: damaged ({error})") from None
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _from_numbers(pixels: np.ndarray[Any, Any], name: str, channels: int) -> np.ndarray[Any, Any]:
    if pixels.dtype != np.uint8:
        raise TypeError(f"{name}: expected an array of uint8, 0 to 255, got {pixels.dtype}")
    if pixels.ndim not in (2, 3) or 0 in pixels.shape:
        raise ValueError(f"{name}: expected shape (H, W), (H, W, C) or (C, H, W), got {pixels.shape}")
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    else:
        first, last = (pixels.shape[axis] in {1, 3, 4, channels} for axis in (0, 2))
        if first == last:
            problem = "both ends may be channels; give a PIL image" if first else f"no end has {channels} channels"
            raise ValueError(f"{name}: expected shape (H, W, C) or (C, H, W), got {pixels.shape}: {problem}")
        pixels = pixels.transpose(1, 2, 0) if first else pixels
    if channels == 3 and pixels.shape[-1] == 1:
        return np.repeat(pixels, 3, -1)
    if channels == 3 and pixels.shape[-1] == 4:
        alpha = pixels[..., 3:] / 255
        return np.round(alpha * pixels[..., :3] + (1 - alpha) * 255).astype(np.uint8)
    return pixels


def to_rgb(image: Image.Image) -> Image.Image:
    """The image with three channels, white in place of transparency."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = _pillow().new("RGBA", image.size, (255, 255, 255, 255))
        image = _pillow().alpha_composite(white, image)
    return image.convert("RGB")


def open_image(path: Path) -> Image.Image:
    """Open an image file, rotated by its EXIF tag.

    Raises:
        FileNotFoundError: no such file. ValueError: damaged, or another format than `FORMATS`.
    """
    pil = _pillow()
    from PIL import ImageOps

    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such image file")
    try:
        with pil.open(path, formats=FORMATS) as image:
            image.load()
            return ImageOps.exif_transpose(image)
    except pil.UnidentifiedImageError:
        raise ValueError(f"{path}: no image of a known format; expected one of {', '.join(FORMATS)}") from None
    except (OSError, SyntaxError, ValueError, EOFError, pil.DecompressionBombError) as error:
        raise ValueError(f"{path}: damaged, or not an image that Pillow can read ({error})") from None


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ImportError(f"images: reading them needs Pillow: {installing('models')}") from None
    return Image


def _size(settings: CheckpointSettings, name: str, default: int) -> tuple[int, int] | int:
    """Target (height, width), or target of the shorter side."""
    given = settings.get(name, default)
    if isinstance(given, dict):
        keys = set(given)
        if name == "size" and keys in ({"shortest_edge"}, {"shortest_edge", "longest_edge"}):
            sides = [given["shortest_edge"]]
        else:
            sides = [given.get("height"), given.get("width")] if keys == {"height", "width"} else []
    else:
        sides = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given, given]
    if len(sides) not in (1, 2) or not all(type(side) is int and 0 < side <= MOST for side in sides):
        raise settings.error(name, "a side of pixels, height and width, or shortest_edge")
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def _longest(settings: CheckpointSettings) -> int | None:
    """Maximum of the longer side in `size`; None without one."""
    given = settings.get("size")
    longest = given.get("longest_edge") if isinstance(given, dict) else None
    if longest is not None and not (type(longest) is int and 0 < longest <= MOST):
        raise settings.error("size", f"longest_edge an int from 1 to {MOST}")
    return longest


def _by_channel(settings: CheckpointSettings, name: str, channels: int) -> tuple[float, ...]:
    given = settings.get(name, 0.5)
    values = list(given) if isinstance(given, (list, tuple)) else [given] * channels
    numbers = all(type(value) in (int, float) and np.isfinite(value) for value in values)
    if len(values) != channels or not numbers or (name == "image_std" and 0 in values):
        raise settings.error(name, f"{channels} numbers, one for each channel")
    return tuple(float(value) for value in values)


def _in_proportion(height: int, width: int, shorter: int, longest: int | None) -> tuple[int, int]:
    """(H, W) with the shorter side `shorter`, unless the longer one would exceed `longest`; rounded as published."""
    low, high = sorted((height, width))
    exact: float = shorter
    if longest is not None and high / low * shorter > longest:
        exact = longest * low / high
        shorter = round(exact)
    if low == shorter and longest is not None:
        return height, width
    long = int(exact * high / low)
    return (long, shorter) if width <= height else (shorter, long)


def _cropped(pixels: np.ndarray[Any, Any], crop: tuple[int, int] | None) -> np.ndarray[Any, Any]:
    """The centre of (H, W, C), padded with 0 if it is smaller than the crop."""
    if crop is None:
        return pixels
    for axis, wanted in enumerate(crop):
        there = pixels.shape[axis]
        if there < wanted:
            before = ceil((wanted - there) / 2)
            border = [(before, wanted - there - before) if n == axis else (0, 0) for n in range(3)]
            pixels = np.pad(pixels, border)
        else:
            start = (there - wanted) // 2
            pixels = pixels[start : start + wanted] if axis == 0 else pixels[:, start : start + wanted]
    return pixels

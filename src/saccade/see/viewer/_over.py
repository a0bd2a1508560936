"""Weights drawn over images by patch, and over sounds by frame."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ._axes import colours, label_axes

_ACCENT = (28 / 255, 78 / 255, 216 / 255)
_SOUND = 0.28  # of the axes' height
_DEEPEST = 0.8  # opacity of the largest weight


def check_patches(patches: tuple[int, int] | None, count: int) -> tuple[int, int]:
    """(rows, columns) of the patches. ValueError if their number is not that of the keys."""
    if patches is None:
        side = math.isqrt(count)
        if side * side != count:
            raise ValueError(
                f"patches: {count} keys are not a square; pass patches=(rows, columns), and skip= special tokens"
            )
        return side, side
    rows, columns = patches
    if rows * columns != count:
        raise ValueError(
            f"patches: expected {count}, one for each key that is not skipped (skip=), got {rows} x {columns} = "
            f"{rows * columns}"
        )
    return rows, columns


def draw_over_image(
    axes: Any, weights: np.ndarray, picture: np.ndarray, grid: tuple[int, int], limit: float | None
) -> None:
    """The image in pale grey, with blue over each patch, as opaque as its weight is large."""
    height, width = picture.shape
    most = float(np.nanmax(weights, initial=0.0)) if limit is None else float(limit)
    share = np.nan_to_num(np.clip(weights / (most or 1.0), 0, 1)).reshape(grid)
    cover = np.empty((*grid, 4))
    cover[..., :3], cover[..., 3] = _ACCENT, _DEEPEST * share
    place = (-0.5, width - 0.5, height - 0.5, -0.5)
    axes.imshow(picture, cmap="gray", vmin=-0.5, vmax=1, extent=place, interpolation="antialiased")
    axes.imshow(cover, extent=place, interpolation="nearest")
    axes.set_xlim(place[0], place[1])
    axes.set_ylim(place[2], place[3])
    axes.set_axis_off()


def picture_of(image: Any) -> np.ndarray:
    """(h, w) of 0 to 1, the brightness of the image: colour is for the weights.

    Numbers of 0 to 255 are bytes; an image with numbers below 0 or above 255, as after a normalisation, is scaled from
    its least value to its largest.
    """
    if hasattr(image, "detach"):
        image = image.detach().to("cpu").float().numpy()
    picture = np.asarray(image)
    if picture.ndim == 3 and picture.shape[0] in (1, 3) and picture.shape[2] not in (1, 3, 4):
        picture = np.moveaxis(picture, 0, 2)  # torch images have channels first
    if picture.ndim not in (2, 3) or (picture.ndim == 3 and picture.shape[2] not in (1, 3, 4)) or 0 in picture.shape:
        raise ValueError(f"image: expected (height, width) or (height, width, 3), got shape {picture.shape}")
    picture = picture.astype(np.float64)
    if not np.isfinite(picture).all():
        raise ValueError("image: expected finite numbers, got NaN or inf")
    picture = picture if picture.ndim == 2 else picture[..., :3].mean(-1)
    least, most = float(picture.min()), float(picture.max())
    if least < 0 or most > 255:
        return (picture - least) / (most - least or 1.0)
    return picture / 255 if most > 1 else picture


def draw_with_sound(
    axes: Any, weights: np.ndarray, queries: list[str] | None, heard: np.ndarray, seconds: float, most: float
) -> None:
    """Weights on an axis of time, one row as a curve and several as a map, with the sound above them."""
    rows, frames = weights.shape
    if rows == 1:
        top = max(float(np.nanmax(weights, initial=0.0)), most) or 1.0
        edges = np.linspace(0, seconds, frames + 1)
        axes.stairs(np.nan_to_num(weights[0]), edges, fill=True, color=_ACCENT, alpha=0.85)
        axes.set_ylabel("weight" if queries is None else queries[0], fontsize=8, parse_math=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7)
        axes.set_ylim(min(0.0, float(np.nanmin(weights, initial=0.0))), top / (1 - _SOUND - 0.02))
        axes.set_yticks([tick for tick in axes.get_yticks() if tick <= top])
    else:
        least = -most if np.nanmin(weights, initial=0.0) < 0 else 0.0
        place = (0.0, seconds, rows - 0.5, -0.5)
        shown = np.ma.masked_invalid(weights)
        image = axes.imshow(
            shown, cmap=colours(weights), vmin=least, vmax=most or 1.0, extent=place, interpolation="nearest"
        )
        image.axes.set_aspect("auto")
        label_axes(axes, [str(i) for i in range(rows)] if queries is None else queries, None)
        axes.set_ylim(rows - 0.5, -0.5 - rows * (_SOUND + 0.02) / (1 - _SOUND - 0.02))
    axes.set_xlim(0, seconds)
    axes.set_xlabel("seconds", fontsize=8)
    above = axes.inset_axes((0, 1 - _SOUND, 1, _SOUND))
    if heard.ndim == 1:
        above.plot(np.linspace(0, seconds, len(heard)), heard, color="#59606d", linewidth=0.4)
    else:
        extent = (0, seconds, 0, 1)
        above.imshow(heard, origin="lower", aspect="auto", cmap="gray_r", extent=extent, interpolation="antialiased")
    above.set_xlim(0, seconds)
    above.set_axis_off()


def sound_of(sound: Any, seconds: float | None) -> np.ndarray | None:
    """(n,) or (frequencies, n); None without a sound."""
    if sound is None:
        if seconds is not None:
            raise ValueError("seconds: only for a sound; pass sound=")
        return None
    if seconds is None:
        raise ValueError("seconds: the length of the sound is needed for the axis of time")
    if not seconds > 0:
        raise ValueError(f"seconds: must be greater than 0, got {seconds}")
    if hasattr(sound, "detach"):
        sound = sound.detach().to("cpu").float().numpy()
    heard = np.asarray(sound, dtype=np.float64)
    heard = heard[0] if heard.ndim == 2 and heard.shape[0] == 1 else heard
    if heard.ndim not in (1, 2) or 0 in heard.shape:
        raise ValueError(f"sound: expected samples (n,) or a spectrogram (frequencies, n), got shape {heard.shape}")
    return heard

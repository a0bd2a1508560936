"""Pictures of numbers: a map of weights, weights over the patches of an image, weights over a sound.

Needs matplotlib (the ``plot`` extra). Shape legend: B items, H heads, R rows, K keys, P panels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...operator._masks import Mask
from ...support._extras import installing
from ._axes import colour_bar, paint_map
from ._over import check_patches, draw_over_image, draw_with_sound, picture_of, sound_of

MOST_CELLS = 2**26
LONGEST_LABEL = 24
MOST_NUMBERS = 20  # keys up to which cells show their numbers
_COLUMNS = 4  # panels side by side


def draw(
    weights: Any,
    *,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    title: str | Sequence[str] | None = None,
    ax: Any = None,
    item: int | None = None,
    mask: Any = None,
    limit: float | None = None,
    numbers: bool | None = None,
    colorbar: bool = True,
    image: Any = None,
    patches: tuple[int, int] | None = None,
    sound: Any = None,
    seconds: float | None = None,
    skip: int | Sequence[int] = 0,
) -> Any:
    """Draw attention weights, or any other numbers of pairs, with matplotlib.

    Args:
        weights: (R, K), or (H, R, K) for one map a head, or (B, H, R, K) with ``item``, as `saccade.attention_weights`
            and ``watched.weights`` return them; (K,) is one row. They need not be probabilities: negative ones, such as
            differences, have a second colour. NaN is grey.
        queries: labels of the rows, one for each; long ones are cut, many are thinned.
        keys: labels of the keys, the same.
        title: of the map; of several maps one title for each, or one for all.
        ax: the axes to draw in, one for each map; None makes a figure with pyplot.
        item: the number of the item, for several items.
        mask: the visible pairs, a `saccade` mask or a bool array (R, K), True = attend; the others are grey.
        limit: the value of the full colour; None is the largest value.
        numbers: whether cells hold their number; None: up to 20 keys in a single map.
        colorbar: whether to draw a colour bar.
        image: (height, width) or (height, width, 3 or 4): every row is drawn over it as ``patches``.
        patches: (rows, columns) of the image's patches; None is a square.
        sound: samples (n,) or a spectrogram (frequencies, n), low ones first: drawn above, on the same axis of time.
        seconds: the length of the sound.
        skip: keys that are no patches or frames: so many at the start, or these (negative ones from the end).

    Returns:
        The axes, or an array of them where several maps are drawn; ``axes.figure.savefig("map.svg")`` writes a file.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: weights or labels of another type.
        ValueError: shapes, labels or patches that do not fit.

    Example:
        >>> import torch, saccade
        >>> from matplotlib.figure import Figure  # without ax= pyplot makes a figure
        >>> query, key = torch.randn(2, 1, 1, 3, 8)
        >>> weights = saccade.attention_weights(query, key, saccade.Causal())
        >>> words = ["The", "cat", "sat"]
        >>> ax = saccade.draw(weights, queries=words, keys=words, mask=saccade.Causal(), ax=Figure().subplots())
        >>> [label.get_text() for label in ax.get_yticklabels()]
        ['The', 'cat', 'sat']
    """
    if image is not None and (sound is not None or mask is not None):
        raise ValueError("image: cannot be combined with sound= or mask=")
    panels = _panels(weights, item, rows_apart=image is not None)
    hidden = _hidden(mask, panels)
    if image is not None:
        return _over_image(_without(panels, skip), queries, title, ax, picture_of(image), patches, limit)
    heard = sound_of(sound, seconds)
    if heard is not None:
        panels, hidden = _without(panels, skip), None if hidden is None else _without(hidden, skip)
        keys = None  # the axis of time labels them
    count, rows, columns = panels.shape
    labels = _labels("queries", queries, rows), _labels("keys", keys, columns)
    titles = _titles(title, None, count, "head")
    most = float(np.nanmax(np.abs(panels), initial=0.0)) if limit is None else float(limit)
    numbers = columns <= MOST_NUMBERS and count == 1 if numbers is None else numbers
    axes = _axes(ax, count, _size(rows, columns, wide=heard is not None))
    cells = None
    for number, (place, name) in enumerate(zip(axes, titles, strict=True)):
        shown = panels[number] if hidden is None else np.where(hidden[number], np.nan, panels[number])
        if heard is not None and seconds is not None:
            draw_with_sound(place, shown, labels[0], heard, seconds, most)
        else:
            cells = paint_map(place, shown, labels, most, numbers=numbers)
        _entitle(place, name)
    if colorbar and cells is not None:
        colour_bar(axes, cells)
    return _given_back(axes, title, ax)


def _over_image(
    panels: np.ndarray,
    queries: Sequence[str] | None,
    title: str | Sequence[str] | None,
    ax: Any,
    picture: np.ndarray,
    patches: tuple[int, int] | None,
    limit: float | None,
) -> Any:
    """Every row (P, 1, K) over the picture."""
    grid = check_patches(patches, panels.shape[-1])
    titles = _titles(title, _labels("queries", queries, len(panels)), len(panels), "row")
    axes = _axes(ax, len(panels), (3.0, 3.0))
    for place, panel, name in zip(axes, panels, titles, strict=True):
        draw_over_image(place, panel[0], picture, grid, limit)
        _entitle(place, name)
    return _given_back(axes, title, ax)


# Arguments


def _panels(weights: Any, item: int | None, *, rows_apart: bool = False) -> np.ndarray:
    """(P, R, K): one map a panel; with `rows_apart` one row a panel."""
    given = weights if hasattr(weights, "shape") else _numbers("weights", weights)
    shape = tuple(given.shape)
    if len(shape) == 4:
        if item is None and shape[0] != 1:
            raise ValueError(f"item: expected one of the {shape[0]} items, 0 to {shape[0] - 1}")
        if not -shape[0] <= (item or 0) < shape[0]:
            raise ValueError(f"item: {item} does not exist; there are 0 to {shape[0] - 1}")
        given = given[item or 0]
    elif item is not None:
        raise ValueError(f"item: only for weights (B, H, R, K), got the shape {shape}")
    size = math.prod(given.shape)
    if not 1 <= len(given.shape) <= 3 or not size:
        raise ValueError(f"weights: expected (R, K), (H, R, K) or (B, H, R, K), got shape {shape}")
    if size > MOST_CELLS:
        raise ValueError(
            f"weights: {shape} is more than a picture holds ({MOST_CELLS:,} pairs); choose rows, keys, heads"
        )
    values = _numbers("weights", given)
    values = values.reshape(-1, *values.shape[-2:]) if values.ndim > 1 else values.reshape(1, 1, -1)
    return values.reshape(-1, 1, values.shape[-1]) if rows_apart else values


def _numbers(name: str, given: Any) -> np.ndarray:
    """Any tensor, array or list as float64."""
    if hasattr(given, "detach"):
        given = given.detach().to("cpu").double().numpy()
    try:
        return np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a tensor or an array of numbers, got {type(given).__name__}") from None


def _hidden(mask: Any, panels: np.ndarray) -> np.ndarray | None:
    """True where the mask hides a pair, (P, R, K); None without a mask."""
    if mask is None:
        return None
    count, rows, keys = panels.shape
    visible = mask.dense(rows, keys).cpu().numpy()[0] if isinstance(mask, Mask) else _numbers("mask", mask) != 0
    if visible.shape[-2:] != (rows, keys) or (visible.ndim == 3 and len(visible) not in (1, count)) or visible.ndim > 3:
        raise ValueError(f"mask: expected shape {(rows, keys)}, one for each pair, got {visible.shape}")
    return ~np.broadcast_to(visible, panels.shape)


def _without(panels: np.ndarray, skip: int | Sequence[int]) -> np.ndarray:
    """The panels without the keys to skip."""
    count = panels.shape[-1]
    left_out = list(range(skip)) if isinstance(skip, int) else list(skip)
    for at in left_out:
        if not -count <= at < count:
            raise ValueError(f"skip: there is no key {at}; there are 0 to {count - 1}")
    return np.delete(panels, left_out, axis=-1)


def _labels(name: str, given: Sequence[str] | None, count: int) -> list[str] | None:
    """Labels cut to one line."""
    if given is None:
        return None
    if isinstance(given, str):
        raise TypeError(f"{name}: expected one label for each of {count}, got a single str; give a list")
    if len(given) != count:
        raise ValueError(f"{name}: expected {count} labels, got {len(given)}")
    from ..inspection import Word

    plain = [Word(str(label), 0, 0, 0, 0).label for label in given]
    return [label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "…" for label in plain]


def _titles(title: Any, names: list[str] | None, count: int, noun: str) -> list[str]:
    """One title for each panel."""
    if title is not None and not isinstance(title, str):
        if len(title) != count:
            raise ValueError(f"title: expected {count} titles, got {len(title)}")
        return [str(each) for each in title]
    if count == 1:
        return [title or (names[0] if names else "")]
    return names or [f"{noun} {i}".strip() for i in range(count)]


def _axes(ax: Any, count: int, size: tuple[float, float]) -> list[Any]:
    """The given axes, or those of a new figure."""
    if ax is not None:
        axes = list(np.asarray(ax, dtype=object).reshape(-1))
        if len(axes) != count:
            raise ValueError(f"ax: expected {count} axes, one a map, got {len(axes)}")
        return axes
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ImportError(f"drawing needs matplotlib: {installing('plot')}") from None
    columns = min(count, _COLUMNS)
    rows = math.ceil(count / columns)
    small = 1.0 if count == 1 else 0.7
    figure, grid = plt.subplots(
        rows, columns, figsize=(columns * size[0] * small, rows * size[1] * small), layout="constrained", squeeze=False
    )
    for unused in grid.reshape(-1)[count:]:
        figure.delaxes(unused)
    return list(grid.reshape(-1)[:count])


def _size(rows: int, keys: int, *, wide: bool) -> tuple[float, float]:
    """Inches, no wider than a page."""
    width, height = (min(7.0, max(2.2, 0.24 * count + 0.9)) for count in (keys, rows))
    return (7.0, max(2.4, height * 0.6 + 1.2)) if wide else (width + 0.9, height)


def _entitle(axes: Any, title: str) -> None:
    if title:
        axes.set_title(title, fontsize=9, loc="left", parse_math=False)


def _given_back(axes: list[Any], title: Any, ax: Any) -> Any:
    if len(axes) == 1:
        return axes[0]
    if ax is None and isinstance(title, str):
        axes[0].figure.suptitle(title, fontsize=10, parse_math=False)
    return np.array(axes, dtype=object)

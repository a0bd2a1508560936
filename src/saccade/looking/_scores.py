"""What the weights of one text say: habits of each head here, and how telling each single weight is.

Shapes: W words with the start token; maps are (layers, heads, W, W).
"""

from __future__ import annotations

import numpy as np

from ._collect import AttentionMap

_FLOOR = 0.01


def here(seen: AttentionMap) -> dict[str, np.ndarray]:
    """Each head's habits on this text, on words: a (layers, heads) array by name, NaN where the text cannot tell.

    ``previous`` ``self`` ``sink`` ``delimiter``: the weight on the word before, on the word itself, on ``<s>`` and
    on punctuation, averaged over the words (for ``delimiter`` over those that come after a punctuation mark).
    ``repeat`` and ``duplicate``: the weight on the words that followed the earlier occurrences of a repeated word,
    and on those occurrences. ``broad``: the entropy over that of a row that looks at everything alike.
    ``entropy`` is in nats.
    """
    w, size = seen.weights, len(seen.words)
    rows = np.arange(1, size)
    delimiters = np.array([word.is_delimiter for word in seen.words])
    after = delimiters.cumsum() > delimiters
    out = {
        "previous": w[:, :, rows[1:], rows[1:] - 1].mean(-1) if size > 2 else _nothing(seen),
        "self": w[:, :, rows, rows].mean(-1),
        "sink": w[:, :, rows, 0].mean(-1),
        "delimiter": w[:, :, after][..., delimiters].sum(-1).mean(-1) if after.any() else _nothing(seen),
        "entropy": seen.entropy(),
    }
    earlier = earlier_occurrences(seen)
    repeated = earlier.any(-1)
    following = np.roll(earlier, 1, axis=-1) & earlier_or_self(size, strict=True)
    for name, targets in (("repeat", following), ("duplicate", earlier)):
        rows_with = repeated & targets.any(-1)
        out[name] = (w * targets).sum(-1)[:, :, rows_with].mean(-1) if rows_with.any() else _nothing(seen)
    out["broad"] = out["entropy"] / np.log(rows + 1).mean()
    return out


def earlier_or_self(size: int, *, strict: bool = False) -> np.ndarray:
    """(W, W): the keys a query may see, without itself where ``strict``."""
    return np.asarray(np.tril(np.ones((size, size), dtype=bool), -1 if strict else 0))


def earlier_occurrences(seen: AttentionMap) -> np.ndarray:
    """(W, W): whether key k is an earlier occurrence of the word q, upper and lower case alike; not for delimiters."""
    names = np.array(
        [f"\n{i}" if w.is_start or w.is_delimiter else w.text.casefold() for i, w in enumerate(seen.words)]
    )
    return np.asarray((names[:, None] == names[None, :]) & earlier_or_self(len(names), strict=True))


def telling(weights: np.ndarray) -> np.ndarray:
    """How telling each weight of a map is, in nats: ``w * ln(w / expected)``, 0 where it is what was expected.

    Expected is the largest of what a head that looks everywhere alike would give, what this head gives to the same
    distance in the other rows, and what it gives to the same word from the other rows.
    """
    if weights.ndim > 3:  # layer by layer: a large model on a long text would need several maps at once
        return np.stack([telling(layer) for layer in weights])
    size = weights.shape[-1]
    alike = 1 / np.arange(1, size + 1)[:, None]
    expected = np.maximum(np.maximum(_same_distance(weights), _same_key(weights)), alike)
    expected = np.maximum(expected, _FLOOR)
    gain = weights * np.log(np.maximum(weights, 1e-12) / expected)
    return np.where(earlier_or_self(size), np.maximum(gain, 0), 0).astype(weights.dtype)


def _same_key(w: np.ndarray) -> np.ndarray:
    others = np.maximum(w.shape[-1] - 1 - np.arange(w.shape[-1]), 1)
    return np.asarray((w.sum(-2, keepdims=True) - w) / others)


def _same_distance(w: np.ndarray) -> np.ndarray:
    size = w.shape[-1]
    sums = np.stack([np.trace(w, -d, axis1=-2, axis2=-1) for d in range(size)], -1)  # (layers, heads, W) by distance
    distance = np.clip(np.subtract.outer(np.arange(size), np.arange(size)), 0, None)
    return np.asarray((sums[..., distance] - w) / np.maximum(size - 1 - distance, 1))


def _nothing(seen: AttentionMap) -> np.ndarray:
    return np.full((seen.layers, seen.heads), np.nan)

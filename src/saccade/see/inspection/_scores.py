"""Scores of one text's weights: averages of each head, and how surprising each single weight is.

Shape legend: W words with the special tokens; maps are (layers, heads, W, W).
"""

from __future__ import annotations

import numpy as np

from ...support._lazy_names import renamed_arguments
from ._chance import ChanceMean, mean_of
from ._collect import AttentionMap

_FLOOR = 0.01


@renamed_arguments(seen="attention")
def here(attention: AttentionMap) -> dict[str, np.ndarray]:
    """The averages of each head on this text: a (layers, heads) array by name.

    The values are NaN where the text has no case. They are averages over the words of the text. Special tokens count as
    keys, never as queries.

    ``previous`` ``next`` ``self``: the weight on the word before, on the word after (only where the model looks ahead)
    and on the word itself. ``sink``: on the first token, ``<s>`` or [CLS] or the first word, from the words after it.
    ``special`` and ``delimiter``: on the other special tokens and on punctuation, from the words that see any besides
    themselves. ``repeat`` and ``duplicate``: the weight on the words after the other occurrences of a repeated word,
    and on those occurrences; in a causal model only the earlier ones count. ``broad``: the entropy divided by that of a
    row with equal weights. ``entropy`` is in nats.
    """
    entropy = attention.entropy()
    out = {name: _mean(values) for name, values in by_row(attention, attention.weights).items()} | {"entropy": entropy}
    most = np.log(attention.seen_by[attention.ordinary]).mean()
    out["broad"] = entropy / most if most else np.full_like(entropy, np.nan)
    return out


def by_chance(attention: AttentionMap) -> dict[str, ChanceMean]:
    """The scores of `here` for a head with equal attention weights, (layers, 1) each."""
    return {name: mean_of(values, different(attention)) for name, values in by_row(attention, attention.alike).items()}


def different(attention: AttentionMap) -> float:
    """The share of distinct words."""
    words = [attention.words[i].text.casefold() for i in attention.ordinary]
    return len(set(words)) / len(words) if words else 1.0


def by_row(attention: AttentionMap, w: np.ndarray) -> dict[str, np.ndarray]:
    """The rows that `here` averages: (layers, heads, rows) by name, from weights (layers, heads, W, W)."""
    rows = attention.ordinary
    is_word = np.array([not word.special for word in attention.words])
    beside = rows[1:][is_word[rows[1:] - 1]]  # words directly after a word
    out = {
        "previous": w[:, :, beside, beside - 1],
        "next": w[:, :, beside - 1, beside][..., : 0 if attention.causal else None],
        "self": w[:, :, rows, rows],
        "sink": w[:, :, rows[rows > 0], 0],
        "special": _on(attention, w, ~is_word & (np.arange(len(attention.words)) > 0)),
        "delimiter": _on(attention, w, np.array([word.is_delimiter for word in attention.words])),
    }
    others = occurrences(attention)
    for name, targets in (("repeat", followers(attention, others)), ("duplicate", others)):
        out[name] = (w * targets).sum(-1)[:, :, targets.any(-1)]
    return out


def visible(attention: AttentionMap) -> np.ndarray:
    """(W, W): the keys that a query may attend to."""
    size = len(attention.words)
    everything = np.ones((size, size), dtype=bool)
    return np.tril(everything) if attention.causal else everything


def occurrences(attention: AttentionMap) -> np.ndarray:
    """(W, W): whether key k is a visible other occurrence of word q, in upper or lower case; no delimiters."""
    names = np.array(
        [f"\n{i}" if w.special or w.is_delimiter else w.text.casefold() for i, w in enumerate(attention.words)]
    )
    same = (names[:, None] == names[None, :]) & ~np.eye(len(names), dtype=bool)
    return np.asarray(same & visible(attention))


def followers(attention: AttentionMap, others: np.ndarray) -> np.ndarray:
    """(W, W) bool: whether key k is visible, follows a word that ``others`` marks for q, and is neither q nor a special
    token."""
    out = np.zeros_like(others)
    out[:, 1:] = others[:, :-1]
    out[:, [word.special for word in attention.words]] = False
    return np.asarray(out & visible(attention) & ~np.eye(len(out), dtype=bool))


def telling(weights: np.ndarray, causal: bool = True, alike: np.ndarray | None = None) -> np.ndarray:
    """How surprising each weight of a map is, in nats: ``w * ln(w / expected)``, and 0 for an expected weight.

    The expected weight is the largest of three: the weight of a head with equal weights (``alike``; None: every word
    has the same number of pieces), the mean weight of this head at the same distance in the other rows, and the mean
    weight on the same word from the other rows.

    Args:
        weights: (..., W, W).
    """
    if weights.ndim > 3:  # layer by layer: a large model on a long text would need several maps
        of = [None] * len(weights) if alike is None else alike
        return np.stack([telling(layer, causal, even) for layer, even in zip(weights, of, strict=True)])
    size = weights.shape[-1]
    if alike is None:
        alike = np.broadcast_to(1 / np.arange(1, size + 1)[:, None] if causal else 1 / size, (size, size))
    expected = np.maximum(np.maximum(_same_distance(weights), _same_key(weights, causal)), alike)
    expected = np.maximum(expected, _FLOOR)
    gain = np.maximum(weights * np.log(np.maximum(weights, 1e-12) / expected), 0)
    return (np.tril(gain) if causal else gain).astype(weights.dtype)


def _same_key(w: np.ndarray, causal: bool) -> np.ndarray:
    size = w.shape[-1]
    others = np.maximum(size - 1 - np.arange(size), 1) if causal else max(size - 1, 1)
    return np.asarray((w.sum(-2, keepdims=True) - w) / others)


def _same_distance(w: np.ndarray) -> np.ndarray:
    size = w.shape[-1]
    offsets = range(1 - size, size)
    sums = np.stack([np.trace(w, d, axis1=-2, axis2=-1) for d in offsets], -1)  # (layers, heads, 2 W - 1) by k - q
    distance = np.subtract.outer(np.arange(size), np.arange(size)).T
    return np.asarray((sums[..., distance + size - 1] - w) / np.maximum(size - 1 - abs(distance), 1))


def _on(attention: AttentionMap, w: np.ndarray, group: np.ndarray) -> np.ndarray:
    """The weight on a group of words, for the words that see one of it besides themselves."""
    other = (visible(attention) & group & ~np.eye(len(group), dtype=bool)).any(-1)
    rows = attention.ordinary[other[attention.ordinary]]
    return np.asarray(w[:, :, rows][..., group].sum(-1))


def _mean(values: np.ndarray) -> np.ndarray:
    """The mean over the last axis; NaN for an empty axis."""
    return np.asarray(values.mean(-1)) if values.shape[-1] else np.full(values.shape[:-1], np.nan)

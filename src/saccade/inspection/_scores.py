"""What the weights of one text say: habits of each head here, and how telling each single weight is.

Shape legend: W words with the special tokens; maps are (layers, heads, W, W).
"""

from __future__ import annotations

import numpy as np

from ._chance import ChanceMean, mean_of
from ._collect import AttentionMap

_FLOOR = 0.01


def here(seen: AttentionMap) -> dict[str, np.ndarray]:
    """Each head's habits on this text, on words: a (layers, heads) array by name, NaN where the text cannot tell.

    Averages over the words of the text; special tokens count as looked at, never as looking.

    ``previous`` ``next`` ``self``: the weight on the word before, the word after (only where the model looks ahead)
    and the word itself. ``sink``: on the very first token, ``<s>`` or [CLS] or the first word, from the words after it.
    ``special`` and ``delimiter``: on the other special tokens and on punctuation, from the words that see any besides
    themselves. ``repeat`` and ``duplicate``: the weight on the words that followed the other occurrences of a
    repeated word, and on those occurrences; where no word looks ahead these are the earlier ones.
    ``broad``: the entropy over that of a row that looks at everything alike. ``entropy`` is in nats.
    """
    entropy = seen.entropy()
    out = {name: _mean(values) for name, values in by_row(seen, seen.weights).items()} | {"entropy": entropy}
    most = np.log(seen.seen_by[seen.ordinary]).mean()
    out["broad"] = entropy / most if most else np.full_like(entropy, np.nan)
    return out


def by_chance(seen: AttentionMap) -> dict[str, ChanceMean]:
    """What chance gives to the averages of `here`, (layers, 1) each, by the same code."""
    return {name: mean_of(values, different(seen)) for name, values in by_row(seen, seen.alike).items()}


def different(seen: AttentionMap) -> float:
    """The share of the words that are different ones."""
    words = [seen.words[i].text.casefold() for i in seen.ordinary]
    return len(set(words)) / len(words) if words else 1.0


def by_row(seen: AttentionMap, w: np.ndarray) -> dict[str, np.ndarray]:
    """What `here` averages: of weights (layers, heads, W, W) those of each row, (layers, heads, rows)."""
    rows = seen.ordinary
    is_word = np.array([not word.special for word in seen.words])
    beside = rows[1:][is_word[rows[1:] - 1]]  # words with a word right before them
    out = {
        "previous": w[:, :, beside, beside - 1],
        "next": w[:, :, beside - 1, beside][..., : 0 if seen.causal else None],
        "self": w[:, :, rows, rows],
        "sink": w[:, :, rows[rows > 0], 0],
        "special": _on(seen, w, ~is_word & (np.arange(len(seen.words)) > 0)),
        "delimiter": _on(seen, w, np.array([word.is_delimiter for word in seen.words])),
    }
    others = occurrences(seen)
    for name, targets in (("repeat", followers(seen, others)), ("duplicate", others)):
        out[name] = (w * targets).sum(-1)[:, :, targets.any(-1)]
    return out


def visible(seen: AttentionMap) -> np.ndarray:
    """(W, W): the keys a query may see."""
    size = len(seen.words)
    everything = np.ones((size, size), dtype=bool)
    return np.tril(everything) if seen.causal else everything


def occurrences(seen: AttentionMap) -> np.ndarray:
    """(W, W): whether key k is another occurrence of the word q that q sees, in upper or lower case; no delimiters."""
    names = np.array([f"\n{i}" if w.special or w.is_delimiter else w.text.casefold() for i, w in enumerate(seen.words)])
    same = (names[:, None] == names[None, :]) & ~np.eye(len(names), dtype=bool)
    return np.asarray(same & visible(seen))


def followers(seen: AttentionMap, others: np.ndarray) -> np.ndarray:
    """(W, W): whether key k is the word after one of the ``others`` of q, and neither q itself nor a special token."""
    out = np.zeros_like(others)
    out[:, 1:] = others[:, :-1]
    out[:, [word.special for word in seen.words]] = False
    return np.asarray(out & visible(seen) & ~np.eye(len(out), dtype=bool))


def telling(weights: np.ndarray, causal: bool = True, alike: np.ndarray | None = None) -> np.ndarray:
    """How telling each weight of a map is, in nats: ``w * ln(w / expected)``, 0 where it is what was expected.

    Expected is the largest of what a head that looks everywhere alike would give (``alike``, of one head; of as many
    pieces in every word where it is None), what this head gives to the same distance in the other rows, and what it
    gives to the same word from the other rows.
    """
    if weights.ndim > 3:  # layer by layer: a large model on a long text would need several maps at once
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


def _on(seen: AttentionMap, w: np.ndarray, group: np.ndarray) -> np.ndarray:
    """The weight on a group of words, of the words that see one of it besides themselves."""
    other = (visible(seen) & group & ~np.eye(len(group), dtype=bool)).any(-1)
    rows = seen.ordinary[other[seen.ordinary]]
    return np.asarray(w[:, :, rows][..., group].sum(-1))


def _mean(values: np.ndarray) -> np.ndarray:
    """Over the last axis; NaN where there is nothing."""
    return np.asarray(values.mean(-1)) if values.shape[-1] else np.full(values.shape[:-1], np.nan)

"""A Markov chain that predicts a token from its two neighbours.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DISCOUNT = 0.75  # taken from the count of each pair, for the pairs that were not there


class MarkovChain:
    """The probabilities of a token given its neighbours l and r, each token drawn by the one before it.

        p(t | l, r) = p(t | l) p(r | t) / sum_t' p(t' | l) p(r | t')

    The pairs are discounted:  p(b | a) = (max(n(ab) - d, 0) + d N(a.) p(b)) / n(a),  where N(a.) counts the different
    tokens after a, and  p(b) = (n(b) + 1) / (n + V).

    Args:
        rows: tokens of texts, the special ones included.
        size: V.
    """

    def __init__(self, rows: Sequence[Sequence[int]], size: int):
        tokens = [np.array(row, np.int64) for row in rows]
        single = np.bincount(np.concatenate(tokens), minlength=size) + 1.0
        pairs, counts = np.unique(np.concatenate([row[:-1] * size + row[1:] for row in tokens]), return_counts=True)
        first, second = np.divmod(pairs, size)
        total = np.bincount(first, counts, minlength=size)
        self._share = single / single.sum()
        self._rest = np.where(total > 0, DISCOUNT * np.bincount(first, minlength=size) / np.maximum(total, 1), 1.0)
        kept = (counts - DISCOUNT) / total[first]
        order = np.argsort(second, kind="stable")
        self._after = np.searchsorted(first, np.arange(size + 1)), second, kept
        self._before = np.searchsorted(second[order], np.arange(size + 1)), first[order], kept[order]

    def between(self, left: int | None, right: int | None) -> np.ndarray:
        """Probabilities (V,), float64, of a token between two neighbours; None is an unknown neighbour."""
        found = self._share.copy() if left is None else self._rest[left] * self._share
        if left is not None:
            _add(found, self._after, left)
        if right is not None:
            follows = self._rest * self._share[right]
            _add(follows, self._before, right)
            found *= follows
        found /= found.sum()
        return found


def _add(shares: np.ndarray, rows: tuple[np.ndarray, np.ndarray, np.ndarray], token: int) -> None:
    """Add a token's discounted counts to the shares of the tokens that follow it."""
    starts, others, kept = rows
    mine = slice(starts[token], starts[token + 1])
    shares[others[mine]] += kept[mine]

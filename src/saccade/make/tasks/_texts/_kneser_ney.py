"""An interpolated modified Kneser-Ney model, the baseline of language models."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence

Gram = tuple[Hashable, ...]
START = ""  # stands before the first symbol of a sequence; no word and no character is empty


class KneserNey:
    """Interpolated modified Kneser-Ney over sequences of symbols.

    Order n of a sequence counts how often symbol w follows the context of n - 1 symbols; lower orders count how many
    different symbols stand before (context, w). With c such a count and c(.) its sum over w:

        p_n(w | context) = (c(w) - D_n[min(c(w), 3)]) / c(.) + left(context) p_{n-1}(w | shorter context)

    where left(context) is the mass the discounts took, and p_0 is `base(w)`.
    """

    def __init__(self, sequences: Iterable[Sequence[Hashable]], order: int, base: Callable[[Hashable], float]):
        self.order, self.base = order, base
        grams: Counter[Gram] = Counter()
        for sequence in sequences:
            padded = (START,) * (order - 1) + tuple(sequence)
            grams.update(zip(*(padded[i:] for i in range(order)), strict=False))
        self.counts: list[dict[Gram, Counter[Hashable]]] = []
        self.discounts: list[list[float]] = []
        self.totals: list[dict[Gram, tuple[int, float]]] = []
        for _ in range(order):
            self._add_order(grams)
            grams = Counter(gram[1:] for gram in grams)

    def _add_order(self, grams: Counter[Gram]) -> None:
        """Orders are added from the highest down."""
        discounts = _discounts(grams.values())
        followers: dict[Gram, Counter[Hashable]] = defaultdict(Counter)
        for gram, count in grams.items():
            followers[gram[:-1]][gram[-1]] = count
        totals = {}
        for context, counter in followers.items():
            total = sum(counter.values())
            totals[context] = (total, sum(discounts[min(count, 3)] for count in counter.values()) / total)
        self.counts.append(followers)
        self.discounts.append(discounts)
        self.totals.append(totals)

    def probability(self, symbol: Hashable, history: Sequence[Hashable]) -> float:
        """The probability of `symbol` after the last `order - 1` symbols of `history`."""
        padded = ((START,) * (self.order - 1) + tuple(history[-(self.order - 1) :]))[-(self.order - 1) :]
        probability, left = 0.0, 1.0
        for level in range(self.order):
            context = padded[level:]
            if context not in self.totals[level]:
                continue
            total, taken = self.totals[level][context]
            count = self.counts[level][context].get(symbol, 0)
            if count:
                probability += left * (count - self.discounts[level][min(count, 3)]) / total
            left *= taken
        return probability + left * self.base(symbol)


def _discounts(counts: Iterable[int]) -> list[float]:
    """[0, D1, D2, D3+] of Chen and Goodman, from how many grams occur 1, 2, 3 and 4 times; within (0, count)."""
    seen = Counter(counts)
    n1, n2, n3, n4 = (max(seen[i], 1) for i in (1, 2, 3, 4))
    y = n1 / (n1 + 2 * n2)
    raw = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    return [0.0, *(min(max(d, 0.01), i - 0.01) for i, d in enumerate(raw, 1))]

"""Perplexity per word on held-out texts: a Saccade language model beside an interpolated Kneser-Ney trigram.

    python benchmarks/kneser_ney.py TEXTS --hold-out FILE [--hold-out FILE ...] [--model FOLDER] [--json FILE]

A word is a run of letters (with inner apostrophes), a run of digits, a run of other signs, or the end of a paragraph;
spaces are not words. Both models predict the same words of the same texts, in order, each from all that stands before
it in its text (the trigram uses two words of it, the language model at least half of its context where there is as
much).

The trigram: interpolated modified Kneser-Ney (Chen and Goodman, "An Empirical Study of Smoothing Techniques for
Language Modeling", 1998), three discounts for each order from counts of counts, trained on the words of the same
texts as the language model. Two figures:

known words   Only held-out words that occur in the training texts are scored. The trigram is told that nothing else
              can come: below its unigrams stands the even distribution over the training vocabulary.
all words     Below its unigrams stands a spelling model, a Kneser-Ney 6-gram over the characters of the training
              vocabulary, so that every word has a probability.

The language model's probability of a word is the product over its pieces, the spaces before it included: it is told
neither that a word is known nor where spaces are, which is to its disadvantage.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path

WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*|\d+|(?:[^\w\s]|_)+|\n")
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
        grams: Counter[tuple] = Counter()
        for sequence in sequences:
            padded = (START,) * (order - 1) + tuple(sequence)
            grams.update(zip(*(padded[i:] for i in range(order)), strict=False))
        self.counts: list[dict[tuple, Counter]] = []
        self.discounts: list[list[float]] = []
        self.totals: list[dict[tuple, tuple[int, float]]] = []
        for _ in range(order):
            self._add_order(grams)
            grams = Counter(gram[1:] for gram in grams)

    def _add_order(self, grams: Counter[tuple]) -> None:
        """Orders are added from the highest down."""
        discounts = _discounts(grams.values())
        followers: dict[tuple, Counter] = defaultdict(Counter)
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
        """Of `symbol` after `history`, of which the last `order - 1` symbols matter."""
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


def words_of(text: str) -> list[str]:
    return WORD.findall(text)


def trigram_losses(training: list[str], held_out: list[str]) -> dict[str, list[float]]:
    """-ln p of each held-out word under the trigram: "closed" (infinite for unknown words) and "open"."""
    sequences = [words_of(text) for text in training]
    vocabulary = sorted(set().union(*sequences))
    known = frozenset(vocabulary)
    characters = {c for word in vocabulary for c in word}
    even = 1 / (len(characters) + 2)  # the end of a word, and one for all other characters
    # Spelled to its end "\0"; what the model says after that does not matter.
    speller = KneserNey(([*word, "\0"] for word in vocabulary), 6, lambda _: even)

    def spelled(word) -> float:
        letters = [*word, "\0"]
        return math.prod(speller.probability(letter, letters[:i]) for i, letter in enumerate(letters))

    trigram = KneserNey(sequences, 3, lambda word: 1 / len(vocabulary) if word in known else 0.0)
    losses: dict[str, list[float]] = {}
    for name, base in (("closed", trigram.base), ("open", spelled)):
        trigram.base = base
        losses[name] = [loss for text in held_out for loss in _losses(trigram, words_of(text))]
    return losses | {"discounts": [d[1:] for d in trigram.discounts]}


def _losses(model: KneserNey, words: list[str]) -> list[float]:
    probabilities = (model.probability(word, words[max(0, i - 2) : i]) for i, word in enumerate(words))
    return [-math.log(p) if p > 0 else math.inf for p in probabilities]


def language_model_losses(lm, text: str) -> list[float]:
    """-ln p of each word of the text under a Saccade language model: the sum over its pieces.

    A piece belongs to the word that holds its last character, or, if that is a space, to the next word.
    """
    encoding = lm.tokenizer.encode(text)
    pieces = token_losses(lm, encoding.ids)
    ends = [match.end() for match in WORD.finditer(text)]
    losses, word = [0.0] * len(ends), 0
    for (_, stop), loss in zip(encoding.spans, pieces, strict=True):
        while word < len(ends) - 1 and ends[word] < stop:
            word += 1
        losses[word] += loss
    return losses


def token_losses(lm, ids: list[int], batch: int = 16) -> list[float]:
    """-ln p of each token, from windows that overlap by half; only the later half of a window counts."""
    import torch
    import torch.nn.functional as F

    context = lm.model.config.context
    tokens, half = torch.tensor(ids), context // 2
    windows = [(0, 0)] + [(s, s + context - half) for s in range(half, max(len(ids) - context, 0) + half, half)]
    losses = torch.full((len(ids),), math.nan)
    with torch.no_grad():
        for first in range(0, len(windows), batch):
            part = windows[first : first + batch]
            rows = [tokens[start : start + context] for start, _ in part]
            inputs = torch.full((len(rows), context), lm.tokenizer.start)
            for row, piece in zip(inputs, rows, strict=True):
                row[1 : len(piece)] = piece[: len(row) - 1][: len(piece) - 1]
            logits = lm.model(inputs)
            for (start, counted), piece, out in zip(part, rows, logits, strict=True):
                loss = F.cross_entropy(out[: len(piece)].float(), piece, reduction="none")
                losses[counted : start + len(piece)] = loss[counted - start :]
    assert not losses.isnan().any()
    return losses.tolist()


def compare(training: list[str], held_out: list[str], lm) -> dict:
    """Perplexity per word of both, over the known and over all held-out words."""
    trigram = trigram_losses(training, held_out)
    model = [loss for text in held_out for loss in language_model_losses(lm, text)]
    known = [i for i, loss in enumerate(trigram["closed"]) if math.isfinite(loss)]

    def perplexity(losses: list[float]) -> float:
        return math.exp(sum(losses) / len(losses))

    return {
        "words": len(model),
        "known_words": len(known),
        "known": {
            "trigram": perplexity([trigram["closed"][i] for i in known]),
            "model": perplexity([model[i] for i in known]),
        },
        "all": {"trigram": perplexity(trigram["open"]), "model": perplexity(model)},
        "discounts_3_2_1": trigram["discounts"],
    }


def main() -> None:
    from saccade.models import load
    from saccade.training import read_texts

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", type=Path)
    parser.add_argument("--hold-out", type=Path, action="append", required=True)
    parser.add_argument("--model", type=Path, help="a model folder; default: the embedded model")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    held = {path.resolve() for path in arguments.hold_out}
    training = [text for path, text in read_texts(arguments.texts).items() if path.resolve() not in held]
    held_out = [text for path in arguments.hold_out for text in read_texts(path).values()]
    figures = compare(training, held_out, load(arguments.model))
    print(f"{figures['words']:,} held-out words, {figures['known_words']:,} of them known from training")
    for words in ("known", "all"):
        of = figures[words]
        print(f"perplexity per word, {words:>5} words: trigram {of['trigram']:7.1f}   model {of['model']:7.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()

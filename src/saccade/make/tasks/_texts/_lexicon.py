"""Word-by-word translation: a lexicon that IBM's model 1 learns from aligned texts. Brown et al. (1993).

Shape legend: N pairs of words that stand in a pair of sentences together, counted once for each such place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

ROUNDS = 5  # of expectation and maximisation
MOST_PAIRS = 50_000  # pairs of sentences to learn from, evenly spread: memory grows with their words' product
_WORD = re.compile(r"\w+(?:['’-]\w+)*|[^\w\s]")  # noqa: RUF001
_BEFORE = re.compile(r" ([.,;:!?)\]}»%])")  # signs that stand right after a word
_AFTER = re.compile(r"([(\[{«]) ")


class Lexicon:
    """The most probable translation of each word.

    The probability of a target word e given a source word f is learned by expectation and maximisation, each target
    word being made by one word of its source sentence:  t(e | f) = c(e, f) / sum_e' c(e', f),  where
    c(e, f) sums t(e | f) / sum_f' t(e | f')  over all places at which both stand.
    """

    def __init__(self, sources: Sequence[str], targets: Sequence[str]):
        chosen = np.linspace(0, len(sources) - 1, min(len(sources), MOST_PAIRS)).astype(int)
        source, target = ([words_of(texts[n]) for n in chosen] for texts in (sources, targets))
        known, written = _numbers(source), _numbers(target)
        best = _likeliest(_places(source, target, known, written), len(known), len(written))
        names = list(written)
        self._best = {word: names[best[n]] for word, n in known.items() if best[n] >= 0}

    def translated(self, text: str) -> str:
        """The translation word by word, in the source's order; unknown words are copied."""
        return joined([self._best.get(word, word) for word in words_of(text)])


def words_of(text: str) -> list[str]:
    """Runs of letters and digits, and single signs."""
    return _WORD.findall(text)


def joined(words: Sequence[str]) -> str:
    """Words as a text, signs right after the word before them."""
    return _AFTER.sub(r"\1", _BEFORE.sub(r"\1", " ".join(words)))


def _numbers(sentences: Sequence[Sequence[str]]) -> dict[str, int]:
    return {word: n for n, word in enumerate(dict.fromkeys(word for sentence in sentences for word in sentence))}


def _places(
    sources: Sequence[Sequence[str]], targets: Sequence[Sequence[str]], known: dict[str, int], written: dict[str, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Source word, target word, and the number of the target word's place, each (N,)."""
    first, second, place, begun = [], [], [], 0
    for source, target in zip(sources, targets, strict=True):
        f, e = np.array([known[word] for word in source], int), np.array([written[word] for word in target], int)
        first.append(np.tile(f, len(e)))
        second.append(np.repeat(e, len(f)))
        place.append(begun + np.repeat(np.arange(len(e)), len(f)))
        begun += len(e)
    return np.concatenate(first), np.concatenate(second), np.concatenate(place)


def _likeliest(places: tuple[np.ndarray, np.ndarray, np.ndarray], known: int, written: int) -> np.ndarray:
    """The target word of each source word (known,), -1 for words without one."""
    first, second, place = places
    pairs, which = np.unique(first * written + second, return_inverse=True)
    source, target = pairs // written, pairs % written
    t = np.ones(len(pairs))
    for _ in range(ROUNDS):
        here = t[which]
        share = here / np.bincount(place, here)[place]
        counts = np.bincount(which, share, minlength=len(pairs))
        t = counts / np.bincount(source, counts, minlength=known)[source]
    order = np.lexsort((-target, t, source))  # of equally likely words the one that came first
    last = np.full(known, -1)
    last[source[order]] = target[order]  # the last of each source word stays
    return last

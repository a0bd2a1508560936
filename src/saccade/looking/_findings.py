"""A few plain sentences about what a model attends to in one text, each with the number it stands on.

Every candidate carries how telling it is: for a single weight, ``w * ln(w / expected)`` of ``telling`` (a link between
words that stand n and m times counts 1 / sqrt(n m) of it); for a habit, ``m * ln(m / chance)`` with the average weight
m. The best of each kind compete, so that the few sentences shown are not three of the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._collect import AttentionMap
from ._numbers import hundredths, short_number
from ._scores import earlier_occurrences, here, telling

MOST, MAIN, CLEAR = 0.5, 0.3, 0.1  # "mostly"; the least weight of a link worth a sentence; the least telling, in nats
_ORDINALS = ("", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


@dataclass(frozen=True)
class Finding:
    """A sentence, the ``value`` in it, and where on the map it can be read off again.

    ``kind``: "look", "copy", "same" are ``weights[layer, head, query, key]``; "previous", "self" are the head's
    average over the words; "delimiter" is its average on word ``key`` over the words after it; "sink" counts the
    heads (``value``) with an average of more than half on ``<s>``; "nothing" says that nothing stands out.
    """

    kind: str
    sentence: str
    value: float
    telling: float
    layer: int | None = None
    head: int | None = None
    query: int | None = None
    key: int | None = None

    @property
    def place(self) -> tuple[int, int]:
        """(layer, head); (0, 0) for what is about no single head."""
        return self.layer or 0, self.head or 0


def find(seen: AttentionMap, roles: dict[str, Any] | None = None, limit: int = 5) -> list[Finding]:
    """The most telling findings, the first about a head whenever any head stands out; never an empty list.

    ``roles`` is what ``measure_roles`` returned: only a head with a measured role is said to have a habit of copying.
    """
    gain = telling(seen.weights)
    habits = here(seen)
    copies = {(h["layer"], h["head"]) for h in (roles or {}).get("heads", ()) if h["role"] == "repeat"}
    candidates = [*_links(seen, gain), *_copies(seen, gain, copies), *_habits(seen, habits)]
    sink = _sink(seen, habits)
    chosen = [*_diverse(candidates, limit - len(sink)), *sink]
    return chosen or [_nothing(seen)]


def name_of(seen: AttentionMap, i: int) -> str:
    """The word in quotes, with its ordinal where it stands more than once: ``the second 'the'``."""
    word = seen.words[i]
    alike = [j for j, other in enumerate(seen.words) if other.text.casefold() == word.text.casefold()]
    if word.is_start or len(alike) == 1:
        return f"'{word.label}'"
    n = alike.index(i) + 1
    return f"the {_ordinal(n)} '{word.label}'"


def _ordinal(n: int) -> str:
    if n < len(_ORDINALS):
        return _ORDINALS[n]
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


def _diverse(candidates: list[Finding], limit: int) -> list[Finding]:
    """The best of each kind, then a second link from another head and word if there is room."""
    ranked = sorted(candidates, key=lambda f: -f.telling)
    chosen: list[Finding] = []
    for one in ranked:
        if all(f.kind != one.kind for f in chosen):
            chosen.append(one)
    chosen = chosen[:limit]
    first = next((f for f in chosen if f.kind == "look"), None)
    if first and len(chosen) < limit:
        others = (f for f in ranked if f.kind == "look" and f.place != first.place and f.query != first.query)
        second = next(others, None)
        chosen += [second] if second else []
    # Words come before habits: a link between two words is what a reader can check at a glance.
    return sorted(chosen, key=lambda f: (f.query is None, -f.telling))


def _links(seen: AttentionMap, gain: np.ndarray) -> Iterator[Finding]:
    """One word that looks at another further back, not at its own repetition or what followed that."""
    size = len(seen.words)
    q, k = np.tril_indices(size, -2)
    earlier = earlier_occurrences(seen)
    ordinary = np.array([not (w.is_start or w.is_delimiter) for w in seen.words])
    counts = 1 + (earlier | earlier.T).sum(-1)  # a word that is everywhere in the text says less
    fine = ordinary[q] & ordinary[k] & ~earlier[q, k] & ~earlier[q, k - 1]
    q, k = q[fine], k[fine]
    if not len(q):
        return
    weights, gains = seen.weights[:, :, q, k], gain[:, :, q, k]
    worth = gains / np.sqrt(counts[q] * counts[k])
    largest = seen.weights.argmax(-1)
    for layer, head, i in np.argwhere((weights >= MAIN) & (gains >= CLEAR)):
        at, to = int(q[i]), int(k[i])
        if largest[layer, head, at] == to:
            yield _link("look", seen, int(layer), int(head), at, to, float(worth[layer, head, i]))


def _link(kind: str, seen: AttentionMap, layer: int, head: int, q: int, k: int, gain: float) -> Finding:
    value = float(seen.weights[layer, head, q, k])
    how = "mostly" if hundredths(value) >= 100 * MOST else "most"
    sentence = (
        f"{name_of(seen, q)} looks {how} at {name_of(seen, k)} ({short_number(value)}) in layer {layer} head {head}"
    )
    return Finding(kind, _capital(sentence), value, gain, layer, head, q, k)


def _copies(seen: AttentionMap, gain: np.ndarray, copying: set[tuple[int, int]]) -> Iterator[Finding]:
    """A repeated word that looks at its earlier occurrence, or at what followed it."""
    for q, j in np.argwhere(earlier_occurrences(seen)):
        follows = j + 1
        for layer, head in np.ndindex(seen.layers, seen.heads):
            if follows < q and seen.weights[layer, head, q, follows] >= MAIN / 2:
                yield from _copy(seen, gain, copying, (layer, head, int(q), int(follows)))
            value = float(seen.weights[layer, head, q, j])
            if value >= MAIN and gain[layer, head, q, j] >= CLEAR and q - j > 1:
                where = f"({short_number(value)}) in layer {layer} head {head}"
                sentence = f"{name_of(seen, q)} looks back at {name_of(seen, j)} {where}"
                yield Finding(
                    "same", _capital(sentence), value, float(gain[layer, head, q, j]), layer, head, int(q), int(j)
                )


def _copy(
    seen: AttentionMap, gain: np.ndarray, copying: set[tuple[int, int]], at: tuple[int, int, int, int]
) -> Iterator[Finding]:
    layer, head, q, k = at
    value, worth = float(seen.weights[at]), float(gain[at])
    if seen.words[k].is_delimiter or worth < CLEAR / 2:
        return
    looks = f"{name_of(seen, q)} looks at {name_of(seen, k)} ({short_number(value)})"
    if (layer, head) in copying:
        yield Finding("copy", f"Head {layer}.{head} copies what followed last time: {looks}", value, 2 * worth, *at)
    elif value >= MAIN:
        sentence = f"{looks} in layer {layer} head {head}, the word after {name_of(seen, k - 1)}"
        yield Finding("copy", _capital(sentence), value, worth, *at)


def _habits(seen: AttentionMap, habits: dict[str, np.ndarray]) -> Iterator[Finding]:
    size = len(seen.words)
    if size < 5:  # with fewer than four words an average is no habit
        return
    says = {
        "previous": "Layer {0} head {1} looks one word back: {2} of its weight on average",
        "self": "Layer {0} head {1} stays on the word itself: {2} of its weight on average",
    }
    chance = float(np.mean(1 / np.arange(2, size + 1)))
    for name, sentence in says.items():
        layer, head = (int(i) for i in np.unravel_index(habits[name].argmax(), habits[name].shape))
        value = float(habits[name][layer, head])
        if value > MOST:
            text = sentence.format(layer, head, short_number(value))
            yield Finding(name, text, value, value * np.log(value / chance), layer, head)
    yield from _delimiters(seen)


def _delimiters(seen: AttentionMap) -> Iterator[Finding]:
    size = len(seen.words)
    best: Finding | None = None
    for k in (i for i, w in enumerate(seen.words) if w.is_delimiter and size - i > 3):
        means = seen.weights[:, :, k + 1 :, k].mean(-1)
        layer, head = (int(i) for i in np.unravel_index(means.argmax(), means.shape))
        value = float(means[layer, head])
        worth = value * np.log(value / float(np.mean(1 / np.arange(k + 2, size + 1))))
        if value >= MAIN and (best is None or worth > best.telling):
            share = f"{short_number(value)} of the weight of the words after it"
            sentence = f"Layer {layer} head {head} gathers at {name_of(seen, k)}: {share}"
            best = Finding("delimiter", sentence, value, worth, layer, head, None, k)
    if best:
        yield best


def _sink(seen: AttentionMap, habits: dict[str, np.ndarray]) -> list[Finding]:
    resting = int((habits["sink"] > MOST).sum())
    if not resting or len(seen.words) < 4:
        return []
    verb = "rests" if resting == 1 else "rest"
    where = "on the first token: '<s>' gets more than half"
    return [Finding("sink", f"{resting} of {seen.layers * seen.heads} heads {verb} {where}", resting, 0.0)]


def _nothing(seen: AttentionMap) -> Finding:
    if len(seen.words) == 2:
        said = f"Nothing to tell yet: {name_of(seen, 1)} can look only at itself and at the start of the text"
        return Finding("nothing", said, 0.0, 0.0)
    clear = f"no weight of {short_number(MAIN)} or more that chance or the head's own habit would not give"
    return Finding("nothing", f"Nothing stands out in this text: {clear}", MAIN, 0.0)


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]

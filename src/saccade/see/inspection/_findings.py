"""Sentences about what a model attends to in one text, each with its number.

Candidates are ranked by how surprising they are: a single weight by ``w * ln(w / expected)`` of ``telling`` (divided by
sqrt(n m) for a link between words that occur n and m times); a habit, with average weight m, by ``m * ln(m / chance)``.
The best of each kind compete, so that the few sentences shown are of different kinds.

Findings that chance can explain are left out: weights and averages must exceed those of a head with equal weights,
and the largest that equally many heads with random logits would give.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...support._lazy_names import renamed_arguments
from ...support._numbers import hundredths, short_number
from ._chance import CLEAR_OF, SHARED, ChanceMean, above_chance, largest_mean, largest_weight, mean_of, uneven
from ._collect import AttentionMap
from ._scores import by_chance, different, followers, here, occurrences, telling, visible

MOST, MAIN, CLEAR = 0.5, 0.3, 0.1  # "mostly"; least weight of a link; least value of `telling`, in nats
NOTHING_BUT_CHANCE = (
    "Nothing in this text is above chance: heads with uniform or random weights would give the same numbers"
)
_ORDINALS = ("", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


@dataclass(frozen=True)
class MapFinding:
    """A sentence, the ``value`` in it, and its place on the map.

    ``kind`` is one of:

    - "look", "copy", "same": ``value`` is ``weights[layer, head, query, key]``.
    - "previous", "next", "self": the head's average over the words.
    - "delimiter": the head's average weight on word ``key``, over the other words that see it.
    - "sink", "special": the number of heads with an average of more than half on the first token, and on the other
      special tokens.
    - "nothing": nothing stands out.

    Example:
        >>> from saccade.inspection import collect, find, open_model
        >>> finding = find(collect(open_model(), "The cat sat on the mat."))[0]
        >>> finding.kind, finding.place, round(finding.value, 2)
        ('look', (2, 1), 0.85)
        >>> finding.sentence
        "The second 'the' looks mostly at 'sat' (.85) in layer 2 head 1"
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
        """(layer, head); (0, 0) for a finding about no single head."""
        return self.layer or 0, self.head or 0


class HeadHabits(NamedTuple):
    """Averages of all heads on a text, the averages by chance, and the heads that do not differ from random ones."""

    total: int
    means: dict[str, np.ndarray]  # (layers, heads) by name
    chance: dict[str, ChanceMean]
    at_random: np.ndarray  # (layers, heads)


@renamed_arguments(seen="attention")
def find(attention: AttentionMap, roles: dict[str, Any] | None = None, limit: int = 5) -> list[MapFinding]:
    """The most surprising findings of a map, at least one. The first is about a head if any head stands out.

    Links are ranked by `telling`. A weight is reported if it stands at least .30 above chance,
    ``(weight - chance) / (1 - chance)``, and if heads with random logits show such a weight in fewer than 1 text of
    100. An average is reported if it is above .50 and clear of chance. If nothing qualifies, the only finding says so.

    Args:
        roles: what ``measure_roles`` returns. Only a head with a measured role is said to have a habit of copying.
        limit: the largest number of findings.

    Example:
        >>> from saccade.inspection import collect, find, open_model
        >>> for finding in find(collect(open_model(), "The cat sat on the mat."), limit=3):
        ...     print(finding.sentence)
        The second 'the' looks mostly at 'sat' (.85) in layer 2 head 1
        Layer 0 head 5 looks one word back: .90 of its weight on average
        13 of 32 heads put more than .51 of their weight on the first token, '<s>'
    """
    gain = telling(attention.weights, attention.causal, attention.alike)
    # Layer by layer: another map of a large model on a long text would fill memory.
    layers = zip(attention.weights, attention.alike, strict=True)
    at_random = ~np.stack([uneven(w, even > 0, attention.count, different(attention)) for w, even in layers])
    heads = HeadHabits(attention.count, here(attention), by_chance(attention), at_random)
    copies = {(h["layer"], h["head"]) for h in (roles or {}).get("heads", ()) if h["role"] == "repeat"}
    candidates = [
        *_links(attention, gain, at_random),
        *_copies(attention, gain, copies, at_random),
        # With fewer words an average is no habit.
        *(habits_of(heads, "word") if len(attention.ordinary) >= 4 else ()),
        *_delimiters(attention, at_random),
    ]
    sink = _sink(attention, heads)
    chosen = [*diverse(candidates, limit - len(sink)), *sink]
    return chosen or [_nothing(attention, bool(at_random.all()))]


@renamed_arguments(seen="attention")
def name_of(attention: AttentionMap, i: int) -> str:
    """Word ``i`` in quotes, with its ordinal if it occurs more than once: ``the second 'the'``."""
    word = attention.words[i]
    alike = [j for j, other in enumerate(attention.words) if other.text.casefold() == word.text.casefold()]
    if len(alike) == 1:
        return f"'{word.label}'"
    n = alike.index(i) + 1
    return f"the {_ordinal(n)} '{word.label}'"


def _ordinal(n: int) -> str:
    if n < len(_ORDINALS):
        return _ORDINALS[n]
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


def diverse(candidates: list[MapFinding], limit: int) -> list[MapFinding]:
    """The best of each kind, then a second link from another head and word if there is room."""
    ranked = sorted(candidates, key=lambda f: -f.telling)
    chosen: list[MapFinding] = []
    for candidate in ranked:
        if all(f.kind != candidate.kind for f in chosen):
            chosen.append(candidate)
    chosen = chosen[:limit]
    first = next((f for f in chosen if f.kind == "look"), None)
    if first and len(chosen) < limit:
        others = (f for f in ranked if f.kind == "look" and f.place != first.place and f.query != first.query)
        second = next(others, None)
        chosen += [second] if second else []
    # Words come before habits: a reader can check a link between two words at a glance.
    return sorted(chosen, key=lambda f: (f.query is None, -f.telling))


def _beyond_chance(
    attention: AttentionMap, pairs: np.ndarray, at_random: np.ndarray, least: np.ndarray | float = CLEAR_OF
) -> np.ndarray:
    """(layers, heads, W, W): the weights of the ``pairs`` (W, W) that chance does not explain.

    They are at least ``least`` above equal weights (by head), and either the head is not ``at_random``, or they are
    larger than the largest weight of random heads on these pairs.
    """
    out = np.zeros(attention.weights.shape, dtype=bool)
    least = np.broadcast_to(least, at_random.shape)[..., None, None]
    for layer, (w, even) in enumerate(zip(attention.weights, attention.alike, strict=True)):
        lucky = largest_weight(even, attention.count * int(pairs.sum()))
        clear = above_chance(w, even) >= least[layer]
        out[layer] = pairs & clear & (~at_random[layer, :, None, None] | (w > lucky))
    return out


def _links(attention: AttentionMap, gain: np.ndarray, at_random: np.ndarray) -> Iterator[MapFinding]:
    """Findings about a word that attends to a distant word, except to its own repetition or the word after that."""
    others = occurrences(attention)
    place = np.arange(len(others))
    far = visible(attention) & (abs(place[:, None] - place) > 1)
    plain = np.array([not (w.special or w.is_delimiter) for w in attention.words])
    counts = 1 + (others | others.T).sum(-1)  # a link to a frequent word is less surprising
    pairs = far & plain[:, None] & plain & ~others & ~followers(attention, others)
    if not pairs.any():
        return
    largest = attention.weights.argmax(-1)
    links = (attention.weights >= MAIN) & (gain >= CLEAR) & _beyond_chance(attention, pairs, at_random)
    for layer, head, q, k in np.argwhere(links).tolist():
        if largest[layer, head, q] == k:
            worth = gain[layer, head, q, k] / np.sqrt(counts[q] * counts[k])
            yield _link(attention, layer, head, q, k, float(worth))


def _link(attention: AttentionMap, layer: int, head: int, q: int, k: int, gain: float) -> MapFinding:
    value = float(attention.weights[layer, head, q, k])
    sentence = looks(name_of(attention, q), name_of(attention, k), value, layer, head)
    return MapFinding("look", sentence, value, gain, layer, head, q, k)


def looks(query: str, key: str, value: float, layer: int, head: int) -> str:
    """A sentence about the largest weight of a row."""
    how = "mostly" if hundredths(value) >= 100 * MOST else "most"
    return capital(f"{query} looks {how} at {key} ({short_number(value)}) in layer {layer} head {head}")


def _copies(
    attention: AttentionMap, gain: np.ndarray, copying: set[tuple[int, int]], at_random: np.ndarray
) -> Iterator[MapFinding]:
    """A repeated word that attends to its other occurrence, or to the word after that."""
    others = occurrences(attention)
    if not others.any():
        return
    follows = followers(attention, others)
    measured = np.zeros_like(at_random)  # heads measured on other texts need less evidence
    measured[tuple(np.array(sorted(copying), int).reshape(-1, 2).T)] = True
    least = np.where(measured, CLEAR_OF / 2, CLEAR_OF)
    beyond = _beyond_chance(attention, others | follows, at_random & ~measured, least)
    for q, j in np.argwhere(others):
        for layer, head in attention.places():
            after = (layer, head, int(q), int(j + 1))
            if (
                j + 1 < len(attention.words)
                and follows[q, j + 1]
                and attention.weights[after] >= MAIN / 2
                and beyond[after]
            ):
                yield from _copy(attention, gain, copying, after)
            value = float(attention.weights[layer, head, q, j])
            if beyond[layer, head, q, j] and value >= MAIN and gain[layer, head, q, j] >= CLEAR and abs(q - j) > 1:
                way = "back" if j < q else "ahead"
                where = f"({short_number(value)}) in layer {layer} head {head}"
                sentence = f"{name_of(attention, q)} looks {way} at {name_of(attention, j)} {where}"
                yield MapFinding(
                    "same", capital(sentence), value, float(gain[layer, head, q, j]), layer, head, int(q), int(j)
                )


def _copy(
    attention: AttentionMap, gain: np.ndarray, copying: set[tuple[int, int]], at: tuple[int, int, int, int]
) -> Iterator[MapFinding]:
    layer, head, q, k = at
    value, worth = float(attention.weights[at]), float(gain[at])
    if attention.words[k].is_delimiter or worth < CLEAR / 2:
        return
    looks = f"{name_of(attention, q)} looks at {name_of(attention, k)} ({short_number(value)})"
    if (layer, head) in copying and k < q:
        yield MapFinding(
            "copy", f"Head {layer}.{head} copies what followed an earlier occurrence: {looks}", value, 2 * worth, *at
        )
    elif value >= MAIN:
        sentence = f"{looks} in layer {layer} head {head}, the word after {name_of(attention, k - 1)}"
        yield MapFinding("copy", capital(sentence), value, worth, *at)


HABITS = {"previous": "looks one {} back", "next": "looks one {} ahead", "self": "stays on the {} itself"}


def habits_of(heads: HeadHabits, unit: str) -> Iterator[MapFinding]:
    """For each habit the head with the largest average, if large enough; ``unit`` is "word" or "token"."""
    habits, chance = heads.means, heads.chance
    for name, does in HABITS.items():
        if np.isnan(habits[name]).all():
            continue
        least = largest_mean(chance[name], heads.total * len(HABITS))
        layer, head = largest_of(np.where(habits[name] > least, habits[name], 0))
        value = float(habits[name][layer, head])
        if value > max(MOST, least[layer, 0]):
            text = f"Layer {layer} head {head} {does.format(unit)}: {short_number(value)} of its weight on average"
            worth = value * np.log(value / chance[name].value[layer, 0])
            yield MapFinding(name, text, value, float(worth), layer, head)


def largest_of(values: np.ndarray) -> tuple[int, int]:
    """(layer, head) of the largest value, without NaN."""
    layer, head = np.unravel_index(np.nan_to_num(values).argmax(), values.shape)
    return int(layer), int(head)


def _delimiters(attention: AttentionMap, at_random: np.ndarray) -> Iterator[MapFinding]:
    if len(attention.ordinary) < 4:  # as for habits
        return
    best: MapFinding | None = None
    marks = [i for i, w in enumerate(attention.words) if w.is_delimiter]
    for k in marks:
        rows = attention.ordinary[(attention.ordinary > k) if attention.causal else (attention.ordinary != k)]
        if len(rows) < 3:
            continue
        means, even = attention.weights[:, :, rows, k].mean(-1), attention.alike[:, :, rows, k]
        # Rows share a deviation only in a head that is at random.
        chance = mean_of(even, different(attention))
        clear, lucky = (largest_mean(chance, attention.count * len(marks), shared=shared) for shared in (0.0, SHARED))
        least = np.where(at_random, lucky, clear)
        layer, head = largest_of(np.where(means > least, means, 0))
        value = float(means[layer, head])
        if not (value >= MAIN and value > least[layer, head]):
            continue
        worth = value * np.log(value / chance.value[layer, 0])
        if best is None or worth > best.telling:
            whose = "the words after it" if attention.causal else "the other words"
            share = f"{short_number(value)} of the weight of {whose}"
            sentence = f"Layer {layer} head {head} concentrates on {name_of(attention, k)}: {share}"
            best = MapFinding("delimiter", sentence, value, float(worth), layer, head, None, k)
    if best:
        yield best


def _sink(attention: AttentionMap, heads: HeadHabits) -> list[MapFinding]:
    if (attention.ordinary > 0).sum() < 3:
        return []
    names = {i: name_of(attention, i) for i, word in enumerate(attention.words) if word.special or not i}
    return sinks_of(heads, names, attention.words[0].special)


def sinks_of(heads: HeadHabits, names: dict[int, str], first_is_special: bool) -> list[MapFinding]:
    """The number of heads with more than half of their weight on the first token, and the number on other special
    tokens.

    ``names``: of the first token and of the special tokens, by position.
    """
    kind = "token" if first_is_special else "word"
    out = _resting(heads, "sink", f"the first {kind}, {names[0]}")
    others = [name for i, name in names.items() if i]
    if others:
        where = others[0] if len(others) == 1 else "the special tokens after the first"
        out += _resting(heads, "special", where)
    return out


def _resting(heads: HeadHabits, kind: str, where: str) -> list[MapFinding]:
    """Findings about the number of heads whose average there is above one half, or above chance if that is more.

    Empty if all of these are ``at_random`` and no larger than a deviation shared by rows explains.
    """
    count, means, chance, at_random = heads.total, heads.means[kind], heads.chance[kind], heads.at_random
    least = max(MOST, float(np.max(np.nan_to_num(largest_mean(chance, count)))))
    least = max(MOST, hundredths(least) / 100)  # the number in the sentence
    lucky = at_random & (means <= largest_mean(chance, count, shared=SHARED))
    if not ((means > least) & ~lucky).any():
        return []
    resting = int((means > least).sum())
    puts, their = ("puts", "its") if resting == 1 else ("put", "their")
    much = "half" if least == MOST else short_number(least)
    sentence = f"{resting} of {count} heads {puts} more than {much} of {their} weight on {where}"
    return [MapFinding(kind, sentence, resting, 0.0)]


def _nothing(attention: AttentionMap, at_random: bool) -> MapFinding:
    if len(attention.ordinary) == 1:
        at = int(attention.ordinary[0])
        others = [name_of(attention, int(i)) for i in np.flatnonzero(visible(attention)[at]) if i != at]
        more = f" and at {' and '.join(others)}" if others else ""
        said = f"Nothing to report: {name_of(attention, at)} can look only at itself{more}"
        return MapFinding("nothing", said, 0.0, 0.0)
    if at_random:
        return MapFinding("nothing", NOTHING_BUT_CHANCE, 0.0, 0.0)
    clear = f"chance or the head's average behaviour explains every weight of {short_number(MAIN)} or more"
    return MapFinding("nothing", f"Nothing stands out in this text: {clear}", MAIN, 0.0)


def capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]

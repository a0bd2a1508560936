"""Sentences about a text too long for a map, each with its number.

Words are named with their number in the text. Averages are over tokens; a link is the exact weight of its words.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...support._numbers import hundredths, short_number
from ._chance import CLEAR_OF, SHARED, above_chance, averaged, largest_mean, largest_weight, mean_of
from ._findings import (
    MAIN,
    NOTHING_BUT_CHANCE,
    HeadHabits,
    MapFinding,
    capital,
    diverse,
    habits_of,
    largest_of,
    looks,
    sinks_of,
)
from ._token_map import MapRow, TokenMap, WordLink, WordWeights


def find_in_whole(whole: TokenMap, part: WordWeights, roles: dict[str, Any] | None = None) -> list[MapFinding]:
    """The seven most surprising findings, as `find` gives them for a map; never an empty list.

    ``query`` and ``key`` are indices of the whole text's words. Kinds are those of `find` and two more: "gathers" is a
    head's mean weight on word ``key`` over the other tokens that see it, "received" the share of all heads' weight that
    ``key`` received.
    """
    copying = {(h["layer"], h["head"]) for h in (roles or {}).get("heads", ()) if h["role"] == "repeat"}
    rows = {(row.layer, row.head, row.query): row for row in part.rows}
    candidates = [
        *(
            finding
            for link in whole.links
            if (row := rows.get((link.layer, link.head, link.query)))
            for finding in _link(whole, link, row, copying)
        ),
        *_habits(whole),
    ]
    closing = [*_received(whole), *_sink(whole)]
    chosen = [*diverse(candidates, 7 - len(closing)), *closing]
    if chosen:
        return chosen
    if whole.at_random.all():
        return [MapFinding("nothing", NOTHING_BUT_CHANCE, 0.0, 0.0)]
    return [MapFinding("nothing", f"Nothing stands out: no weight of {short_number(MAIN)} or more", MAIN, 0.0)]


def name_in_whole(whole: TokenMap, i: int) -> str:
    """The word in quotes with its number: ``'cat' (word 2,013)``."""
    word = whole.words[i]
    return f"'{word.label}'" if word.special else f"'{word.label}' (word {whole.number(i):,})"


def _link(whole: TokenMap, link: WordLink, row: MapRow, copying: set[tuple[int, int]]) -> Iterator[MapFinding]:
    q, k, layer, head = link.query, link.key, link.layer, link.head
    value, alike = float(row.weights[k]), row.alike[k]
    if value < MAIN or above_chance(row.weights[k], alike) < CLEAR_OF:
        return
    if whole.at_random[layer, head] and (layer, head) not in copying and value <= largest_weight(alike, whole.cells):
        return
    names = name_in_whole(whole, q), name_in_whole(whole, k)
    if link.kind == "look":
        if row.weights.argmax() != k:
            return
        sentence = looks(*names, value, layer, head)
    elif link.kind == "same":
        way = "back" if k < q else "ahead"
        sentence = f"{names[0]} looks {way} at {names[1]} ({short_number(value)}) in layer {layer} head {head}"
    elif (layer, head) in copying and k < q:
        about = f"{names[0]} looks at {names[1]} ({short_number(value)})"
        sentence = f"Head {layer}.{head} copies what followed an earlier occurrence: {about}"
    else:
        where = f"in layer {layer} head {head}, the word after {name_in_whole(whole, k - 1)}"
        sentence = f"{names[0]} looks at {names[1]} ({short_number(value)}) {where}"
    yield MapFinding(link.kind, capital(sentence), value, link.gain, layer, head, q, k)


def _habits(whole: TokenMap) -> Iterator[MapFinding]:
    yield from habits_of(_heads(whole), "token")
    words, shares, least = whole.gathers
    layer, head = largest_of(np.where(shares > least, shares, 0))
    value, k = float(shares[layer, head]), int(words[layer, head])
    if value >= MAIN and value > least[layer, head]:
        chance_of_one = float(whole.chance["self"].value[layer, 0])
        whose = "the tokens after it" if whole.causal else "the other tokens"
        share = f"{short_number(value)} of the weight of {whose}"
        sentence = f"Layer {layer} head {head} concentrates on {name_in_whole(whole, k)}: {share}"
        yield MapFinding("gathers", sentence, value, value * float(np.log(value / chance_of_one)), layer, head, None, k)


def _heads(whole: TokenMap) -> HeadHabits:
    return HeadHabits(whole.count, whole.habits, whole.chance, whole.at_random)


def _received(whole: TokenMap) -> list[MapFinding]:
    """The words with the largest weight from all heads, if it is above chance."""
    more = whole.received - whole.by_chance
    first, *others = (int(i) for i in np.argsort(-np.where(more >= 0.01, whole.received, 0), kind="stable")[:3])
    value = float(whole.received[first])
    if hundredths(more[first]) < 2 or value <= _luckily_received(whole)[first]:
        return []
    then = [f"{name_in_whole(whole, i)} {short_number(whole.received[i])}" for i in others if more[i] >= 0.01]
    sentence = f"{name_in_whole(whole, first)} gets {short_number(value)} of the weight of all heads"
    sentence += f", then {' and '.join(then)}" if then else ""
    return [MapFinding("received", capital(sentence), value, 0.0, key=first)]


def _luckily_received(whole: TokenMap) -> np.ndarray:
    """(W,): the largest mean weight that each word gets from all heads by chance."""
    one_row = mean_of(whole.by_chance[:, None])  # of one row of one head
    return largest_mean(averaged(one_row, whole.length, whole.count), len(whole.words), 0, SHARED)


def _sink(whole: TokenMap) -> list[MapFinding]:
    names = {i: name_in_whole(whole, i) for i, word in enumerate(whole.words) if word.special or not i}
    return sinks_of(_heads(whole), names, whole.words[0].special)

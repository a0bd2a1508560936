"""Statistics of a text too long for a map of every head, computed without any matrix of weights.

One pass over the layers keeps averages per head, the weight each word received, and the most surprising links; a second
pass gives the exact weights of those links. Memory is linear in the length of the text.

Shape legend: H query heads of a layer, L tokens and W words, the special ones included.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...operator._call import ObservedCall
from ...operator._statistics import Statistics, statistics
from ._chance import SHARED, ChanceMean, UniformCalls, UniformStatistics, averaged, largest_mean, mean_of, uneven
from ._collect import check_finite
from ._models import TextModel, weights_of
from ._words import Word

LEAST = 0.3  # least weight of a token whose exact weights are computed
FLOOR = 0.01
KEPT = 24  # links of each kind whose exact weights are computed
SAMPLED, MOST_SAMPLED = 32, 2**22  # rows compared with random logits, and the largest number of their weights


@dataclass(frozen=True, eq=False)
class TokenMap:
    """Statistics of every head of a model on one whole text, in tokens.

    ``habits``: (layers, heads) by name, as `here` has them for words; special tokens count as keys, never as queries.
    Also ``largest``, the largest weight of a token, and ``distance``, the mean distance of the weight in tokens.
    ``received``: (W,), the share of the weight of all heads and tokens that each word received. ``gathers``: the word
    with the largest mean weight from the tokens after it (from all others in a bidirectional model), that weight, and
    its bound by chance: (layers, heads) each. ``links``: large weights that are most surprising.

    ``chance`` is the chance of the ``habits``, (layers, 1) each, and ``by_chance`` that of ``received``. ``at_random``:
    (layers, heads), whether the logits of a head spread no more than random ones.
    """

    text: str
    words: tuple[Word, ...]
    causal: bool
    habits: dict[str, np.ndarray]
    received: np.ndarray
    gathers: tuple[np.ndarray, np.ndarray, np.ndarray]
    links: tuple[WordLink, ...]
    by_layer: tuple[int, ...]
    chance: dict[str, ChanceMean]
    by_chance: np.ndarray
    at_random: np.ndarray

    @property
    def count(self) -> int:
        """The number of heads."""
        return sum(self.by_layer)

    @property
    def length(self) -> int:
        """The number of tokens, the special ones included."""
        return self.words[-1].last

    @property
    def cells(self) -> int:
        """The number of weights of all heads together."""
        return self.count * self.length * ((self.length + 1) // 2 if self.causal else self.length)

    @property
    def leading(self) -> int:
        """The number of special tokens before the text."""
        return next(i for i, word in enumerate(self.words) if not word.special)

    def number(self, i: int) -> int:
        """The number of word ``i`` in the text, counted from 1."""
        return i - self.leading + 1

    @property
    def ordinary(self) -> np.ndarray:
        return np.flatnonzero([not word.special for word in self.words])

    @property
    def pieces(self) -> int:
        return sum(word.last - word.first for word in self.words if not word.special)


class WordLink(NamedTuple):
    """``kind``: "look", "same" (another occurrence of the word) or "copy" (what followed one)."""

    gain: float  # in nats, for tokens; of a "look" divided by sqrt(n m), with n and m the frequencies of its words
    kind: str
    layer: int
    head: int
    query: int
    key: int


class _TokensToWords:
    """Aggregates values of tokens to words."""

    def __init__(self, words: Sequence[Word], causal: bool):
        self.words, self.causal = tuple(words), causal
        self.length = words[-1].last
        self.word_of = np.repeat(np.arange(len(words)), [word.last - word.first for word in words])
        self.special = np.array([word.special for word in words])[self.word_of]
        self.whole = np.array([word.last - word.first == 1 for word in words])[self.word_of]
        self.delimiter = np.array([word.is_delimiter for word in words])[self.word_of]
        names: dict[str, int] = {}
        self.name = np.array(
            [
                names.setdefault(word.text.casefold(), len(names)) if not (word.special or word.is_delimiter) else -1
                for word in words
            ]
        )
        self.count = np.bincount(self.name + 1)[1:]  # the frequency of each name
        self.rows = np.flatnonzero(~self.special)
        self.able = np.arange(1, self.length + 1) if causal else np.full(self.length, self.length)

    def others(self, group: np.ndarray) -> np.ndarray:
        """The rows of the text that see a token of the group besides themselves."""
        before = np.cumsum(group) - group if self.causal else group.sum() - group
        return self.rows[before[self.rows] > 0]


def survey(model: TextModel, text: str, ids: Sequence[int], words: Sequence[Word]) -> TokenMap:
    """The statistics of ``text``, with its tokens and words."""
    about = _TokensToWords(words, model.causal)
    most = max(model.heads)
    habits: dict[str, np.ndarray] = {}
    gathers = np.zeros((model.layers, most), int), np.zeros((model.layers, most)), np.ones((model.layers, most))
    received, by_chance = np.zeros((2, about.length))
    chance: dict[str, list[ChanceMean]] = {}
    at_random = np.ones((model.layers, most), bool)
    evens = UniformStatistics(lambda call: _statistics(call, about))
    best: dict[str, list[WordLink]] = {"look": [], "same": [], "copy": []}

    def visit(layer: int, call: ObservedCall) -> None:
        own, (even_call, even) = _statistics(call, about), evens.of(call)
        check_finite(layer, own.largest)
        heads = call.query.shape[1]
        for name, values in _habits(own, about).items():
            habits.setdefault(name, np.full((model.layers, most), np.nan))[layer, :heads] = values
        for name, rows in _by_row(even, about).items():
            chance.setdefault(name, []).append(mean_of(rows.mean(0, keepdims=True)))
        at_random[layer, :heads] = ~_uneven(call, even_call, about, sum(model.heads))
        per_head, alike = _received(own), _received(even).mean(0, keepdims=True)
        received.__iadd__(per_head.sum(0))
        by_chance.__iadd__(heads * alike[0])
        for out, values in zip(gathers, _gathers(per_head, own, alike, even, about, sum(model.heads)), strict=True):
            out[layer, :heads] = values
        _keep(best, _links(layer, own, per_head, about))

    model.run(model.whole(ids), visit)
    on_words, by_chance = (
        np.bincount(about.word_of, each) / (sum(model.heads) * about.length) for each in (received, by_chance)
    )
    links = sorted((link for links in best.values() for link in links), reverse=True)
    means = {name: ChanceMean(*map(np.stack, zip(*layers, strict=True))) for name, layers in chance.items()}
    return TokenMap(
        text,
        about.words,
        model.causal,
        habits,
        on_words,
        gathers,
        tuple(links),
        model.heads,
        means,
        by_chance,
        at_random,
    )


def _uneven(call: ObservedCall, even: ObservedCall, about: _TokensToWords, count: int) -> np.ndarray:
    """(H,): `uneven` for a few rows, spread over the text."""
    most = max(4, min(SAMPLED, MOST_SAMPLED // (call.query.shape[1] * about.length), len(about.rows)))
    rows = np.unique(about.rows[np.linspace(0, len(about.rows) - 1, most).astype(int)]).tolist()
    weights, even_weights = (weights_of(each, rows=rows)[0].cpu().numpy() for each in (call, even))
    return uneven(weights, even_weights > 0, count)


def _received(statistics: Statistics) -> np.ndarray:
    assert statistics.received is not None
    return np.asarray(statistics.received[0].double().cpu().numpy())


def _statistics(call: ObservedCall, about: _TokensToWords) -> Statistics:
    groups = {
        "delimiters": torch.from_numpy(about.delimiter),
        "specials": torch.from_numpy(about.special & (np.arange(about.length) > 0)),
    }
    return statistics(
        call.query,
        call.key,
        **call.scoring(),
        groups={name: group.to(call.query.device) for name, group in groups.items()},
    )


def _habits(statistics: Statistics, about: _TokensToWords) -> dict[str, np.ndarray]:
    rows = about.rows
    chosen = {
        "entropy": ("entropy", rows),
        "broad": ("evenness", rows[about.able[rows] > 1]),
        "largest": ("largest", rows),
        "distance": ("distance", rows),
    }
    averaged = _by_row(statistics, about) | {name: _of_rows(statistics, of, at) for name, (of, at) in chosen.items()}
    return {
        name: values.mean(-1) if values.shape[-1] else np.full(len(values), np.nan) for name, values in averaged.items()
    }


def _by_row(statistics: Statistics, about: _TokensToWords) -> dict[str, np.ndarray]:
    """The weight of single rows on kinds of tokens, (H, rows)."""
    rows = about.rows
    beside = rows[1:][~about.special[rows[1:] - 1]]
    special = about.special & (np.arange(about.length) > 0)
    chosen = {
        "previous": ("mass.previous", beside),
        "next": ("mass.next", (beside - 1)[: 0 if about.causal else None]),
        "self": ("mass.self", rows),
        "sink": ("mass.first", rows[rows > 0]),
        "special": ("mass.specials", about.others(special)),
        "delimiter": ("mass.delimiters", about.others(about.delimiter)),
    }
    return {name: _of_rows(statistics, of, at) for name, (of, at) in chosen.items()}


def _of_rows(statistics: Statistics, name: str, rows: np.ndarray) -> np.ndarray:
    values = statistics.of(name)[0]
    return np.asarray(values[:, torch.from_numpy(rows).to(values.device)].double().cpu().numpy())


def _gathers(
    received: np.ndarray, statistics: Statistics, alike: np.ndarray, even: Statistics, about: _TokensToWords, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each head, the word with the largest mean weight from other tokens, that weight, and its bound by chance.

    Weights of a token on itself are left out, and so are the first word, special tokens, and words that fewer than
    eight tokens can attend to.
    """
    others = received - statistics.mass["self"][0].double().cpu().numpy()
    others_alike = (alike - even.mass["self"][0].double().cpu().numpy()).mean(0)
    able = (about.length - 1 - np.arange(about.length)) if about.causal else np.full(about.length, about.length - 1)
    fine = ~about.special & about.whole & (about.word_of > 0) & (able >= 8)
    share = np.where(fine, others / np.maximum(able, 1), 0)
    best = share.argmax(-1)
    one_row = mean_of((others_alike / np.maximum(able, 1))[best][:, None])  # taken as equal for all rows
    least = largest_mean(averaged(one_row, np.maximum(able[best], 1)), count * int(fine.sum()), shared=SHARED)
    return about.word_of[best], np.take_along_axis(share, best[:, None], -1)[:, 0], least


def _links(layer: int, statistics: Statistics, received: np.ndarray, about: _TokensToWords) -> Iterable[WordLink]:
    """The largest weights, ranked within their kind by `telling` on tokens, as far as it is known in one pass.

    The expected weight is the largest of: equal weights, the mean weight that the key receives, and a lower bound of
    the mean weight at this distance: the largest weights at it.
    """
    weight = statistics.largest[0].double().cpu().numpy()
    at = statistics.largest_at[0].cpu().numpy()
    place = np.arange(about.length)
    able = about.length - place if about.causal else np.full(about.length, about.length)
    alike = 1 / np.maximum(statistics.keys_seen.expand(statistics.counted.shape)[0].double().mean(0).cpu().numpy(), 1)
    for head in range(len(weight)):
        w, k = weight[head], at[head]
        offset = k - place + about.length
        at_distance = np.bincount(offset, np.where(k >= 0, w, 0), 2 * about.length)[offset]
        same_distance = (at_distance - w) / np.maximum(about.length - 1 - abs(k - place), 1)
        same_key = (received[head][k] - w) / np.maximum(able[k] - 1, 1)
        expected = np.maximum.reduce([same_distance, same_key, alike, np.full(len(w), FLOOR)])
        gain = np.where(w >= LEAST, w * np.log(np.maximum(w, LEAST) / expected), 0)
        yield from _of_kinds(layer, head, gain, k, about)


def _of_kinds(layer: int, head: int, gain: np.ndarray, k: np.ndarray, about: _TokensToWords) -> Iterable[WordLink]:
    query, key = about.word_of, about.word_of[k]
    name_q, name_k, before_k = about.name[query], about.name[key], about.name[np.maximum(key - 1, 0)]
    far = (abs(query - key) > 1) & (name_q >= 0) & (name_k >= 0) & (gain > 0)
    same, copy = name_q == name_k, (name_q == before_k) & (key > 0)
    if not far.any():
        return
    often = np.where(far & ~same & ~copy, np.sqrt(1.0 * about.count[name_q] * about.count[name_k]), 1.0)
    gain = gain / often
    for kind, chosen in (("same", far & same), ("copy", far & copy & ~same), ("look", far & ~same & ~copy)):
        places = np.flatnonzero(chosen)
        for i in places[np.argsort(-gain[places], kind="stable")[:KEPT]]:
            yield WordLink(float(gain[i]), kind, layer, head, int(query[i]), int(key[i]))


def _keep(best: dict[str, list[WordLink]], links: Iterable[WordLink]) -> None:
    for link in links:
        heapq.heappush(best[link.kind], link)
        if len(best[link.kind]) > KEPT:
            heapq.heappop(best[link.kind])


class MapRow(NamedTuple):
    """The exact weights of one word in a head on all words of the text, (W,), and the same by chance."""

    layer: int
    head: int
    query: int
    weights: np.ndarray
    alike: np.ndarray


@dataclass(frozen=True, eq=False)
class WordWeights:
    """The exact weights of a few words: on each other for all heads (layers, heads, n, n), and of some rows in full.

    ``alike`` (layers, 1, n, n): the same for equal weights. ``columns`` are indices of the whole text's words.
    ``outside``: the words outside ``columns`` to which one head attends most, as (query word, key word, weight), the
    largest weight first.
    """

    columns: tuple[int, ...]
    weights: np.ndarray
    alike: np.ndarray
    rows: tuple[MapRow, ...]
    outside: tuple[tuple[int, int, float], ...]


def look_again(
    model: TextModel,
    ids: Sequence[int],
    whole: TokenMap,
    columns: Sequence[int],
    rows: Iterable[tuple[int, int, int]],
    head: tuple[int, int],
) -> WordWeights:
    """The weights of the words ``columns`` on each other, all weights of the ``rows``, which are (layer, head, word),
    and the largest weights of ``columns`` on other words in one ``head``."""
    belongs, pieces = _pieces([whole.words[i] for i in columns])
    weights, alike = (
        np.zeros((model.layers, heads, len(columns), len(columns)), np.float32) for heads in (max(model.heads), 1)
    )
    evens = UniformCalls()
    wanted = sorted(set(rows))
    starts = np.array([word.first for word in whole.words])
    exact: list[MapRow] = []
    outside: list[tuple[int, int, float]] = []

    def row(call: ObservedCall, head: int, query: int) -> np.ndarray:
        word = whole.words[query]
        pieces = weights_of(call, rows=range(word.first, word.last), heads=[head])[0, 0]
        return np.asarray(np.add.reduceat(pieces.double().mean(0).cpu().numpy(), starts))

    def visit(layer: int, call: ObservedCall) -> None:
        even = evens.of(call)
        for out, of in ((weights, call), (alike, even)) if pieces else ():
            block = weights_of(of, rows=pieces, keys=pieces)[0].double().cpu()
            block = block if of is call else block.mean(0, keepdim=True)
            out[layer, : len(block)] = (belongs / belongs.sum(-1, keepdim=True) @ block @ belongs.T).float().numpy()
        exact.extend(
            MapRow(layer, number, query, row(call, number, query), row(even, 0, query))
            for at, number, query in wanted
            if at == layer
        )
        if layer == head[0]:
            for query in columns:
                elsewhere = row(call, head[1], query)
                elsewhere[list(columns)] = 0
                key = int(elsewhere.argmax())
                outside.append((query, key, float(elsewhere[key])))

    model.run(model.whole(ids), visit)
    return WordWeights(tuple(columns), weights, alike, tuple(exact), tuple(sorted(outside, key=lambda link: -link[2])))


def _pieces(words: list[Word]) -> tuple[Tensor, list[int]]:
    """(n, pieces) which token belongs to which word, and the positions of the tokens."""
    pieces = [i for word in words for i in range(word.first, word.last)]
    belongs = torch.zeros(len(words), len(pieces), dtype=torch.float64)
    at = 0
    for n, word in enumerate(words):
        belongs[n, at : at + word.last - word.first] = 1
        at += word.last - word.first
    return belongs, pieces

"""One text, or one source and target, read by one model: its sides, its calls, and all numbers of the viewer.

Shape legend: Lq / Lk lengths of a call.
"""

from __future__ import annotations

import math
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ...monitoring._observed import CallObservations
from ._budget import KeptTensors, release_freed
from ._call import MapCall, checked
from ._head import HeadPyramid, MapTile, Pool, What
from ._lse import MapClosed
from ._overview import HeadSummary, row_entropy, summary
from ._side import Match, Side, SideWord, side_of_labels

MOST_HELD = 96 * 2**20  # bytes of pyramids and row numbers of all heads together
_CELLS = 2**22  # weights of rows that are averaged at once
_SIDE_BY_SIDE = 4  # most heads of an overview at once: each holds some rows of weights
# Names in PyTorch (multihead_attn), transformers (encoder_attn, EncDecAttention, crossattention) and Saccade.
_CROSS = re.compile(r"cross_?att|encoder_attn|EncDecAtt|multihead_attn$|(^|[.])cross([.]|$)", re.IGNORECASE)


class Links(NamedTuple):
    """The weights of a row, or on a key.

    ``top``: (token, weight), falling. ``weights``: of the tokens of a range. ``total``: over all tokens. ``entropy``
    in nats, of a row.
    """

    top: list[tuple[int, float]]
    weights: np.ndarray
    total: float
    entropy: float | None


class Cell(NamedTuple):
    """One pair. ``rank``: 1 for a row's largest weight, 0 where hidden or NaN; ``seen``: the number of visible keys."""

    weight: float
    rank: int
    seen: int
    logit: float | None
    product: float
    bias: float | None
    visible: bool


@dataclass(eq=False)
class Run:
    """The sides and calls of one reading. ``roles`` is the result of `measure_roles`, None if unmeasured.

    ``alarms``: sentences by (call id, head). ``findings``: (sentence, call id, head, row token, key token), each of
    which but the sentence may be None. All methods may be called from several threads.
    """

    model: str
    text: str
    sides: dict[str, Side]
    calls: list[MapCall]
    roles: dict[str, Any] | None = None
    alarms: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    findings: Sequence[tuple[str, str | None, int | None, int | None, int | None]] = ()
    shown: tuple[str, int] | None = None  # the call and head to show first
    kept: KeptTensors | None = None
    beyond: int | None = None  # the context in training, if the text is longer
    source: Any = None  # the opened model, for reading the text again (step by step)
    progress: tuple[int, int] | None = None  # (done, total) of a running measurement

    def __post_init__(self) -> None:
        self._by_id = {call.id: call for call in self.calls}
        self._heads: OrderedDict[tuple[str, int, int], HeadPyramid] = OrderedDict()
        self._summaries: dict[tuple[str, int, int], HeadSummary] = {}
        self._lock = threading.Lock()
        self._closed = False

    def call(self, id: str) -> MapCall:
        """The call of this id. KeyError if there is none, MapClosed after the end."""
        if self._closed:
            raise MapClosed
        if id not in self._by_id:
            raise KeyError(f"call: there is no {id!r}; this run has {', '.join(self._by_id)}")
        return self._by_id[id]

    def head(self, call: str, item: int, head: int) -> HeadPyramid:
        """The head at this place. KeyError or IndexError if there is none."""
        map_call = self.call(call)
        batch, heads = map_call.shape[:2]
        if not 0 <= item < batch:
            raise IndexError(f"item: expected 0 to {batch - 1}, got {item}")
        if not 0 <= head < heads:
            raise IndexError(f"head: expected 0 to {heads - 1}, got {head}")
        with self._lock:
            place = (call, item, head)
            if self._closed:
                raise MapClosed
            pyramid = self._heads.setdefault(place, HeadPyramid(map_call, item, head))
            self._heads.move_to_end(place)
            self._forget(place)
        return pyramid

    def _forget(self, kept: tuple[str, int, int]) -> None:
        """Drop the least recently used heads until the rest fits, except those being computed."""
        held = {place: head.bytes for place, head in self._heads.items()}
        total = sum(held.values())
        for place, size in held.items():
            if total <= MOST_HELD:
                return
            if place != kept and size and not self._heads[place].busy:
                total -= size
                del self._heads[place]

    def tile(
        self,
        call: str,
        head: int,
        item: int,
        what: What,
        pool: Pool,
        level: int,
        row: int,
        key: int,
        exact: bool = True,
    ) -> MapTile:
        """See `HeadPyramid.tile`."""
        return self.head(call, item, head).tile(what, pool, level, row, key, exact=exact)

    def row(self, call: str, head: int, item: int, tokens: Sequence[int], start: int, stop: int, top: int) -> Links:
        """The weights of these query tokens, averaged over those that see a key; ``weights`` of the keys [start, stop).

        The entropy is the mean of theirs, NaN if none sees a key.
        """
        pyramid = self.head(call, item, head)
        _within(tokens, pyramid.length_q, "tokens")
        total, seeing, entropies = np.zeros(pyramid.length_k), 0, 0.0
        step = max(1, _CELLS // pyramid.length_k)
        for at in range(0, len(tokens), step):
            weights, visible = pyramid.weights_and_visible(torch.tensor(tokens[at : at + step]))
            total += weights.sum(0, dtype=np.float64)
            seeing += int(visible.any(1).sum())
            entropies += float(row_entropy(weights).sum())
        return _links(total / max(1, seeing), start, stop, top, entropies / seeing if seeing else float("nan"))

    def column(self, call: str, head: int, item: int, tokens: Sequence[int], start: int, stop: int, top: int) -> Links:
        """The weights on these key tokens, summed over them; ``weights`` of the rows [start, stop)."""
        pyramid = self.head(call, item, head)
        _within(tokens, pyramid.length_k, "tokens")
        return _links(pyramid.looked_at_by(list(tokens)).astype(np.float64), start, stop, top, None)

    def cell(self, call: str, head: int, item: int, row: int, key: int) -> Cell:
        """One pair and its place among the pairs of its row."""
        pyramid = self.head(call, item, head)
        _within([row], pyramid.length_q, "row")
        _within([key], pyramid.length_k, "key")
        numbers = pyramid.row(row)
        weight, visible = float(numbers.weights[key]), bool(numbers.visible[key])
        rank = 1 + int((numbers.weights > weight).sum()) if visible and not math.isnan(weight) else 0
        logit = float(numbers.logits[key]) if visible else None
        return Cell(
            weight, rank, int(numbers.visible.sum()), logit, pyramid.product(row, key), pyramid.bias(row, key), visible
        )

    def rows(self, call: str, head: int, item: int, start: int, stop: int) -> dict[str, np.ndarray]:
        """Statistics of the rows [start, stop) by name, NaN for rows that see no key; "received" for those keys."""
        numbers = self.head(call, item, head).numbers()
        return {name: values[start:stop] for name, values in numbers.items()}

    def overview(self, item: int) -> list[HeadSummary]:
        """Every head of every call, in order."""
        places = [(call.id, item, head) for call in self.calls if item < call.shape[0] for head in range(call.shape[1])]
        missing = [place for place in places if place not in self._summaries]
        if missing:
            # A few rows of one head do not use all cores, so several heads run at once.
            with ThreadPoolExecutor(min(torch.get_num_threads(), _SIDE_BY_SIDE)) as threads:
                for done, (place, made) in enumerate(zip(missing, threads.map(self._summary, missing), strict=True)):
                    self._summaries[place] = made
                    if done % 8 == 7:
                        release_freed()
            release_freed()
        return [self._summaries[place] for place in places]

    def clearest(self) -> tuple[str, int]:
        """The call and head with the largest mean of each row's largest weight, without the weight on the first key."""

        def clear(head: HeadSummary) -> float:
            clearness = head.numbers["largest"] - head.numbers["first"]
            return -math.inf if math.isnan(clearness) else clearness

        best = max(self.overview(0), key=clear)
        return best.call, best.head

    def _summary(self, place: tuple[str, int, int]) -> HeadSummary:
        call, item, head = place
        role, alarms = self.role(self.call(call), head), self.alarms.get((call, head), [])
        return summary(self.head(call, item, head), role, alarms)

    def role(self, call: MapCall, head: int) -> dict[str, Any] | None:
        """The role of this head from `measure_roles`."""
        heads = (self.roles or {}).get("heads", ())
        return next((h for h in heads if (h["layer"], h["head"]) == (call.layer, head)), None)

    def words(self, side: str, start: int, stop: int) -> list[SideWord]:
        """The words that overlap the tokens [start, stop)."""
        return self.side(side).span(start, stop)

    def search(self, side: str, query: str, limit: int) -> tuple[int, list[Match]]:
        """The number of matches of ``query`` in the text, and the first ``limit`` of them."""
        return self.side(side).search(query, limit)

    def side(self, id: str) -> Side:
        """The side `id`, such as "source"; KeyError for an unknown id."""
        if id not in self.sides:
            raise KeyError(f"side: there is no {id!r}; this run has {', '.join(self.sides)}")
        return self.sides[id]

    def close(self) -> None:
        """Free memory and files, and stop computations. No method may be called afterwards."""
        with self._lock:
            self._closed = True
            for head in self._heads.values():
                head.close()
            self.calls.clear()
            self._by_id.clear()
            self._heads.clear()
        if self.kept is not None:
            self.kept.close()


def _within(tokens: Sequence[int], length: int, name: str) -> None:
    for token in tokens:
        if not 0 <= token < length:
            raise IndexError(f"{name}: expected 0 to {length - 1}, got {token}")
    if not tokens:
        raise ValueError(f"{name}: expected at least one token")


def _links(weights: np.ndarray, start: int, stop: int, top: int, entropy: float | None) -> Links:
    count = min(top, len(weights))
    largest = np.argpartition(-weights, count - 1)[:count] if count else np.empty(0, int)
    order = largest[np.lexsort((largest, -weights[largest]))]
    best = [(int(at), float(weights[at])) for at in order if weights[at] > 0]
    return Links(best, weights[start:stop].astype(np.float32), float(weights.sum()), entropy)


def from_watch(observed: CallObservations, words: Sequence[str] | None = None, name: str = "watched model") -> Run:
    """The kept calls of a watch, or of its file.

    ``words`` are the labels of the tokens of a side; a side of another length has numbers instead. A call is
    cross-attention if its name says so, or if its lengths differ without a mask that positions the rows among the keys,
    as in decoding with a cache.

    Raises:
        ValueError: no call was kept, or no side has as many tokens as there are words.
    """
    if not observed.kept:
        raise ValueError(
            "watched: no call was kept, so there is no map to show; keep calls with saccade.watch(model, keep=True)"
        )
    sites = {site.name: site for site in observed.calls}
    sides: dict[str, Side] = {}
    calls = []
    for number, (site, kept) in enumerate(observed.kept.items()):
        given = {field: getattr(kept, field) for field in ("mask", "bias", "scale", "softcap", "sink")}
        call = checked(kept.query, kept.key, **given)
        cross = _CROSS.search(site) is not None
        keys = _side(sides, call.length_k, words, "source" if cross else "tokens").id
        rows = _side(sides, call.length_q, words).id
        place = str(number), site or "attention", sites[site].layer
        made = MapCall(*place, "cross" if cross else "self", rows, keys, call)
        if call.length_q != call.length_k and not cross:
            made = replace(made, rows=keys) if made.causal else replace(made, kind="cross")
        calls.append(made)
    used = {id for call in calls for id in (call.rows, call.keys)}
    sides = {id: side for id, side in sides.items() if id in used}
    if words is not None and not any(side.named for side in sides.values()):
        lengths = ", ".join(str(side.tokens) for side in sides.values())
        raise ValueError(f"words: expected as many as a call has tokens ({lengths}), got {len(words)}")
    return Run(name, "", sides, calls, alarms=_alarms(observed, calls))


def _side(sides: dict[str, Side], length: int, words: Sequence[str] | None, of: str = "tokens") -> Side:
    """The side of this length; the source of cross-attention is a separate side without words."""
    id = f"{of}-{length}"
    if id not in sides:
        if words is not None and len(words) == length and of == "tokens":
            sides[id] = side_of_labels(id, words)
        else:
            sides[id] = Side(id, f"{length:,} tokens" if of == "tokens" else f"{length:,} tokens of the source", length)
    return sides[id]


def _alarms(observed: CallObservations, calls: list[MapCall]) -> dict[tuple[str, int], list[str]]:
    ids = {call.name: call for call in calls}
    out: dict[tuple[str, int], list[str]] = {}
    for alarm in observed.alarms:
        call = ids.get(alarm.name or "attention")
        if call is not None:
            heads = range(call.shape[1]) if alarm.head is None else [alarm.head]
            for head in heads:
                out.setdefault((call.id, head), []).append(f"{alarm.kind}: {alarm.message}")
    return out

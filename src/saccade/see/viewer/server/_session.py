"""The runs of a viewer, and every operation that a page or a notebook may request.

An operation reads its unchecked parameters one by one, and returns a header (JSON) and buffers (float32, little
endian). Both transports, `_app.py` and `_widget.py`, only transmit them.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from textwrap import shorten
from typing import Any, cast

import numpy as np

from ....operator._scores._score import ModifiedScores
from ....support._plain_values import plain_values
from ..maps import SIDE, THUMBNAIL, HeadSummary, MapCall, MapClosed, Pool, Run, Side, What
from ..steps._page import step_script
from ._heads import forget, importance_of, patched_from, without_heads
from ._params import MOST_TOKENS, ParameterError, Params
from ._steps import check_again, steps_of_row, why_not_again

VERSION = 1  # of the protocol
MOST_TOP = 1000
MOST_FOUND = 1000
LONGEST_QUERY = 1000  # characters
PATCHING = {"other": 100_000, "target": 200, "positions": 200}  # longest parameters of patching, in characters
FIRST_CHARACTERS = 200  # of a text, in the list of runs
LONGEST_MASK = 200  # characters of a mask as text
MOST_PAIRS = 2**24  # weights in one request of rows or columns: 167 words of a text of 100,000 tokens

Answer = tuple[dict[str, Any], list[np.ndarray]]


@dataclass(frozen=True)
class Reply:
    """An answer: a header, and buffers of float32. ``status`` is for HTTP."""

    header: dict[str, Any]
    buffers: Sequence[bytes] = ()
    status: int = 200


CLOSED = Reply({"error": "the viewer has ended"}, status=400)


@dataclass(frozen=True)
class MapPlace:
    """One head of one item of a call."""

    run: str
    call: str
    head: int
    item: int = 0


@dataclass(eq=False)
class Session:
    """Runs that are shown together, and the place to show first. Thread-safe.

    ``notes``: remarks on how the texts were read.
    """

    runs: Sequence[Run]
    title: str
    shown: MapPlace
    notes: Sequence[str] = ()
    closed: bool = field(default=False, init=False)

    def reply(self, op: object, params: object) -> Reply:
        """The answer to a request, or an error as one sentence. Never raises."""
        operation = _OPERATIONS.get(op) if isinstance(op, str) else None
        if operation is None:
            return Reply({"error": "op: there is no such operation"}, status=404)
        if self.closed:
            return CLOSED
        try:
            header, buffers = operation(self, Params(params))
            return Reply(plain_values(header), [np.ascontiguousarray(values, "<f4").tobytes() for values in buffers])
        except ParameterError as error:
            return Reply({"error": str(error)}, status=400)
        except MapClosed:
            return CLOSED
        except Exception:
            if self.closed:
                return CLOSED
            logging.getLogger(__name__).exception("the viewer could not answer %r", op)
            return Reply({"error": f"{op}: failed; the log where Saccade runs has the reason"}, status=500)

    def close(self) -> None:
        """Free the memory and files of the runs."""
        self.closed = True
        for run in self.runs:
            forget(run)
            run.close()

    @cached_property
    def opened(self) -> dict[str, Any]:
        """The first message to a client: the possible requests."""
        why_not = [why_not_again(run) for run in self.runs]
        return {
            "version": VERSION,
            "title": self.title,
            "saccade": sys.modules["saccade"].__version__,  # parts do not import the package
            "runs": [_described_run(str(number), run) for number, run in enumerate(self.runs)],
            "shown": vars(self.shown),
            "findings": _findings(self.runs[int(self.shown.run)]),
            "step": None in why_not,
            "why_not": None if None in why_not else why_not[0],
        }

    def _run(self, params: Params) -> Run:
        return self.runs[int(params.choice("run", [str(number) for number in range(len(self.runs))]))]

    def _side(self, params: Params) -> Side:
        sides = self._run(params).sides
        return sides[params.choice("side", list(sides))]

    def _map(self, params: Params) -> tuple[Run, MapCall, int, int]:
        """The run, the call, the head and the item."""
        run = self._run(params)
        calls = {call.id: call for call in run.calls}
        call = calls[params.choice("call", list(calls))]
        items, heads, _, _ = call.shape
        return run, call, params.integer("head", 0, heads - 1), params.integer("item", 0, items - 1)


def _open(session: Session, params: Params) -> Answer:
    return session.opened, []


def _findings(run: Run) -> list[dict[str, Any]]:
    """The findings with a place, which a viewer can show."""
    names = ("sentence", "call", "head", "row", "key")
    return [dict(zip(names, finding, strict=True)) for finding in run.findings if None not in finding]


def _described_run(id: str, run: Run) -> dict[str, Any]:
    return {
        "id": id,
        "model": run.model,
        "beyond": run.beyond,
        "text": run.text[:FIRST_CHARACTERS],
        "digest": _digest(run),
        "sides": [_described_side(side) for side in run.sides.values()],
        "calls": [_described_call(call) for call in run.calls],
    }


def _digest(run: Run) -> str:
    """A digest that differs for texts with the same beginning."""
    whole = "\0".join([run.text, *(side.text for side in run.sides.values())])
    return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _described_side(side: Side) -> dict[str, Any]:
    known = {name: getattr(side, name) for name in ("id", "name", "tokens", "named", "prompt")}
    return {**known, "words": len(side.words)}


def _described_call(call: MapCall) -> dict[str, Any]:
    items, heads, rows, keys = call.shape
    given = call.call
    placed = [call.placed_for(item) for item in range(items)]
    apart = {"placed_by_item": placed} if len(set(placed)) > 1 else {}
    return {
        "id": call.id,
        "name": call.name,
        "layer": call.layer,
        "kind": call.kind,
        "heads": heads,
        "kv_heads": given.kv_heads,
        "width": given.query.shape[-1],
        "items": items,
        "rows": {"side": call.rows, "length": rows, "placed": call.placed, **apart},
        "keys": {"side": call.keys, "length": keys},
        "causal": call.causal,
        "mask": None if given.mask is None else shorten(repr(given.mask), LONGEST_MASK),
        "bias": None if given.bias is None or isinstance(given.bias, ModifiedScores) else type(given.bias).__name__,
        "scale": given.scale,
        "softcap": given.softcap,
        "sink": given.sink is not None,
    }


def _words(session: Session, params: Params) -> Answer:
    side = session._side(params)
    start, stop = params.span(side.tokens)
    if stop - start > MOST_TOKENS:
        raise ParameterError(f"stop: expected at most {MOST_TOKENS:,} tokens at once, got {stop - start:,}")
    return {"words": [[*word[:4], int(word.special), *word[5:]] for word in side.span(start, stop)]}, []


def _overview(session: Session, params: Params) -> Answer:
    run = session._run(params)
    item = params.integer("item", 0, max(call.shape[0] for call in run.calls) - 1)
    heads = run.overview(item)
    pictures = [_enlarged(head.thumbnail) for head in heads]
    return {"side": THUMBNAIL, "heads": [_summarised(head) for head in heads]}, [np.stack(pictures)]


def _summarised(head: HeadSummary) -> dict[str, Any]:
    role = head.role or {}
    about = {"role": role.get("role"), "decided_by": role.get("decided_by"), "score": role.get("score")}
    return {
        "call": head.call,
        "head": head.head,
        "sampled": head.sampled,
        "alarms": head.alarms,
        **about,
        **head.numbers,
    }


def _enlarged(thumbnail: np.ndarray) -> np.ndarray:
    """The small map of a short text with each bin repeated, up to 48 x 48."""
    rows, keys = (np.arange(THUMBNAIL) * size // THUMBNAIL for size in thumbnail.shape)
    return thumbnail[rows[:, None], keys]


def _tile(session: Session, params: Params) -> Answer:
    run, call, head, item = session._map(params)
    added = call.call.bias is not None and not isinstance(call.call.bias, ModifiedScores)
    among = ("weights", "logits", "bias") if added else ("weights", "logits")
    what, pool = cast(What, params.choice("what", among)), cast(Pool, params.choice("pool", ("max", "mean")))
    _, _, rows, keys = call.shape
    level = params.integer("level", 0, max(rows, keys).bit_length())
    last_row, last_key = ((length - 1) // (SIDE << level) for length in (rows, keys))
    row, key = params.integer("row", 0, last_row), params.integer("key", 0, last_key)
    tile = run.tile(call.id, head, item, what, pool, level, row, key, exact=params.flag("exact"))
    n, m = tile.values.shape
    return {"rows": n, "keys": m, "sampled": tile.sampled}, [tile.values]


def _row(session: Session, params: Params) -> Answer:
    run, call, head, item = session._map(params)
    _, _, rows, keys = call.shape
    tokens, (start, stop) = _chosen(params, rows, keys), params.span(keys)
    links = run.row(call.id, head, item, tokens, start, stop, params.integer("top", 0, MOST_TOP))
    return {"top": links.top, "entropy": links.entropy, "sum": links.total}, [links.weights]


def _column(session: Session, params: Params) -> Answer:
    run, call, head, item = session._map(params)
    _, _, rows, keys = call.shape
    tokens, (start, stop) = _chosen(params, keys, rows), params.span(rows)
    links = run.column(call.id, head, item, tokens, start, stop, params.integer("top", 0, MOST_TOP))
    return {"top": links.top, "received": links.total}, [links.weights]


def _chosen(params: Params, chosen: int, others: int) -> list[int]:
    tokens = params.integers("tokens", chosen)
    if len(tokens) * others > MOST_PAIRS:
        raise ParameterError(f"tokens: expected at most {MOST_PAIRS // others:,} for this map, got {len(tokens):,}")
    return tokens


def _cell(session: Session, params: Params) -> Answer:
    run, call, head, item = session._map(params)
    _, _, rows, keys = call.shape
    cell = run.cell(call.id, head, item, params.integer("row", 0, rows - 1), params.integer("key", 0, keys - 1))
    return cell._asdict(), []


def _rows(session: Session, params: Params) -> Answer:
    run, call, head, item = session._map(params)
    _, _, rows, keys = call.shape
    start, stop = params.span(max(rows, keys))
    numbers = run.rows(call.id, head, item, start, stop)
    received = numbers.pop("received", None)
    together = rows == keys and call.rows == call.keys
    if received is not None and together:
        numbers["received"] = received
    header = {"names": list(numbers), "received": received is not None}
    buffers = [np.stack(list(numbers.values()))]
    if received is not None and not together:  # keys have other positions than rows
        header["received_keys"] = keys
        buffers.append(received)
    return header, buffers


def _search(session: Session, params: Params) -> Answer:
    side = session._side(params)
    total, matches = side.search(params.text("query", LONGEST_QUERY), params.integer("limit", 0, MOST_FOUND))
    return {"total": total, "found": [[*match] for match in matches]}, []


def _step(session: Session, params: Params) -> Answer:
    run, call, head, _ = session._map(params)
    row = params.integer("row", 0, call.shape[2] - 1)
    check_again(run, "step")
    return steps_of_row(run, call, head, row), []


def _heads(session: Session, params: Params) -> Answer:
    run = session._run(params)
    off = params.heads("off", {call.id: call.shape[1] for call in run.calls})
    row = params.integer_or_none("row", 0, max(side.tokens for side in run.sides.values()) - 1)
    return without_heads(run, off, row)


def _importance(session: Session, params: Params) -> Answer:
    return importance_of(session._run(params))


def _patching(session: Session, params: Params) -> Answer:
    other, target, positions = (params.text(name, most) for name, most in PATCHING.items())
    by = params.choice("by", ("gradient", "exact"))
    texts = other, target.strip() or None, positions.strip() or None
    return patched_from(session._run(params), *texts, by, lambda: session.closed)


def _progress(session: Session, params: Params) -> Answer:
    """The progress of slow operations, if known."""
    known = [run.progress for run in session.runs if run.progress is not None]
    return {"done": known[0][0], "total": known[0][1]} if known else {}, []


def _script(session: Session, params: Params) -> Answer:
    return {"text": _SCRIPTS[params.choice("name", list(_SCRIPTS))]()}, []


_SCRIPTS: dict[str, Callable[[], str]] = {
    "heads": lambda: resources.files("saccade.viewer").joinpath("heads.js").read_text(encoding="utf-8"),
    "step": step_script,
}


_OPERATIONS: dict[str, Callable[[Session, Params], Answer]] = {
    "alive": lambda session, params: ({}, []),  # a page is open
    "cell": _cell,
    "column": _column,
    "heads": _heads,
    "importance": _importance,
    "open": _open,
    "overview": _overview,
    "patching": _patching,
    "progress": _progress,
    "row": _row,
    "rows": _rows,
    "search": _search,
    "step": _step,
    "script": _script,
    "tile": _tile,
    "words": _words,
}

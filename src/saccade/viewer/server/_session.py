"""What is shown, and every operation that a page or a notebook may ask for.

An operation takes parameters, which come from outside and are read one by one, and gives a header (JSON) and buffers
(float32, little endian). Both transports, `_app.py` and `_widget.py`, only carry them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ... import __version__
from ..._plain_values import plain_values
from ..maps import SIDE, Links, MapCall, Run, Side
from ._params import MOST_TOKENS, Params, RequestError

VERSION = 1  # of the protocol
OVERVIEW = 48  # bins of the small maps, on each side
MOST_TOP = 1000
MOST_FOUND = 1000
LONGEST_QUERY = 1000  # characters
FIRST_CHARACTERS = 200  # of a text, in the list of runs

Answer = tuple[dict[str, Any], list[np.ndarray]]


@dataclass(frozen=True)
class Reply:
    """What goes back: a header, and buffers of float32. ``status`` is for HTTP."""

    header: dict[str, Any]
    buffers: Sequence[bytes] = ()
    status: int = 200


@dataclass(frozen=True)
class Place:
    """One head of one item of a call."""

    run: str
    call: str
    head: int
    item: int = 0


@dataclass(frozen=True)
class ShownFinding:
    """A sentence about a place of a map, which the viewer offers to go to."""

    sentence: str
    call: str
    head: int
    row: int
    key: int


@dataclass(eq=False)
class Session:
    """Runs that are shown together, the place to show first, and what is told of it. Several threads may ask at once."""

    runs: Sequence[Run]
    title: str
    shown: Place
    findings: Sequence[ShownFinding] = ()
    step: Callable[[Run, MapCall, int, int, int], dict[str, Any]] | None = None
    _opened: dict[str, Any] | None = field(default=None, init=False, repr=False)

    def reply(self, op: object, params: object) -> Reply:
        """The answer to a request, or one sentence that says what is wrong with it. Never raises."""
        operation = _OPERATIONS.get(op) if isinstance(op, str) else None
        if operation is None:
            return Reply({"error": "op: there is no such operation"}, status=404)
        try:
            header, buffers = operation(self, Params(params))
            return Reply(plain_values(header), [_buffer(values) for values in buffers])
        except RequestError as error:
            return Reply({"error": str(error)}, status=400)
        except Exception:
            logging.getLogger(__name__).exception("the viewer could not answer %r of %r", op, params)
            told = f"{op}: this could not be computed; where Saccade runs, it says why"
            return Reply({"error": told}, status=500)


    # --- what a request names ---

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


def _buffer(values: np.ndarray) -> bytes:
    return np.ascontiguousarray(values, "<f4").tobytes()


# --- the operations --------------------------------------------------------------------------------------------------


def _open(session: Session, params: Params) -> Answer:
    if session._opened is None:
        session._opened = {
            "version": VERSION,
            "title": session.title,
            "saccade": __version__,
            "runs": [_described_run(str(number), run) for number, run in enumerate(session.runs)],
            "shown": vars(session.shown),
            "findings": [vars(finding) for finding in session.findings],
            "step": session.step is not None,
        }
    return session._opened, []


def _described_run(id: str, run: Run) -> dict[str, Any]:
    return {
        "id": id,
        "model": run.name,
        "text": run.title_text[:FIRST_CHARACTERS],
        "sides": [_described_side(side) for side in run.sides.values()],
        "calls": [_described_call(call) for call in run.calls],
    }


def _described_side(side: Side) -> dict[str, Any]:
    known = {name: getattr(side, name) for name in ("id", "name", "tokens", "named", "prompt")}
    return {**known, "words": len(side.words)}


def _described_call(call: MapCall) -> dict[str, Any]:
    items, heads, rows, keys = call.shape
    given = call.call
    return {
        "id": call.id,
        "name": call.name,
        "layer": call.layer,
        "kind": call.kind,
        "heads": heads,
        "kv_heads": given.kv_heads,
        "width": given.query.shape[-1],
        "items": items,
        "rows": {"side": call.rows, "length": rows, "placed": call.placed},
        "keys": {"side": call.keys, "length": keys},
        "causal": call.causal,
        "mask": None if given.mask is None else repr(given.mask),
        "bias": None if given.bias is None else type(given.bias).__name__,
        "scale": given.scale,
        "softcap": given.softcap,
        "sink": given.sink is not None,
    }


def _words(session: Session, params: Params) -> Answer:
    side = session._side(params)
    start, stop = params.span(side.tokens)
    if stop - start > MOST_TOKENS:
        raise RequestError(f"stop: at most {MOST_TOKENS:,} tokens at once, {stop - start:,} were asked for")
    words = [[*word._replace(special=int(word.special), gap=word.gap)] for word in side.span(start, stop)]
    return {"words": words}, []


def _overview(session: Session, params: Params) -> Answer:
    run = session._run(params)
    item = params.integer("item", 0, max((call.shape[0] for call in run.calls), default=1) - 1)
    heads, pictures = run.overview(item, OVERVIEW)
    return {"side": OVERVIEW, "heads": [vars(head) for head in heads]}, [pictures]


def _tile(session: Session, params: Params) -> Answer:
    run, call, head, item = session._map(params)
    among = ("weights", "logits") if call.call.bias is None else ("weights", "logits", "bias")
    what, pool = params.choice("what", among), params.choice("pool", ("max", "mean"))
    _, _, rows, keys = call.shape
    level = params.integer("level", 0, max(rows, keys).bit_length())
    last_row, last_key = ((length - 1) // (SIDE << level) for length in (rows, keys))
    row, key = params.integer("row", 0, last_row), params.integer("key", 0, last_key)
    found = run.tile(call, head, item, what, pool, level, row, key, exact=params.flag("exact"))
    n, m = found.values.shape
    return {"rows": n, "keys": m, "sampled": found.sampled}, [found.values]


def _line(session: Session, params: Params, *, of_rows: bool) -> tuple[Links, np.ndarray]:
    """Weights of chosen rows on a range of keys, or of a range of rows on chosen keys."""
    run, call, head, item = session._map(params)
    lengths = call.shape[2:]
    chosen, others = lengths if of_rows else lengths[::-1]
    tokens, (start, stop) = params.integers("tokens", 0, chosen - 1), params.span(others)
    found = (run.row if of_rows else run.column)(call, head, item, tokens, params.integer("top", 0, MOST_TOP))
    return found, found.values[start:stop]


def _row(session: Session, params: Params) -> Answer:
    found, values = _line(session, params, of_rows=True)
    return {"top": found.top, "entropy": found.entropy, "sum": found.total}, [values]


def _column(session: Session, params: Params) -> Answer:
    found, values = _line(session, params, of_rows=False)
    return {"top": found.top, "received": found.total}, [values]


def _cell(session: Session, params: Params) -> Answer:
    run, call, head, item = session._map(params)
    row, key = (params.integer(name, 0, length - 1) for name, length in zip(("row", "key"), call.shape[2:], strict=True))
    return vars(run.cell(call, head, item, row, key)), []


def _rows(session: Session, params: Params) -> Answer:
    run, call, head, item = session._map(params)
    start, stop = params.span(call.shape[2])
    names, values = run.rows(call, head, item, start, stop)
    return {"names": names, "received": "received" in names}, [values]


def _search(session: Session, params: Params) -> Answer:
    side = session._side(params)
    total, found = side.search(params.text("query", LONGEST_QUERY), params.integer("limit", 0, MOST_FOUND))
    return {"total": total, "found": [[*match] for match in found]}, []


def _step(session: Session, params: Params) -> Answer:
    if session.step is None:
        raise RequestError("step: there is no model behind this map, so its steps are not known")
    run, call, head, item = session._map(params)
    return session.step(run, call, head, item, params.integer("row", 0, call.shape[2] - 1)), []


def _alive(session: Session, params: Params) -> Answer:
    """A page is open."""
    return {}, []


_OPERATIONS: dict[str, Callable[[Session, Params], Answer]] = {
    "alive": _alive,
    "cell": _cell,
    "column": _column,
    "open": _open,
    "overview": _overview,
    "row": _row,
    "rows": _rows,
    "search": _search,
    "step": _step,
    "tile": _tile,
    "words": _words,
}

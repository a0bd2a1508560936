"""Findings about heads that are wired wrongly.

Shape legend: B batch, H heads, L length, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from ...findings._finding import Finding, Location
from ...findings._words import spans
from ...tracing._trace import TraceStep, step_line
from ...tracing._visible import steps_of
from ...tracing._wiring import AttentionWiring
from ._heads import HeadLayout, MisplacedRow, ScatteredFactor, heads, scattered, strayed
from ._projections import projections

_NAME = "mixing"
_error = partial(Finding, _NAME, _NAME, "error")
_warning = partial(Finding, _NAME, _NAME, "warning")
_SPLIT = "q = self.q_proj(x).view(B, L, H, D).transpose(1, 2), k and v likewise"
_MERGE = "out = out.transpose(1, 2).reshape(B, L, H * D)"
_VIEWS = ("view", "reshape", "unflatten", "_unsafe_view", "rearrange")
_TURNS = ("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "mT", "rearrange")
_JOINS = ("view", "reshape", "flatten", "_unsafe_view")


def mixed(wiring: AttentionWiring, length: int) -> Iterator[Finding]:
    """The first error of these kinds: positions in heads, rows of the output, heads and their order, projections."""
    module = wiring.subject.module is not None
    for finding in _positions(wiring, length):
        yield finding
        return
    structure = heads(wiring)
    findings = [] if structure is None else list(_of_heads(wiring, structure))
    yield from findings
    if module and not any(other.severity == "error" for other in findings):
        yield from projections(wiring, structure)


def _positions(wiring: AttentionWiring, length: int) -> Iterator[Finding]:
    if (torn := scattered(wiring, length)) is not None:
        yield _wrong_split(wiring, torn, length)
    for row in wiring.rows:
        if (stray := strayed(row)) is not None:
            yield _wrong_merge(wiring, stray)


def _wrong_split(wiring: AttentionWiring, torn: ScatteredFactor, length: int) -> Finding:
    place = torn.index[torn.axis]
    head = max(torn.index[: torn.axis], default=0)
    return _error(
        f"The {torn.role} at place {place} of head {head} is made from position {torn.position} of the input, that of "
        f"head 0 from position {torn.expected}: heads are split by a view without a transpose, so that a head is a run "
        "of positions in place of a slice of the channels.",
        "Tokens attend to a few neighbours, chopped into pieces, and a causal mask hides the wrong things. It trains, "
        "but far worse, and depends on the length.",
        _SPLIT,
        {"role": torn.role, "index": list(torn.index), "position": torn.position},
        _line(wiring, _first(_VIEWS, _untransposed(length))) or torn.location,
    )


def _wrong_merge(wiring: AttentionWiring, stray: MisplacedRow) -> Finding:
    where = "what enters the output projection" if wiring.merged else "the output"
    return _error(
        f"Row {stray.row} of {where} holds, in channels {spans(stray.elements)}, the attention of the query at "
        f"position {stray.query}: positions and heads are mixed where heads are merged.",
        "Each token gets the result of other tokens. It trains, as the mixing is the same every time, but far worse; "
        "it depends on the length and lets later tokens through in spite of a causal mask.",
        _MERGE,
        {"row": stray.row, "query": stray.query, "channels": list(stray.elements)},
        _line(wiring, _last(_JOINS, _from_heads)),
    )


def _of_heads(wiring: AttentionWiring, structure: HeadLayout) -> Iterator[Finding]:
    sides = (("keys", structure.reads_key, structure.keys), ("values", structure.reads_value, structure.values))
    order = wiring.subject.promise.kv_order
    # one order for both is a choice, which published code has made, too
    both_tiled = all(reads == _repeated("repeat", structure.count, kv_heads) for _, reads, kv_heads in sides)
    for which, reads, kv_heads in sides:
        expected = _repeated(order, structure.count, kv_heads)
        if reads != expected:
            chosen = order is None and both_tiled
            yield _wrong_kv(wiring, which, reads, expected, chosen)
            if not chosen:
                return
            break
    if structure.lands != tuple(range(structure.count)):
        yield _order(wiring, structure, f"heads are merged in the order {list(structure.lands)}", "merged")
        return
    orders = (
        ("queries", structure.query),
        ("keys", structure.key),
        ("values", structure.value),
        ("the merged output", structure.merged),
    )
    known = {role: order for role, order in orders if order != "mixed"}
    if len(set(known.values())) > 1:
        odd = next(role for role in reversed(known) if known[role] == "interleaved")
        yield _order(wiring, structure, "; ".join(f"{role} {order}" for role, order in known.items()), odd)
    elif structure.query == "interleaved" and structure.count > 1:
        yield _interleaved(wiring, structure.count)


def _wrong_kv(
    wiring: AttentionWiring, which: str, reads: tuple[int, ...], expected: tuple[int, ...], chosen: bool
) -> Finding:
    """The finding for a query head that reads the wrong key-value head. `chosen`: all heads use the less usual order,
    and the user promised no order."""
    count, kv_heads = len(reads), max(expected) + 1
    head = next(h for h in range(count) if reads[h] != expected[h])
    tiled = kv_heads < count and reads == _repeated("repeat", count, kv_heads)
    cause = ": the order of `repeat` (0 1 0 1), not of `repeat_interleave` (0 0 1 1)" if tiled else ""
    idle = sorted(set(expected) - set(reads))
    cause += f", and nobody reads {', '.join(map(str, idle))}" if idle else ""
    fix = "k = k.repeat_interleave(heads // kv_heads, dim=1), and v likewise"
    if wiring.subject.promise.kv_order == "repeat":
        fix = "k = k.repeat(1, heads // kv_heads, 1, 1), and v likewise"
    return Finding(
        _NAME,
        _NAME,
        "warning" if chosen else "error",
        f"Query head {head} reads the {which} of kv head {reads[head]} where {expected[head]} is "
        f"{'usual' if chosen else 'expected'}; heads 0 to {count - 1} read {list(reads)}{cause}.",
        "Weights of published models do not fit: heads get another head's keys and values. A "
        "model trained from scratch learns its own order, and other implementations cannot load it.",
        fix if kv_heads < count else "Multiply the weights of head h with the values of head h: out = weights @ v",
        {"of": which, "reads": list(reads), "expected": list(expected)},
        _line(wiring, _first(("repeat", "expand", "tile"), None)) or _line(wiring, _first(("cat", "roll"), None)),
    )


def _repeated(order: str | None, count: int, kv_heads: int) -> tuple[int, ...]:
    """The kv head of each of `count` query heads."""
    return tuple(h % kv_heads if order == "repeat" else h * kv_heads // count for h in range(count))


def _order(wiring: AttentionWiring, structure: HeadLayout, message: str, odd: str) -> Finding:
    merged = odd in ("merged", "the merged output")
    where = _last(_TURNS, _of_four) if merged else _odd_one(structure.count)
    # one split for all three is a choice, which published code has made, too; only its merge differs
    alike = structure.query == structure.key == structure.value == "interleaved"
    return Finding(
        _NAME,
        _NAME,
        "warning" if alike else "error",
        f"Channels are split into {structure.count} heads in one order and put together in another: {message}.",
        "Trained from scratch it learns around this. Weights trained elsewhere do not fit, and whatever reads, prunes "
        "or shards single heads takes the wrong channels.",
        _MERGE if merged else _SPLIT,
        {
            "query": structure.query,
            "key": structure.key,
            "value": structure.value,
            "merged": structure.merged,
            "lands": list(structure.lands),
        },
        _line(wiring, where),
    )


def _interleaved(wiring: AttentionWiring, count: int) -> Finding:
    return _warning(
        f"The {count} heads lie interleaved in the channels everywhere: head 0 is channels 0, {count}, {2 * count}, "
        "..., where others take channels 0 to D - 1.",
        "It computes the same kind of attention, but weights trained elsewhere do not fit.",
        "x.view(B, L, H, D) instead of x.view(B, L, D, H)",
        {"heads": count},
        _line(wiring, _first(_VIEWS, _widths_last(count))),
    )


# --- which line is to blame

Chosen = Callable[[tuple[TraceStep, ...]], "Location | None"]
Fits = Callable[[TraceStep], bool]


def _line(wiring: AttentionWiring, choose: Chosen) -> Location | None:
    return choose(steps_of(wiring.original, wiring.inputs))


def _first(names: tuple[str, ...], fits: Fits | None) -> Chosen:
    """The line of the first step of one of these names that fits."""

    return lambda steps: step_line((step for step in steps if fits is None or fits(step)), names)


def _last(names: tuple[str, ...], fits: Fits) -> Chosen:
    return lambda steps: _first(names, fits)(steps[::-1])


def _to_heads(step: TraceStep) -> bool:
    return len(step.given) >= 4 and all(len(shape) < len(step.given) for shape in step.taken[:1])


def _untransposed(length: int) -> Fits:
    """Predicate for a view that puts the axis of positions after the axis of heads."""
    return lambda step: _to_heads(step) and step.given[-2] == length


def _from_heads(step: TraceStep) -> bool:
    return bool(step.taken) and len(step.taken[0]) >= 3 and len(step.given) <= 3 and step.given != step.taken[0]


def _of_four(step: TraceStep) -> bool:
    return bool(step.taken) and len(step.taken[0]) >= 4


def _widths_last(count: int) -> Fits:
    """A view that puts the heads last."""
    return lambda step: len(step.given) >= 4 and step.given[-1] == count


def _odd_one(count: int) -> Chosen:
    """The view that puts the heads last. If each head has as many channels as there are heads: the step that transposes
    one of three tensors in another way than the others."""

    def choose(steps: tuple[TraceStep, ...]) -> Location | None:
        views = [step for step in steps if step.name in _VIEWS and _widths_last(count)(step)]
        if all(step.given[-2] != count for step in views):
            return _first(_VIEWS, _widths_last(count))(steps)
        turns = [step for step in steps if step.name in _TURNS and _of_four(step)][:3]
        odd = [step for step in turns if [step.name for step in turns].count(step.name) == 1]
        return odd[0].location if len(odd) == 1 else None

    return choose

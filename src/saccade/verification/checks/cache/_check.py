"""A sequence given piece by piece, with the target's cache, must give the outputs of one call.

Shape legend: B batch, L length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ...findings._finding import Finding, Inapplicable, Location, TargetError, Unmeasured, UnreadableResult
from ...subject._check import Check
from ...subject._decoder import CachedDecoder, capacity, in_pieces, pieces
from ...subject._influence import is_causal
from ...subject._inputs import NamedInputs
from ...subject._steady import exact, steady, tolerance
from ...subject._subject import Subject
from ...tracing._trace import TraceStep, step_line, traced
from ._cache_defects import POSITIONS, wrongly_kept
from ._inside import not_emptied_line, written_line

_NAME = "cache"
_error = partial(Finding, _NAME, _NAME, "error")
_warning = partial(Finding, _NAME, _NAME, "warning")
_note = partial(Finding, _NAME, _NAME, "note")
_LENGTH = 11
_MOST = 67  # positions, so that it stays quick
_PLACED = r"tri[lu]\(.*[\w\])]\s*[-+]\s*\w"  # a triangle that is moved by lengths
_IN_FRONT = "Put earlier keys and values in front and return them: k = torch.cat([past_k, k], dim=-2), v likewise."


@dataclass(frozen=True, eq=False)
class _SequenceSplit:
    """How a sequence is cut, and the words for it."""

    words: str
    sizes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _CacheDifference:
    way: _SequenceSplit
    item: int
    position: int
    by: float
    size: float

    @property
    def piece(self) -> tuple[int, int]:
        """(start, stop): the positions of the piece that holds `position`."""
        start = 0
        for size in self.way.sizes:
            if start <= self.position < start + size:
                return start, start + size
            start += size
        raise AssertionError(self.position)


def _run(subject: Subject) -> Iterator[Finding]:
    if subject.form == "tokens":
        raise Inapplicable("the model check does this for whole models")
    if subject.reading.cache is None:
        if subject.reading.unread_cache:
            raise Unmeasured(subject.reading.unread_cache)
        raise Inapplicable("no cache of the target was found")
    # found once, as every copy would find it again
    promise = subject.promise if subject.form == "cross" else replace(subject.promise, causal=is_causal(subject))
    plain = replace(exact(subject), promise=promise)
    for way in _splits(plain):
        inputs = _inputs(plain, sum(way.sizes))
        expected = _at_once(plain, inputs)
        try:
            got = _in_pieces(plain, inputs, way)
        except UnreadableResult as error:
            raise Unmeasured(
                f"given {way.words}, {error.error}: describe its cache in Python, how="
                "Reading(..., cache=CacheReading(...))"
            ) from error
        except TargetError as error:
            yield _raises(way, error)
            return
        difference = _difference(plain, inputs, expected, got, way)
        if difference is not None:
            yield from _explanation(plain, difference)
            return
    yield from _past_capacity(plain)
    yield from _second_sequence(plain)


def _in_pieces(subject: Subject, inputs: NamedInputs, way: _SequenceSplit) -> Tensor:
    return in_pieces(CachedDecoder(subject.fresh()), inputs, way.sizes)


def _at_once(subject: Subject, inputs: NamedInputs) -> Tensor:
    """The outputs for a whole sequence at once, with a causal mask if the target needs one."""
    if subject.form == "cross" or is_causal(subject):
        return steady(subject, inputs).out
    if not subject.takes("Q"):
        raise Inapplicable("it is not causal, so outputs of pieces differ from outputs of one pass")
    triangle = torch.ones(inputs.length, inputs.length, dtype=torch.bool).tril()
    return steady(subject, inputs, pairs=triangle).out


def _splits(subject: Subject) -> Iterator[_SequenceSplit]:
    yield _SequenceSplit("one position at a time", (1,) * _LENGTH)
    yield _SequenceSplit("5 positions at first, then one at a time", (5,) + (1,) * (_LENGTH - 5))
    # a mask that must be given is made for the piece alone, which several positions of it would not go with
    if (is_causal(subject) or subject.form == "cross") and not any(mask.required for mask in subject.reading.masks):
        yield _SequenceSplit("three positions at a time", (3, 3, 3, 2))


def _inputs(subject: Subject, length: int, seed: int = 0) -> NamedInputs:
    if subject.form == "cross":
        return subject.inputs(2, length, 5, seed=seed)
    return subject.one_sequence(subject.inputs(2, length, seed=seed))


def _compared(subject: Subject, way: _SequenceSplit) -> _CacheDifference | None:
    inputs = _inputs(subject, sum(way.sizes))
    return _difference(subject, inputs, _at_once(subject, inputs), _in_pieces(subject, inputs, way), way)


def _difference(
    subject: Subject, inputs: NamedInputs, expected: Tensor, got: Tensor, way: _SequenceSplit
) -> _CacheDifference | None:
    """The first position that differs."""
    if got.shape != expected.shape:
        raise TargetError(f"pieces give an output of shape {list(got.shape)}, the whole {list(expected.shape)}", None)
    off = (got - expected).abs().nan_to_num(float("inf"))
    off = off.flatten(1, -3).amax(1) if off.dim() == 4 else off  # (B, L, channels)
    off = off.amax(-1)
    wrong = off > tolerance(subject, inputs, expected)
    if not wrong.any():
        return None
    position = int(wrong.any(0).nonzero()[0])
    item = int(wrong[:, position].nonzero()[0])
    return _CacheDifference(way, item, position, float(off[item, position]), float(expected.abs().mean()))


def _raises(way: _SequenceSplit, error: TargetError) -> Finding:
    return _error(
        f"Given {way.words}, {sum(way.sizes)} positions end with {error.error}. The whole sequence works.",
        "Nothing can be generated step by step.",
        "Take all lengths and positions from what is kept: past_length = past_k.shape[-2].",
        {"pieces": list(way.sizes), "raised": error.error},
        error.location,
    )


# --- what a difference comes from


def _explanation(subject: Subject, factor: _CacheDifference) -> Iterator[Finding]:
    visible, expected = _positions_seen(subject, factor)
    missing = sorted(set(expected) - set(visible))
    extra = sorted(set(visible) - set(expected))
    start, stop = factor.piece
    later = [j for j in extra if j > factor.position]
    if later:
        what = f"it depends on position {later[0]}, which comes later in the same piece"
        where = _line(subject, ("tril", "triu"), _MASKED)
        fix = (
            "The mask of a piece has its queries at the end of the keys: "
            "mask = torch.ones(Lq, Lk).tril(diagonal=Lk - Lq).bool()."
        )
        if where is not None and re.search(_PLACED, where.code) and (joined := _line(subject, _JOINED)) is not None:
            where, fix = joined, _IN_FRONT
    elif missing and start > 0 and set(missing) >= set(expected) - set(range(start, stop)):
        what = f"it depends on positions {_listed(visible)} alone: nothing of the {start} positions before reaches it"
        where = _line(subject, _JOINED, _WRITTEN)
        fix = _IN_FRONT
    elif missing and start > 0 and visible == [0]:
        what = "it depends on position 0 alone: a causal mask for one query and all keys is aligned at the top left"
        where = _line(subject, ("tril", "triu"), _MASKED)
        fix = "With one query use no causal mask, or tril(diagonal=Lk - Lq): the query stands at the last key."
    elif missing:
        what = f"it depends on positions {_listed(visible)}, not on {_listed(missing)}, which the whole sees"
        where = _line(subject, _WRITTEN)
        fix = "A full window overwrites its oldest slot, position % window, and masks by position, not by slot."
        if where is None and (cut := _cutting(subject, factor.position, len(visible))) is not None:
            where = cut
            fix = (
                f"Keep all positions that the whole sequence sees; do not truncate. If a window of {len(visible)} is "
                "meant, the whole needs its mask, too: (i - j >= 0) & (i - j < window)."
            )
    elif extra:
        what = f"it depends on position {extra[0]}, which the whole does not see"
        where = _line(subject, ("getitem", "narrow"), _MASKED)
        fix = "Cut the cache to the window: k = k[..., -window:, :], v likewise; or mask what is older."
    else:
        yield from _numbers_differ(subject, factor, visible)
        return
    yield _finding(subject, factor, what, fix, {"sees": visible, "expected": expected}, _NAME, where)


def _positions_seen(subject: Subject, gap: _CacheDifference) -> tuple[list[int], list[int]]:
    """The positions that the output depends on, in pieces and at once."""
    inputs = _inputs(subject, sum(gap.way.sizes))
    rows: tuple[list[int], list[int]] = ([], [])
    first = (_in_pieces(subject, inputs, gap.way), _at_once(subject, inputs))
    side = "query" if subject.form == "cross" else "both"
    for position in range(inputs.length):
        other = inputs.changed([position], side)  # type: ignore[arg-type]
        outs = (_in_pieces(subject, other, gap.way), _at_once(subject, other))
        for row, before, after in zip(rows, first, outs, strict=True):
            if not torch.equal(before[..., gap.position, :], after[..., gap.position, :]):
                row.append(position)
    return rows


def _numbers_differ(subject: Subject, gap: _CacheDifference, places: list[int]) -> Iterator[Finding]:
    """Findings where outputs depend on the right positions, but with other numbers."""
    kept = wrongly_kept(subject, _inputs(subject, sum(gap.way.sizes)), gap.way.sizes, gap.position)
    if kept is not None:
        where = _counting(subject) if kept.family == "order" else _line_of(subject, kept.of)
        yield _finding(subject, gap, kept.what, kept.fix, {"sees": places}, kept.family, where)
        return
    if _order_is_lost(subject, gap):
        yield _finding(
            subject,
            gap,
            "the order of earlier positions does not matter in pieces, but does in the whole: every piece counts its "
            "positions from 0",
            POSITIONS,
            {"sees": places},
            "order",
            _counting(subject),
        )
        return
    yield _finding(
        subject,
        gap,
        "it depends on the right positions but with other numbers: keys and values are kept in another order than they "
        "are read, or stand at another position than in the whole",
        "Append keys and values at the same end, k = torch.cat([past_k, k], dim=-2) and v likewise, and count "
        "positions from past_k.shape[-2].",
        {"sees": places},
        _NAME,
        _line(subject, _WRITTEN, _JOINED),
    )


def _order_is_lost(subject: Subject, gap: _CacheDifference) -> bool:
    """Whether exchanging two earlier positions changes the output of the whole sequence, but not of its pieces."""
    start, _ = gap.piece
    if start < 2:
        return False
    inputs = _inputs(subject, sum(gap.way.sizes))
    order = [1, 0, *range(2, inputs.length)] if gap.way.sizes[0] == 1 else [*range(inputs.length)]
    if order[0] == 0:
        return False
    swapped = inputs.permuted(order, "query" if subject.form == "cross" else "both")
    same = []
    for run in (lambda given: _in_pieces(subject, given, gap.way), lambda given: _at_once(subject, given)):
        before, after = (run(given)[..., gap.position, :] for given in (inputs, swapped))
        same.append(float((before - after).abs().max()) <= tolerance(subject, inputs, before))
    return same == [True, False]


def _listed(positions: Sequence[int]) -> str:
    if len(positions) > 2 and list(positions) == list(range(positions[0], positions[-1] + 1)):
        return f"{positions[0]} to {positions[-1]}"
    return ", ".join(map(str, positions)) or "none"


def _finding(
    subject: Subject,
    gap: _CacheDifference,
    what: str,
    fix: str,
    evidence: dict[str, object],
    family: str = _NAME,
    where: Location | None = None,
) -> Finding:
    return Finding(
        _NAME,
        family,
        "error",
        f"Given {gap.way.words}, output {gap.position} differs from that of the whole sequence by {gap.by:.3g} "
        f"(outputs are about {gap.size:.3g} in size; item {gap.item}): {what}.",
        "Text is generated by a different function than the one that "
        "was trained: it gets worse with length, without an error.",
        fix,
        {"position": gap.position, "item": gap.item, "by": gap.by, "pieces": list(gap.way.sizes), **evidence},
        where or _storing_line(subject),
    )


def _storing_line(subject: Subject) -> Location | None:
    """The line that writes the state kept inside the target."""
    inside = subject.reading.cache is not None and subject.reading.cache.kind == "inside"
    return written_line(subject, _inputs(subject, 1)) if inside else None


_POSITIONS = ("arange", "cumsum")
_MASKED = ("tril", "triu", "masked_fill", "where", "scaled_dot_product_attention")
_WRITTEN = ("setitem", "index_copy_", "index_copy", "scatter", "scatter_", "copy_")
_JOINED = ("cat", "concat", "concatenate", "stack")


def _steps(subject: Subject, before: int = 3) -> list[TraceStep]:
    """Traced steps of a later call with one position, if its line is known."""
    try:
        inputs = _inputs(subject, before + 1)
        decoder, parts = CachedDecoder(subject.fresh()), list(pieces(inputs, (before, 1)))
        with torch.no_grad():
            decoder(parts[0])
        steps = traced(decoder.next_call(parts[1]), parts[1]).steps
    except (Inapplicable, TargetError):
        return []
    return [step for step in steps if step.location is not None and (step.name not in _JOINED or _joins(step))]


def _joins(step: TraceStep) -> bool:
    """Whether a concatenation appends a position to the cache; rotary ones join halves of channels."""
    if len(step.taken) < 2 or len(step.taken[0]) != len(step.taken[1]):
        return False
    sizes = [(size, other) for size, other in zip(*step.taken[:2], strict=True) if size != other]
    return len(sizes) == 1 and 1 in sizes[0]


def _line(subject: Subject, *groups: Sequence[str]) -> Location | None:
    """The last line with a step of the first of the groups that has steps."""
    steps = _steps(subject)
    return next((line for names in groups if (line := step_line(reversed(steps), names)) is not None), None)


def _counting(subject: Subject) -> Location | None:
    """The last line that makes position numbers: of the piece, else of all positions so far, else any."""
    counts = [step for step in _steps(subject) if step.name in _POSITIONS and step.given]
    for wanted in ([1], [4], None):  # the piece's, all so far, any
        own = [step for step in counts if wanted is None or step.given == tuple(wanted)]
        if own:
            return own[-1].location
    return None


def _cutting(subject: Subject, before: int, left: int) -> Location | None:
    """The line that cuts all positions to `left` of them."""
    for step in _steps(subject, before):
        if step.name in ("getitem", "narrow") and step.taken and len(step.taken[0]) == len(step.given):
            changed = [pair for pair in zip(step.taken[0], step.given, strict=True) if pair[0] != pair[1]]
            if changed == [(before + 1, left)]:
                return step.location
    return None


def _line_of(subject: Subject, side: str) -> Location | None:
    """The line that keeps keys (the first that writes or joins) or values (the second)."""
    steps = _steps(subject)
    for names in (_WRITTEN, _JOINED):
        lines = list(dict.fromkeys(step.location for step in steps if step.name in names))
        if lines:
            return lines[1 if side == "value" and len(lines) > 1 else 0]
    return None


# --- longer sequences, and a second one


def _past_capacity(subject: Subject) -> Iterator[Finding]:
    """Findings about lengths at which a window or a preallocated cache is full."""
    length = _full_at(subject)
    if length <= _LENGTH:
        return
    way = _SequenceSplit("one position at a time", (1,) * length)
    try:
        difference = _compared(subject, way)
    except TargetError as error:
        longest = subject.reading.max_length
        if longest is not None and length > longest:
            return
        yield _note(
            f"Given one position at a time, {length} positions are more than it takes: {error.error}.",
            "Longer texts cannot be generated.",
            "",
            {"length": length},
            error.location,
        )
        return
    if difference is not None:
        yield from _explanation(subject, difference)


def _full_at(subject: Subject) -> int:
    """A length that exceeds every known window and capacity."""
    decoder = CachedDecoder(subject.fresh())
    in_pieces(decoder, _inputs(subject, 2), (1, 1))
    held = capacity(decoder.kept())
    sizes = [19, held + 3 if held < _MOST - 3 else 0, 2 * (subject.promise.window or 0) + 3]
    return min(max(sizes), _MOST, subject.reading.max_length or _MOST)


def _second_sequence(subject: Subject) -> Iterator[Finding]:
    """Findings about a second sequence, after the cache was reset."""
    copy = subject.fresh()
    decoder = CachedDecoder(copy)
    way = _SequenceSplit("one position at a time", (1,) * 5)
    in_pieces(decoder, _inputs(subject, 5, seed=3), way.sizes)
    if not decoder.can_reset:
        yield _warning(
            "What it keeps inside cannot be emptied: no method for it is known.",
            "A second sequence continues the first.",
            "def reset(self): self.cache = None",
            {},
            _storing_line(subject),
        )
        return
    decoder.reset()
    where = not_emptied_line(subject, copy) or _line(subject, _WRITTEN, _JOINED)
    inputs = _inputs(subject, 5)
    expected = _at_once(subject, inputs)
    try:
        got = in_pieces(decoder, inputs, way.sizes)
    except TargetError as error:
        raised = _raises(way, error)
        yield replace(
            raised, message=f"{raised.message} {_SECOND[0].upper()}{_SECOND[1:]}.", fix=_BEGIN, location=where
        )
        return
    difference = _difference(subject, inputs, expected, got, way)
    if difference is not None:
        yield _finding(subject, difference, _SECOND, _BEGIN, {"second": True}, _NAME, where)


_SECOND = "this is a second sequence, begun with an empty cache, and what was kept of the first one is still there"
_BEGIN = (
    "Begin with a new cache: no list as a default argument or class attribute; in reset(), empty keys, values "
    "and the position."
)


CHECK = Check(
    _NAME,
    _NAME,
    "Decoding step by step gives the same outputs as the whole sequence.",
    "The same sequence is given one position at a time, in threes, and after a prefill, past every window, and again "
    "after another sequence; outputs are compared in float64.",
    "Training uses whole sequences and generation uses steps: if they differ, "
    "the model in use is not the one that was trained.",
    _run,
    follows_from=("causal-leak", "causal-blindness", "mixing"),
)

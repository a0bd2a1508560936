"""Keys that a causal mask or a window hides from a query although it should attend to them.

Shape legend: B batch, H heads, L length.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from ..findings._finding import Finding, Inapplicable, Location, Severity
from ..findings._words import TRIANGLE
from ..subject import _influence as influence
from ..subject._check import Check
from ..subject._source import parsed_by
from ..subject._subject import Subject
from ..tracing._visible import masking_line, one_sequence, self_attentions, shaping_line, steps_of

_BATCH = 2
_LENGTHS = (2, 3, 6, 7, 17, 33)
_BY_OUTPUTS = 7  # the longest that is tried pair by pair where no weights could be seen
_NAMES = ("window", "window_size", "sliding_window", "local_window", "attention_window", "local_attention_window")
_WORDS = ("window", "sliding", "local", "band", "sparse", "dilat", "stride", "span", "lookback")
_EFFECT = "The model never uses the content of these positions; the loss still falls, but less far."
_LONGER = (
    "It attends to more than intended: memory and time grow, and a cache of the window's size gives different outputs."
)
_TRIANGLE = f"mask = {TRIANGLE}  # the diagonal, a token's own position, included"


@dataclass(frozen=True, eq=False)
class _HeadVisibility:
    """Keys that the queries of one head attend to, at one length."""

    length: int
    sees: Tensor  # (L, L)
    own: bool  # whether the diagonal is known
    head: int | None = None
    heads: int = 1
    line: Location | None = None

    @property
    def lower(self) -> Tensor:
        """(L, L), the lower triangle; an unknown diagonal counts as seen."""
        known = self.sees if self.own else self.sees | torch.eye(self.length, dtype=torch.bool)
        return known.tril()

    @property
    def is_full(self) -> bool:
        return self.lower.equal(torch.ones(self.length, self.length, dtype=torch.bool).tril())

    @property
    def reach(self) -> int:
        """The largest distance back that its queries see."""
        return max(self.distances() or [0])

    def distances(self) -> list[int] | None:
        """The distances back that queries see, if all queries see the same: [0, 1, 2] in a window of two before."""
        lower = self.lower
        visible = [bool(lower.diagonal(-back).any()) for back in range(self.length)]
        alike = all(bool(lower.diagonal(-back).all()) == visible[back] for back in range(self.length))
        return [back for back, sees in enumerate(visible) if sees] if alike else None


def _run(subject: Subject) -> Iterator[Finding]:
    subjects = subject.with_and_without_flag()
    reasons = []
    for called in subjects:
        try:
            yield from _findings_of(called)
        except Inapplicable as reason:
            reasons.append(str(reason))
    if len(reasons) == len(subjects):
        raise Inapplicable(reasons[-1])


def _findings_of(subject: Subject) -> Iterator[Finding]:
    views = _visibility(subject)
    if not any(influence.off_diagonal(view.sees).any() for view in views):
        raise Inapplicable("no output depends on another position's input")
    longer = [view for view in views if view.length > _BATCH]  # as many as items, and they are taken for positions
    if longer and all(view.distances() == [0] for view in longer) and _items_mix(subject):
        raise Inapplicable("no output depends on another position's input, but on other batch items, see mixing")
    if influence.is_causal(subject):
        yield from _causal(subject, views)
    else:
        yield from _bidirectional(subject, views)


def _items_mix(subject: Subject) -> bool:
    """Whether a batch item changes the output of another."""
    inputs = subject.one_sequence(subject.inputs(_BATCH, 3))
    called = influence.steady(subject, inputs)
    other = called(inputs.changed(range(3), item=0))
    return bool((influence.difference(called(inputs), other)[1:] > called.noise).any())


def _visibility(subject: Subject) -> list[_HeadVisibility]:
    windows = {subject.promise.window} - {None} or subject.reading.windows
    lengths = {*_LENGTHS, *(window + 3 for window in windows if window is not None and window <= 200)}
    by_length = influence.at_lengths(
        subject, lengths, lambda length: _seen_inside(subject, length) or _seen_outside(subject, length) or None
    )
    return [view for each in by_length.values() for view in each]


def _seen_inside(subject: Subject, length: int) -> list[_HeadVisibility]:
    """Visibility by attention weights: exact, the diagonal included."""
    inputs = one_sequence(subject, _BATCH, length)
    views = []
    for attention in self_attentions(subject, inputs):
        attends = (attention.attends & ~attention.traced.weights.isnan()).cpu()
        line = attention.traced.line("mask")
        for head in range(attends.shape[1]):
            # an item that sees less than another is told as what it sees
            views.append(_HeadVisibility(length, attends[:, head].all(0), True, head, attends.shape[1], line))
    return views


def _seen_outside(subject: Subject, length: int) -> list[_HeadVisibility]:
    """Visibility by changed inputs. If one input gives queries, keys and values, the diagonal is unknown."""
    if length > _BY_OUTPUTS and subject.form != "attention":
        return []
    sizes = influence.dependence(subject, length, _BATCH).cpu() > 0
    own = subject.form in ("attention", "qkv")
    heads = sizes.shape[1]
    return [
        _HeadVisibility(length, sizes[:, head].all(0), own, head if heads > 1 else None, heads) for head in range(heads)
    ]


def _causal(subject: Subject, views: Sequence[_HeadVisibility]) -> Iterator[Finding]:
    inputs = one_sequence(subject, _BATCH, max(view.length for view in views))
    steps = steps_of(subject, inputs)
    line = next((view.line for view in views if view.line is not None), None) or masking_line(steps, inputs)
    made = shaping_line(steps, inputs) or line
    strict = [view for view in views if view.length > 1 and not view.lower.diagonal()[1:].any()]
    if strict:
        everywhere = len({view.head for view in strict}) == strict[0].heads
        yield _without_own(strict, views, made if everywhere else line)
        return
    odd = [view for view in views if view.distances() is None or _skips_neighbour(view)]
    if odd:
        yield _irregular(odd, views, made)
        return
    yield from _windowed(subject, views, made)


def _without_own(strict: Sequence[_HeadVisibility], views: Sequence[_HeadVisibility], line: Location | None) -> Finding:
    view = max(strict, key=lambda view: (view.length <= 7, view.length))
    row = view.length - 1
    alone = not bool(view.lower[0].any())
    first = " Output 0 then sees nothing, which gives NaN or an average over all positions." if alone else ""
    return _finding(
        "error",
        f"Output {row} gives weight exactly 0 to input {row}, its own position{_where(view, strict, views)}, as every "
        f"output after the first: the triangle of the mask leaves out its diagonal.{first}",
        _TRIANGLE + '; scores.masked_fill(~mask, float("-inf"))',
        view,
        line,
    )


def _skips_neighbour(visibility: _HeadVisibility) -> bool:
    back = visibility.distances() or []
    return len(back) > 1 and 1 not in back


def _irregular(odd: Sequence[_HeadVisibility], views: Sequence[_HeadVisibility], line: Location | None) -> Finding:
    """A pattern that is not the same for each query."""
    view = min(odd, key=lambda view: view.length)
    lower = view.lower
    missing = (~lower & torch.ones_like(lower).tril()).nonzero().tolist()
    near = all(bool(view.lower.diagonal().all()) and bool(view.lower.diagonal(-1).all()) for view in odd)
    if near and _is_fixed(views):
        return _finding(
            "warning",
            f"Outputs see only some of the inputs before them{_where(view, odd, views)}: output {missing[-1][0]} does "
            f"not see input {missing[-1][1]}. It is the same at every length and looks like a sparse pattern.",
            "If this is not intended: " + _TRIANGLE,
            view,
            line,
        )
    rows = sorted({row for row, _ in missing})
    row, column = missing[-1] if len(rows) > 1 else missing[0]
    own = ", its own position" if row == column else ", which comes before"
    clean = sorted({view.length for view in views if view.is_full} - {view.length for view in odd})
    lengths = f" At length {', '.join(map(str, clean))} it sees everything." if clean else ""
    return _finding(
        "error",
        f"Output {row} does not see input {column}{own}{_where(view, odd, views)}; so it is for {len(missing)} pairs "
        f"at length {view.length}.{lengths} The mask looks as if it was built for another length or shape.",
        _TRIANGLE + "  # with L the length of this call",
        view,
        line,
    )


def _is_fixed(views: Sequence[_HeadVisibility]) -> bool:
    """Whether visibility at a short length equals the corner of visibility at a longer one."""
    heads: dict[int | None, list[_HeadVisibility]] = {}
    for view in views:
        heads.setdefault(view.head, []).append(view)
    return all(
        any(
            long.lower[: short.length, : short.length].equal(short.lower)
            for short in group
            if short.length < long.length
        )
        for group in heads.values()
        for long in group
        if long.length > min(view.length for view in group)
    )


def _windowed(subject: Subject, views: Sequence[_HeadVisibility], line: Location | None) -> Iterator[Finding]:
    promised, configured = subject.promise.window, subject.reading.windows
    longest = max(view.length for view in views)
    long = [view for view in views if view.length == longest]
    widths = sorted({view.reach for view in long})
    if promised is not None and longest >= promised + 2:
        wrong = [view for view in long if view.reach != promised]
        if wrong:
            yield _window_error(wrong[0], wrong[0].reach, promised, "its author promises", wrong, views, line)
        return
    if promised is None and configured != {None}:
        yield from _not_configured(configured, long, line)
        return
    full = all(view.is_full for view in views)
    named, value = _named_window(subject)
    if value is not None and not full and len(widths) == 1 and widths[0] not in (value, value - 1) and promised is None:
        view = next(view for view in views if view.length == longest)
        yield _window_error(view, widths[0], value, f"its {named} says", [view], [view], line)
    elif not full and promised is None:
        yield _window_found(views, longest, widths, line, value is not None or _mentions_window(subject))


def _not_configured(
    configured: Set[int | None], views: Sequence[_HeadVisibility], line: Location | None
) -> Iterator[Finding]:
    """Findings about windows of layers that the configuration lacks, and about configured windows that no layer has.
    The reach through several layers does not show the window of one layer."""
    own = [view for view in views if view.own]
    last = max((view.length for view in own), default=1) - 1
    windows = {last if window is None else min(window, last) for window in configured}
    wrong = [view for view in own if view.reach not in windows]
    lacking = windows - {view.reach for view in own}
    if wrong or (own and lacking):
        view = (wrong or own)[0]
        expected = min(lacking or windows, key=lambda window: abs(window - view.reach))
        yield _window_error(view, view.reach, expected, "its configuration asks for", [view], [view], line)


def _window_error(
    visibility: _HeadVisibility,
    reach: int,
    expected: int,
    by: str,
    among: Sequence[_HeadVisibility],
    views: Sequence[_HeadVisibility],
    line: Location | None,
) -> Finding:
    row = visibility.length - 1
    if reach > expected:
        pair = f"Output {row} sees input {row - reach}, {reach} before it"
    else:
        pair = f"Output {row} does not see input {row - reach - 1}, {reach + 1} before it"
    counted = " (Counted with its own position, this is the requested window.)" if reach == expected - 1 else ""
    return _finding(
        "error",
        f"{pair}{_where(visibility, among, views)}, where {by} a window of {expected} inputs before its own: it is "
        f"{'longer' if reach > expected else 'shorter'} by {abs(reach - expected)}.{counted}",
        f"mask = (i - j >= 0) & (i - j <= {expected})  # i = torch.arange(L)[:, None], j = torch.arange(L)",
        visibility,
        line,
        {"window": reach, "told": expected},
        _LONGER if reach > expected else _EFFECT,
    )


def _mentions_window(subject: Subject) -> bool:
    """Whether the source has a word for limited visibility, or cannot be read."""
    named = type(subject.target) if subject.module is not None else subject.target
    try:
        module = inspect.getmodule(named)
        text = parsed_by(inspect.getsource, module if module is not None else named)
    except (OSError, TypeError):
        return True
    return any(word in text.lower() for word in _WORDS)


def _window_found(
    views: Sequence[_HeadVisibility], longest: int, widths: Sequence[int], line: Location | None, meant: bool
) -> Finding:
    some = [view for view in views if view.length == longest and not view.is_full]
    view = some[0]
    distances = view.distances() or [0]
    gaps = [back for back in range(max(distances) + 1) if back not in distances]
    if gaps:
        return _finding(
            "warning",
            f"Outputs see inputs {', '.join(map(str, distances[:6]))}{', ...' if len(distances) > 6 else ''} before "
            f"their own and none between{_where(view, some, views)}: it looks like a dilated pattern.",
            "If this is not intended: " + _TRIANGLE,
            view,
            line,
        )
    width = max(distances)
    nobody = "" if meant else " Its source does not mention one: it may be a mask made for another length."
    return _finding(
        "warning" if meant else "error",
        f"Output {view.length - 1} does not see input {view.length - 2 - width}{_where(view, some, views)}: it looks "
        f"like a window of {width} inputs before its own ({width + 1} with it).{nobody}",
        f"If it is meant, promise it: Promise(window={width}); if not: {_TRIANGLE}",
        view,
        line,
        {"windows": list(widths)},
    )


def _bidirectional(subject: Subject, views: Sequence[_HeadVisibility]) -> Iterator[Finding]:
    promised = subject.promise.causal is False
    some = [view for view in views if view.length > 2]
    upper = [view for view in some if not influence.above_diagonal(view.sees).any()]
    if promised and upper:
        view = max(upper, key=lambda view: (view.length <= 7, view.length))
        yield _finding(
            "error",
            f"Output 0 does not see input {view.length - 1}, and no other output sees a later one"
            f"{_where(view, upper, some)}, although it is declared bidirectional.",
            "Leave out the causal mask (is_causal=False), or promise causal=True.",
            view,
            view.line,
        )
        return
    odd = [view for view in some if not (influence.off_diagonal(view.sees)).equal(influence.off_diagonal(view.sees).mT)]
    if odd and not upper:
        view = min(odd, key=lambda view: view.length)
        missing = (~view.sees).nonzero().tolist()
        row, column = missing[0]
        clean = sorted({view.length for view in some if bool(view.sees.all())} - {view.length for view in odd})
        lengths = f" At length {', '.join(map(str, clean))} every output sees every input." if clean else ""
        pattern = "It is neither causal nor does every output see every input"
        if not view.sees[:-1].tril().any():  # the last, with all scores alike, sees all, and with -inf nothing
            pattern = "All outputs but the last see only later inputs: its causal mask is inverted"
        yield _finding(
            "error",
            f"Output {row} does not see input {column}{_where(view, odd, some)}; so it is for "
            f"{len(missing)} {'pair' if len(missing) == 1 else 'pairs'} at length {view.length}.{lengths} {pattern}"
            + (": a mask made for one length is cut wrongly for others." if clean else "."),
            f"mask = {TRIANGLE}  # if it is to be causal, with L the length of this "
            "call; of a larger triangle mask[:L, :L]. If not, hide nothing.",
            view,
            view.line,
        )
        return
    yield from _band(subject, some)


def _band(subject: Subject, views: Sequence[_HeadVisibility]) -> Iterator[Finding]:
    """A window to both sides."""
    longest = max((view.length for view in views), default=0)
    for view in views:
        reach = max(view.distances() or [0])
        promised = subject.promise.window
        if view.length != longest or (promised is None and view.is_full):
            continue
        if promised is not None and longest >= promised + 2 and reach != promised:
            yield _window_error(view, reach, promised, "its author promises", [view], [view], view.line)
            return
        if promised is None and view.distances() is not None:
            yield _finding("note", f"It looks like a window of {reach} inputs to each side.", "", view, view.line)
            return


def _named_window(subject: Subject) -> tuple[str, int | None]:
    """A window that the target names itself: an attribute, of its configuration too, or a default."""
    for owner in (subject.target, getattr(subject.target, "config", None)):
        for name in _NAMES:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return f"`{name}`", value
    if subject.module is None:
        try:
            parameters = inspect.signature(subject.target).parameters
        except (TypeError, ValueError):
            return "", None
        for name in _NAMES:
            value = subject.reading.constants.get(name, parameters[name].default if name in parameters else None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return f"`{name}`", value
    return "", None


def _where(visibility: _HeadVisibility, among: Sequence[_HeadVisibility], views: Sequence[_HeadVisibility]) -> str:
    """Text in brackets: the length, and the heads unless all of them are meant."""
    heads = sorted({view.head for view in among if view.head is not None})
    every = {view.head for view in views if view.head is not None}
    if not heads or len(heads) == len(every):
        return f" (length {visibility.length})"
    return f" (head {', '.join(map(str, heads))} of {visibility.heads}, length {visibility.length})"


def _finding(
    severity: Severity,
    message: str,
    fix: str,
    visibility: _HeadVisibility,
    line: Location | None,
    more: dict[str, object] | None = None,
    effect: str = "",
) -> Finding:
    hidden = (~visibility.lower & torch.ones_like(visibility.lower).tril()).nonzero().tolist()
    evidence = {
        "length": visibility.length,
        "head": visibility.head,
        "hidden": hidden[:20],
        "how_many": len(hidden),
        **(more or {}),
    }
    effect = (effect or _EFFECT) if severity != "note" else ""
    return Finding("causal-blindness", "causal-blindness", severity, message, effect, fix, evidence, line)


CHECK = Check(
    "causal-blindness",
    "causal-blindness",
    "An output sees its own input and those before it, or its whole window",
    "The weights that multiply the values are read at lengths from 2 to 33 and compared "
    "with 0; if they cannot be observed, inputs are changed and outputs compared bit for bit",
    "The model cannot use positions that it does not see; there is no error, only worse results.",
    _run,
    follows_from=("causal-leak", "dropout"),
)

"""Whether an output depends on later inputs.

Shape legend: B batch, H heads (1 for modules), L length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...support._numbers import rounded
from ..findings._finding import Finding, Inapplicable, Location, Severity, TargetError
from ..findings._words import TRIANGLE
from ..subject import _influence as influence
from ..subject._check import Check
from ..subject._subject import Subject
from ..tracing._trace import TraceStep
from ..tracing._visible import (
    VisibleAttention,
    line_over_sequence,
    masking_line,
    one_sequence,
    self_attentions,
    steps_of,
)
from ._fills import weak_fill
from .mixing import _check as mixing

_error = partial(Finding, "causal-leak", "causal-leak", "error")

_BATCH = 2
_SHORT = (2, 3, 6, 7)  # even and odd; every pair of positions is tried
_LONG = (16, 17, 33, 65)  # around the sizes that hidden buffers have; tried by cuts
_LOUD = 8.0  # standard deviation of inputs whose logits reach some tens, as trained models' do
_SMALL = 1e-2  # of what an earlier input does


@dataclass(frozen=True, eq=False)
class _LeakSize:
    """Changes of outputs caused by later inputs, at one length and by one method."""

    length: int
    sizes: Tensor  # (B, H, L, L), 0 but where output i changes with a later input j
    way: str = ""  # "", "train mode", "gradient", "large inputs"

    def worst(self) -> tuple[int, int, int, int, float]:
        """item, head, output, input and size."""
        at = int(self.sizes.argmax())
        item, head, row, column = (int(index) for index in torch.unravel_index(torch.tensor(at), self.sizes.shape))
        return item, head, row, column, float(self.sizes.flatten()[at])


@dataclass(frozen=True)
class _LeakCause:
    words: str
    fix: str
    location: Location | None = None
    severity: Severity = "error"


def _run(subject: Subject) -> Iterator[Finding]:
    subjects = subject.with_and_without_flag()[1 if subject.promise.causal is False else 0 :]
    if not subjects:
        raise Inapplicable("it is declared bidirectional")
    kinds: list[bool] = []
    reported: list[Finding] = []
    for called in subjects:
        causal, findings = _leaks_of(called)
        kinds.append(causal)
        # a flag that is True by itself gives the same once more
        new = [finding for finding in findings if all(finding.evidence != other.evidence for other in reported)]
        reported += new
        yield from new
    if not any(kinds):
        raise Inapplicable("it is bidirectional: every output depends on every input, and it is not declared causal")


def _leaks_of(subject: Subject) -> tuple[bool, list[Finding]]:
    """Whether the target is or should be causal, and findings about its leaks."""
    # (B, H, L, L) how much each output changes with each input
    whole = influence.at_lengths(subject, _SHORT, lambda length: influence.dependence(subject, length, _BATCH))
    if subject.promise.causal is None and (
        not _hides_later(list(whole.values())) or _hides_nothing(subject, max(whole))
    ):
        findings = _between_inside(subject)
        return bool(findings), findings
    leaks = [_LeakSize(length, influence.above_diagonal(sizes)) for length, sizes in whole.items()]
    leaks += [*_by_cuts(subject), *_in_other_modes(subject, max(whole))]
    leaks = [leak for leak in leaks if leak.sizes.any()]
    if leaks:
        return True, [_finding(subject, leaks, whole)]
    inside = self_attentions(subject, one_sequence(subject, _BATCH, max(whole)))
    return True, weak_fill("causal-leak", (attention.traced for attention in inside))


def _by_cuts(subject: Subject) -> Iterator[_LeakSize]:
    """For long inputs: change everything after a position at once."""
    for length in _lengths(subject, _LONG):
        cuts = sorted({0, length // 2 - 1, length // 2, 14, 15, 31, length - 2} & set(range(length - 1)))
        try:
            yield _cut(subject, length, cuts)
        except TargetError:
            continue  # what lengths it takes is another promise


def _in_other_modes(subject: Subject, length: int) -> Iterator[_LeakSize]:
    """Leaks with large inputs, in train mode and in gradients."""
    cuts = range(length - 1)
    yield _cut(subject, length, cuts, "large inputs", _LOUD)
    if subject.module is not None:
        trained = subject.fresh()
        with trained.training():
            yield _cut(trained, length, cuts, "train mode")
    if subject.form != "tokens":
        yield _by_gradient(subject, length)


def _cut(subject: Subject, length: int, cuts: Sequence[int], way: str = "", spread: float = 1.0) -> _LeakSize:
    # of large inputs more items: whether one finds a row of low logits is chance
    batch = _BATCH if spread == 1 else 4 * _BATCH
    inputs = subject.one_sequence(subject.inputs(batch, length, spread=spread))
    called = influence.steady(subject, inputs)
    side = "query" if subject.form == "cross" else "both"
    sizes: Tensor | None = None
    for cut in cuts:
        changes = influence.later(called, inputs, cut, side)  # type: ignore[arg-type]
        if sizes is None:
            sizes = changes.new_zeros(*changes.shape[:2], length, length)
        # booked under the first input that was changed
        sizes[:, :, : cut + 1, cut + 1] = torch.maximum(sizes[:, :, : cut + 1, cut + 1], changes)
    assert sizes is not None
    return _LeakSize(length, sizes, way)


def _by_gradient(subject: Subject, length: int) -> _LeakSize:
    inputs = subject.one_sequence(subject.inputs(_BATCH, length))
    side = "query" if subject.form == "cross" else "both"
    sizes = torch.zeros(_BATCH, 1, length, length, dtype=torch.float64)
    try:
        for row in range(length):
            sizes[:, 0, row] = influence.gradients(subject, inputs, row, side)  # type: ignore[arg-type]
    except RuntimeError:  # no gradient at all, which is another promise
        pass
    return _LeakSize(length, influence.above_diagonal(sizes), "gradient")


def _lengths(subject: Subject, wanted: Sequence[int]) -> list[int]:
    most, only = subject.reading.max_length, subject.reading.only_length
    return [only] if only is not None else [length for length in wanted if most is None or length <= most]


def _hides_later(whole: Sequence[Tensor]) -> bool:
    """Whether the target is causal, or mostly so, in some item and head at some length. Patterns that are the same in
    both directions (a window, dilation, global tokens) are not."""
    long = [sizes for sizes in whole if sizes.shape[-1] > 3] or whole  # of two or three positions half is nearly all
    each = [head[None, None] for sizes in long for head in sizes.flatten(0, 1)]
    some = [head for head in each if not bool(((head > 0) == (head > 0).mT).all())]
    return any(
        influence.direction_of(head) == "causal"
        or influence.hides_most(head)
        or not bool(influence.above_diagonal(head.mT).any())  # inverted: later inputs are seen and no earlier ones
        for head in some
    )


def _hides_nothing(subject: Subject, length: int) -> bool:
    """Whether no attention inside hides a key. A weight near 0 because of large logits does not count as hidden."""
    inside = self_attentions(subject, one_sequence(subject, _BATCH, length))
    return bool(inside) and all(bool(attention.attends.all()) for attention in inside)


def _between_inside(subject: Subject) -> list[Finding]:
    """Findings about targets of which only some heads are causal, and about masks that do not hide scores."""
    length = max(_lengths(subject, _SHORT))
    inputs = one_sequence(subject, _BATCH, length)
    for attention in self_attentions(subject, inputs):
        upper = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden = ~attention.attends[..., upper].any(-1)  # (B, H): nothing later is seen
        if hidden.any() and not hidden.all():
            return [_partly_causal(subject, attention, hidden, inputs)]
        cause = _added_mask(attention) or _filled_scores(attention)
        if cause is None and not influence.above_diagonal(attention.attends).any():
            cause = _zeroed_after([attention])
        if cause is not None and attention.traced.normalised in ("key", "unknown", "none"):
            leak = _LeakSize(length, influence.above_diagonal(influence.dependence(subject, length)))
            if not leak.sizes.any():  # too faint for the dtype of the output
                leak = _LeakSize(length, influence.above_diagonal(attention.weights), "weight")
            return [_described(subject, leak, cause)]
    return []


def _partly_causal(subject: Subject, visible: VisibleAttention, hidden: Tensor, inputs: object) -> Finding:
    leaky = sorted({int(head) for _, head in (~hidden).nonzero()})
    items = sorted({int(item) for item, _ in (~hidden).nonzero()})
    by_head = bool((hidden == hidden[:1]).all())
    which = f"head {_listed(leaky)} of {hidden.shape[1]}" if by_head else f"batch item {_listed(items)}"
    upper = influence.above_diagonal(visible.weights) * ~hidden[..., None, None]
    item, head, row, column, size = _LeakSize(inputs.length, upper).worst()  # type: ignore[attr-defined]
    return _error(
        f"It is causal in part: {which} gives weight to later inputs (output {row} gives {size:.3g} to input {column}, "
        f"head {head}, batch item {item}); the others give them exactly 0.",
        _EFFECT,
        "Make the same mask reach every head and item: " + _FIX,
        {"heads": leaky, "items": items, "pair": [row, column], "weight": rounded(size)},
        visible.traced.line("mask", "scores", "softmax"),
    )


_EFFECT = (
    "In training the model reads the answer in its input: the loss looks "
    "good, but generation, where later tokens do not exist yet, is bad."
)
_FIX = f'scores = scores.masked_fill(~{TRIANGLE}, float("-inf"))  # before the softmax'
_FUSED = "F.scaled_dot_product_attention(query, key, value, is_causal=True)"


def _finding(subject: Subject, leaks: Sequence[_LeakSize], whole: dict[int, Tensor]) -> Finding:
    plain = [leak for leak in leaks if not leak.way]
    leak = max(plain or leaks, key=lambda size: size.length if size.length in _SHORT else -size.length)
    if leak.length in _LONG[:3] and not leak.way:  # every pair, where only cuts were tried
        whole = {**whole, leak.length: influence.dependence(subject, leak.length, _BATCH)}
        leak = _LeakSize(leak.length, influence.above_diagonal(whole[leak.length]))
    cause = _cause(subject, leak, plain, whole)
    return _described(subject, leak, cause, leaks)


def _described(subject: Subject, leak: _LeakSize, cause: _LeakCause, leaks: Sequence[_LeakSize] = ()) -> Finding:
    item, head, row, column, size = leak.worst()
    where = [f"head {head}"] if leak.sizes.shape[1] > 1 else []
    where += [f"batch item {item}", f"length {leak.length}"]
    verb = {"gradient": "has a gradient of", "weight": "gives a weight of"}.get(leak.way, "changes by")
    quiet = leak.way in ("gradient", "weight")
    message = (
        f"Output {row} {verb} {size:.3g} {'to' if quiet else 'when'} input {column}, which comes "
        f"later{'' if quiet else ', changes'} ({', '.join(where)}). {cause.words}"
    )
    if subject.flagged:
        message = f"With {subject.reading.causal_flag}=True: " + message
    pairs = (leak.sizes > 0).flatten(0, 1).any(0).nonzero().tolist()
    evidence = {
        "pairs": pairs[:20],
        "how_many": len(pairs),
        "largest": rounded(size),
        "length": leak.length,
        "lengths": sorted({each.length for each in leaks} | {leak.length}),
        "ways": sorted({each.way or "perturbation" for each in leaks} or {leak.way or "perturbation"}),
    }
    return Finding("causal-leak", "causal-leak", cause.severity, message, _EFFECT, cause.fix, evidence, cause.location)


def _cause(subject: Subject, leak: _LeakSize, plain: Sequence[_LeakSize], whole: dict[int, Tensor]) -> _LeakCause:
    """The probable cause of a leak, with the fix and its line."""
    inputs = one_sequence(subject, _BATCH, leak.length)
    steps = steps_of(subject, inputs)
    line = masking_line(steps, inputs)
    faint = "masked scores are set to a number that is too small to hide them."
    if leak.way == "train mode":
        return _LeakCause("Only in train mode.", "Apply the mask in both modes.", line)
    if leak.way == "gradient" and leak.worst()[-1] < 1e-6:
        return _LeakCause(f"The weight is not exactly 0: {faint}", _FIX, line)
    if leak.way == "gradient":
        return _LeakCause("Only through the gradient: the value does not change.", "Hide the scores: " + _FIX, line)
    if leak.way == "large inputs":
        return _LeakCause(f"Only where logits are large: {faint}", _FIX, line)
    inside = self_attentions(subject, inputs)
    known = _other_cause(plain, inside, line) or next(
        (cause for attention in inside if (cause := _filled_scores(attention))), None
    )
    if known is None and inside and not any(influence.above_diagonal(attention.attends).any() for attention in inside):
        known = _zeroed_after(inside) or _around_attention(subject, steps, leak.length)
    if known is not None:
        return known
    words = _pattern(leak, plain, whole, inside)
    if "triangle" in words:
        line = masking_line(steps, inputs, shape_first=True)
    scores = next((attention.traced.line("scores") for attention in inside), None)
    fused = any(step.name == "scaled_dot_product_attention" for step in steps)
    return _LeakCause(words, _FUSED if fused else _FIX, line or scores)


def _other_cause(
    plain: Sequence[_LeakSize], inside: Sequence[VisibleAttention], line: Location | None
) -> _LeakCause | None:
    """A cause that another check reports."""
    for attention in inside:
        axis = attention.traced.normalised
        if axis in ("query", "head", "batch"):
            return _LeakCause(
                f"The softmax runs over the {axis} axis, so that what comes later changes its sums.",
                "weights = scores.softmax(dim=-1)",
                attention.traced.line("softmax"),
                "note",
            )
        strict = ~attention.attends.diagonal(dim1=-2, dim2=-1)[..., 1:].any(-1)
        if strict.any() and all(not bool(each.sizes[..., 1:, :].any()) for each in plain):
            return _LeakCause(
                "Output 0 may not even see itself, and then averages over everything.",
                f"mask = {TRIANGLE}  # the diagonal included",
                line,
                "note",
            )
    return None


def _added_mask(visible: VisibleAttention) -> _LeakCause | None:
    """A triangle of zeros and ones that is added to scores, as a boolean mask that was cast."""
    line = visible.traced.line("triangle")
    words = "A causal mask of zeros and ones is added to the scores: it changes weights by e at most, and hides none."
    return None if line is None else _LeakCause(words, _FIX, line)


def _filled_scores(visible: VisibleAttention) -> _LeakCause | None:
    """Later scores that are all the same number: they were filled, with a number that does not hide them."""
    weights, length = visible.weights, visible.weights.shape[-1]
    rows = [weights[..., row, row + 1 :] for row in range(length - 2)]
    even = all(
        bool((row.amax(-1) - row.amin(-1) <= 1e-5 * row.amax(-1)).all()) and bool((row > 0).all()) for row in rows
    )
    varied = bool((weights[..., -1, :].amax(-1) > 1.001 * weights[..., -1, :].amin(-1)).all())
    if length < 4 or not (even and varied):
        return None
    fill = None if visible.traced.logits is None else float(visible.traced.logits[..., 0, -1].flatten()[0])
    number = "a number" if fill is None else f"{fill:.3g}"
    zero = " exp(0) is 1, not 0." if fill == 0 else ""
    return _LeakCause(
        f"All later scores are {number} instead of -inf before the softmax, so they keep weight.{zero}",
        _FIX,
        visible.traced.line("mask", "scores", "softmax"),
    )


def _zeroed_after(inside: Sequence[VisibleAttention]) -> _LeakCause | None:
    """Later weights are 0, and rows do not sum to 1: the sum of the softmax has counted them."""
    for attention in inside:
        if bool((attention.weights.sum(-1)[..., :-1] < 0.999).all()):
            return _LeakCause(
                "Later weights are set to 0 after the softmax, whose sum has counted them: rows no longer sum to 1.",
                _FIX,
                attention.traced.line("mask", "softmax"),
            )
    return None


def _around_attention(subject: Subject, steps: Sequence[TraceStep], length: int) -> _LeakCause:
    """The cause of a leak if the attention itself is causal: something around it joins positions."""
    words = "The weights of later inputs are exactly 0: the leak is not in the attention, but "
    if any(finding.severity == "error" for finding in mixing.CHECK.run(subject.fresh())):
        return _LeakCause(
            words + "what is done with its output. Probably follows from mixing.",
            "out = out.transpose(1, 2).reshape(B, L, H * D)",
            severity="note",
        )
    return _LeakCause(
        words + "something around it that joins positions, as a mean, a normalisation or a convolution over the "
        "sequence does.",
        "Take means, deviations and normalisations only over the last axis: nn.LayerNorm(embed_dim); pad "
        " convolutions only on the left: F.pad(x, (kernel_size - 1, 0))",
        line_over_sequence(steps, length),
    )


def _pattern(
    leak: _LeakSize, plain: Sequence[_LeakSize], whole: dict[int, Tensor], inside: Sequence[VisibleAttention]
) -> str:
    """Which outputs, heads, items and lengths, in a sentence or two."""
    visible = leak.sizes > 0
    union = visible.flatten(0, 1).any(0)
    depends = influence.off_diagonal(whole[leak.length] > 0).flatten(0, 1).any(0) if leak.length in whole else union
    words = [_shape(union, depends), *_some_heads(visible, inside)]
    items = visible.any(-1).any(-1).any(1)
    if not items.all():
        words.append(f"Only batch item {_listed(items.nonzero().flatten().tolist())}.")
    clean = sorted(set(whole) - {leak_size.length for leak_size in plain} - {2})
    if clean:
        words.append(f"Not at length {_listed(clean)}.")
    return " ".join(words)


def _some_heads(visible: Tensor, inside: Sequence[VisibleAttention]) -> Iterator[str]:
    """The heads that leak, if others do not. The output of a module merges its heads, so they are read inside."""
    leaky = [(0, visible.any(-1).any(-1).any(0))] if visible.shape[1] > 1 else []
    if not leaky:
        leaky = [
            (attention.number, influence.above_diagonal(attention.attends).any(-1).any(-1).any(0))
            for attention in inside
        ]
    for number, heads in leaky:
        if heads.any() and not heads.all():
            layer = f" in attention {number + 1} of {len(leaky)}" if len(leaky) > 1 else ""
            yield f"Only head {_listed(heads.nonzero().flatten().tolist())} of {len(heads)}{layer}."


def _shape(union: Tensor, depends: Tensor) -> str:
    length = union.shape[-1]
    upper = torch.ones(length, length, dtype=torch.bool).triu(1)
    if union.equal(upper):
        if not depends.tril(-1).any():
            return "It sees only later inputs and no earlier ones: its causal mask is inverted."
        return "Every output depends on every later input: nothing hides them."
    for offset in range(1, length - 1):
        if union.equal(upper & upper.tril(offset)):
            far = "1 input" if offset == 1 else f"{offset} inputs"
            return f"Each output sees {far} too far: the triangle of the mask is off by {offset}."
    rows, columns = (union.any(axis).nonzero().flatten().tolist() for axis in (-1, -2))
    if len(columns) == 1:
        which = " (the last)" if columns[0] == length - 1 else ""
        return f"Only input {columns[0]}{which} is seen too early."
    return f"Only output{'s' * (len(rows) > 1)} {_listed(rows)} of {length} leak{'s' * (len(rows) == 1)}."


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers[:8]) + (", ..." if len(numbers) > 8 else "")


CHECK = Check(
    "causal-leak",
    "causal-leak",
    "In causal attention no output depends on an input that comes after it",
    "Inputs are replaced, one after the other and all after a cut, at lengths from 2 to 65, with every output compared "
    "bit for bit; then in train mode, with large inputs, and by gradients",
    _EFFECT,
    _run,
)

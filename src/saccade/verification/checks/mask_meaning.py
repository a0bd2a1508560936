"""Whether a mask hides the keys that it says, from the queries, heads and batch items that it says, and nothing else.

Shapes: B batch, H heads (1 for modules, whose heads are merged), Lq / Lk lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import _influence as influence
from .._finding import Check, Finding, Inapplicable, Location, TargetError
from .._inputs import Inputs, Side
from .._reading import MaskReading
from .._subject import Subject
from .._trace import SeenAttention, measured
from .._visible import masking_line, steps_of

_REPEATING = ("repeat", "repeat_interleave", "expand", "tile", "broadcast_to", "cat")
_BATCH, _QUERIES, _KEYS = 3, 5, 6
_EFFECT = "Attention looks at what was to be hidden, or away from what was to be seen; training goes on, only worse."
_MEND = 'scores = scores.masked_fill(~mask, float("-inf"))  # True = attend, before the softmax'
_SDPA = "F.scaled_dot_product_attention expects True = attend"


@dataclass(frozen=True, eq=False)
class _Probe:
    """One mask argument, given random masks: what each output then depends on."""

    subject: Subject  # with this argument as its only one
    mask: MaskReading
    inputs: Inputs
    given: Tensor  # (B or 1, H or 1, Lq or 1, Lk) True = attend, as it varies along the argument's axes
    own: Tensor  # (B, H', Lq, Lk) what outputs depend on without the mask; H' = 1 for modules
    seen: Tensor  # (B, H', Lq, Lk) and with it
    known: Tensor  # (Lq, Lk) pairs of which the dependence is known: not a position on itself, in one sequence
    weights: Tensor | None = None  # (B, H, Lq, Lk) where `seen` is read from them

    def expected(self, given: Tensor) -> Tensor:
        """What outputs depend on if the mask means `given`; over all heads of a module, as `seen`."""
        if self.seen.shape[1] == 1 and given.shape[1] > 1:
            given = given.any(1, keepdim=True)
        return given.expand(self.seen.shape) & self.own

    def fits(self, given: Tensor) -> bool:
        """Rows that `given` leaves nothing are undefined, and are not compared."""
        wanted = self.expected(given)
        full = wanted.any(-1, keepdim=True) & self.known
        return bool(((self.seen == wanted) | ~full).all()) and bool((wanted & full).any())


@dataclass(frozen=True)
class _Defect:
    words: str
    mend: str = _MEND
    severity: str = "error"


def _run(subject: Subject) -> Iterator[Finding]:
    masks = subject.reading.masks
    if not masks:
        raise Inapplicable("it takes no mask")
    reasons, told = [], set()
    # the axes that say most first: what is wrong with them is wrong with the others
    for mask in sorted(masks, key=lambda one: -len(set(one.axes) & set("BHQK"))):
        if mask.argument in told:
            continue
        alone = replace(subject, reading=replace(subject.reading, masks=(mask,)))
        try:
            for finding in _judged(alone, mask):
                key = (finding.severity, str(mask.argument) if finding.severity != "error" else finding.mend)
                if key not in told:
                    yield finding
                told |= {key, mask.argument if finding.severity == "error" else key}
        except Inapplicable as reason:
            reasons.append(str(reason))
    if not any(key for key in told):
        yield from _contradicting(masks)
    if len(reasons) == len(masks):
        raise Inapplicable(reasons[0])


def _judged(subject: Subject, mask: MaskReading) -> Iterator[Finding]:
    try:
        probe = _probe(subject, mask)
    except TargetError as error:
        other = _with_other_sizes(subject, mask)
        if other is None:
            defect = _Defect(f"a call with `{mask.argument}` of axes {mask.axes} raised {error.error}")
            yield _finding(subject, mask, defect, {"raised": error.error}, error.location)
            return
        probe = other
    if probe.fits(probe.given):
        yield from _alike_sizes(probe) or _conventions(probe)
    else:
        yield from _misfit(probe)


def _with_other_sizes(subject: Subject, mask: MaskReading) -> _Probe | None:
    """As many keys as queries, and as many items as heads: what is broadcast along the wrong axis raises otherwise."""
    heads = subject.reading.heads or 1
    for batch in (_BATCH, heads):
        try:
            probe = _probe(subject, mask, batch=batch, square=True)
        except TargetError:
            continue
        # that it takes as many keys as queries alone is its right; as many items as heads alone is none
        return probe if batch == _BATCH or not probe.fits(probe.given) else None
    return None


def _misfit(probe: _Probe) -> Iterator[Finding]:
    """The finding of a mask that is not kept."""
    subject, mask = probe.subject, probe.mask
    inner = _inside(probe)
    if inner is not None and inner.fits(probe.given) and _sums_to_one(inner):
        return  # the weights obey it: something around the attention joins positions, which other checks name
    useful = inner is not None and not inner.fits(probe.given) and not inner.fits(torch.ones_like(probe.given))
    defect = _named(inner if inner is not None and useful else probe)
    wrong = (probe.seen != probe.expected(probe.given)) & probe.known
    item, head, row, column = (int(one) for one in wrong.nonzero()[0])
    sees = bool(probe.seen[item, head, row, column])
    where = f"batch item {item}" + (f", head {head}" if probe.seen.shape[1] > 1 else "")
    example = (
        f"Under a random mask output {row} {'depends on input' if sees else 'does not see input'} {column}, which the "
        f"mask {'hides from' if sees else 'shows'} it ({where}). {defect.words}"
    )
    line = _line(probe, defect)
    yield _finding(subject, mask, replace(defect, words=example), {
        "pairs": [pair[2:] for pair in wrong.nonzero().tolist()[:20]], "how_many": int(wrong.sum()),
        "argument": mask.argument, "axes": mask.axes,
    }, line)  # fmt: skip


def _line(probe: _Probe, defect: _Defect) -> Location | None:
    """Where the mask is applied; where items or heads are mixed, where it is repeated."""
    steps = steps_of(probe.subject, probe.inputs, **_masks_of(probe.mask, probe.given, probe.inputs))
    if "repeat" in defect.mend:
        found = [one.location for one in steps if one.name in _REPEATING and one.location is not None]
        named = [one for one in found if str(probe.mask.argument) in one.code or "mask" in one.code]
        if named:
            return named[0]
    return masking_line(steps, probe.inputs)


def _inside(probe: _Probe) -> _Probe | None:
    """The same of the weights, by head, in the attention that the mask goes to."""
    seen = _weights(probe)
    if seen is None or seen[0].weights.shape[0] != probe.seen.shape[0]:
        return None
    before, after = (one.weights.cpu() for one in seen)
    own = (before != 0) & (probe.own | ~probe.known)
    return replace(probe, own=own, seen=after != 0, known=torch.ones_like(probe.known), weights=after)


def _sums_to_one(inner: _Probe) -> bool:
    assert inner.weights is not None
    rows = inner.expected(inner.given).any(-1)
    return bool((inner.weights.double().sum(-1)[rows] > 0.99).all())


def _probe(subject: Subject, mask: MaskReading, *, batch: int = _BATCH, seed: int = 0, square: bool = False) -> _Probe:
    inputs = _inputs(subject, batch, square)
    everything = torch.ones(inputs.length, inputs.key_length, dtype=torch.bool)
    one_input = subject.form in ("self", "tokens")
    known = ~torch.eye(inputs.length, dtype=torch.bool) if one_input else everything
    side = "both" if one_input else "key"
    steady = influence.steady(
        subject, inputs, **_masks_of(mask, _shaped(everything[None, None], mask, inputs, subject), inputs)
    )
    own = _without(steady, mask, inputs, side)  # type: ignore[arg-type]
    given = _random(subject, mask, inputs, own, seed)
    masks = _masks_of(mask, given, inputs)
    seen = influence.effects(steady, inputs, **masks, side=side) > 0  # type: ignore[arg-type]
    return _Probe(subject, mask, inputs, given, own.cpu(), seen.cpu(), known)


def _without(steady: influence.Steady, mask: MaskReading, inputs: Inputs, side: Side) -> Tensor:
    """(B, H', Lq, Lk) what outputs depend on under a mask that shows everything."""
    whole = torch.ones(1, 1, inputs.length, inputs.key_length, dtype=torch.bool)
    own = torch.zeros(())
    # where showing everything leaves nothing (NaN), the polarity is the other one
    for shown in (whole, ~whole):
        masks = _masks_of(mask, _shaped(shown, mask, inputs, steady.subject), inputs)
        own = influence.effects(steady, inputs, **masks, side=side) > 0
        if influence.off_diagonal(own).any():
            break
    return own


def _inputs(subject: Subject, batch: int, square: bool) -> Inputs:
    if subject.form in ("self", "tokens"):
        return subject.inputs(batch, _KEYS)
    if square or subject.is_causal or subject.reading.causal_flag is not None:
        return subject.one_sequence(subject.inputs(batch, _KEYS))
    try:
        inputs = subject.inputs(batch, _QUERIES, _KEYS)
        with torch.no_grad():
            subject(inputs)
    except TargetError:  # one sequence only
        return subject.one_sequence(subject.inputs(batch, _KEYS))
    return inputs


def _shaped(whole: Tensor, mask: MaskReading, inputs: Inputs, subject: Subject) -> Tensor:
    """Expanded along the argument's own axes."""
    sizes = {"B": inputs.batch, "H": subject.reading.heads or 1, "Q": inputs.length, "K": inputs.key_length}
    shape = [sizes[letter] if letter in mask.axes else 1 for letter in "BHQ"]
    return whole[:, :, :1].expand(*shape, -1) if "Q" not in mask.axes else whole.expand(*shape, -1)


def _random(subject: Subject, mask: MaskReading, inputs: Inputs, own: Tensor, seed: int) -> Tensor:
    """About half hidden. Each query keeps a key that it sees without the mask, and loses one where it can."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.ones(1, 1, inputs.length, inputs.key_length, dtype=torch.bool)
    shape = _shaped(whole, mask, inputs, subject).shape
    given = torch.rand(shape, generator=generator) < 0.5
    sees = own.flatten(0, 1).all(0)  # (Lq, Lk)
    if "Q" in mask.axes:
        for row in range(shape[2]):
            # the last key that it sees is its own where it is causal
            columns = sees[row].nonzero().flatten()
            given[:, :, row, int(columns[-1]) if len(columns) else 0] = True
            if len(columns) > 1:
                given[:, :, row, int(columns[row % (len(columns) - 1)])] = False
    else:
        for item in range(shape[0]):
            given[item, :, :, 0] = True  # what even the first of a causal sequence sees
            given[item, :, :, 1 + item % (shape[-1] - 1)] = False
            given[item, :, :, 1 + (item + 2) % (shape[-1] - 1)] = True
    return given


def _masks_of(mask: MaskReading, given: Tensor, inputs: Inputs) -> dict[str, Tensor]:
    """As a subject with this argument alone is given it."""
    if mask.by_pair:
        return {"pairs": given}
    return {"padding": given[:, 0, 0].expand(inputs.batch, -1)}


def _named(probe: _Probe) -> _Defect:
    """Which other mask would explain what is seen."""
    given, mask = probe.given, probe.mask
    if probe.fits(~given):
        return _inverted(mask)
    if probe.fits(torch.ones_like(given)):
        return _unhidden(probe)
    square = given.shape[-1] == given.shape[-2]
    if square and probe.fits(given.mT):
        return _Defect("The mask is applied transposed: its rows and columns, queries and keys, are swapped.",
                       "scores.masked_fill(~mask, ...) with scores of shape (B, H, Lq, Lk)")  # fmt: skip
    return _mixed(probe) or _Defect(
        f"What is seen fits no reading of `{mask.argument}`; it hides {int((probe.own & ~probe.seen).sum())} of the pairs "
        f"where the mask says {int((probe.own & ~probe.expected(given)).sum())}."
    )


def _inverted(mask: MaskReading) -> _Defect:
    said = f'its documentation ("{mask.words}")' if mask.words else "its promise"
    means = {"attend": "True = attend", "ignore": "True = ignore", "additive": "-inf = ignore"}[mask.meaning]
    mend = _MEND if mask.meaning == "attend" else 'scores = scores.masked_fill(mask, float("-inf"))  # True = ignore'
    return _Defect(f"The polarity is inverted: {said} says {means}, and it does the opposite.", mend)


def _mixed(probe: _Probe) -> _Defect | None:
    """Masks of one item or head applied to another."""
    given = probe.given
    for axis, what, mend in ((0, "batch item", "mask[:, None]"), (1, "head", "mask[:, None] of shape (B, 1, Lq, Lk)")):
        count = given.shape[axis]
        if count < 2:
            continue
        for one in range(count):
            if probe.fits(given.narrow(axis, one, 1).expand(given.shape)):
                return _Defect(
                    f"The mask of {what} {one} is applied to every {what}.", f"{mend}  # its own for each {what}"
                )
        for step in range(1, count):
            if probe.fits(given.roll(step, axis)):
                return _Defect(
                    f"The mask of another {what} is applied: {what} {step} has that of {what} 0.",
                    f"{mend}  # heads and items in the order of the scores",
                )  # fmt: skip
    heads, items = probe.seen.shape[1], given.shape[0]
    if given.shape[1] == 1 and items > 1 and heads > 1:
        order = torch.arange(items * heads)
        rows = given.expand(-1, heads, -1, -1).flatten(0, 1)
        tiled = given[:, 0][order % items].view(items, heads, *given.shape[2:])
        if probe.fits(tiled):
            return _Defect("Masks of items are repeated in the wrong order over the heads: (H, B) where the scores are (B, H).",
                           "mask.repeat_interleave(num_heads, dim=0)  # not mask.repeat(num_heads, 1, 1)")  # fmt: skip
        del rows
    return None


def _unhidden(probe: _Probe) -> _Defect:
    """Nothing is hidden: why."""
    if not probe.mask.by_pair and _hides_queries(probe):
        return _Defect("It is broadcast along the wrong axis: it hides queries where it should hide keys.",
                       "mask[:, None, None, :] against scores of shape (B, H, Lq, Lk)")  # fmt: skip
    seen = _weights(probe)
    if seen is not None:
        before, after = seen
        defect = _by_weights(before, after, probe.given)
        if defect is not None:
            return defect
    return _Defect("The mask hides nothing: it is not used." if not _counts(probe) else
                   "The mask changes the output and hides nothing: hidden keys keep a weight.")  # fmt: skip


def _counts(probe: _Probe) -> bool:
    """Whether the mask changes anything at all."""
    return bool(_change(probe).any())


def _change(probe: _Probe) -> Tensor:
    """(B, H', Lq) how much the mask changes each output."""
    called = influence.steady(probe.subject, probe.inputs)
    open_ = _masks_of(probe.mask, torch.ones_like(probe.given), probe.inputs)
    masks = _masks_of(probe.mask, probe.given, probe.inputs)
    sizes = influence.difference(called(probe.inputs, **open_), called(probe.inputs, **masks)).cpu()
    return sizes.masked_fill(sizes <= called.noise, 0.0)


def _hides_queries(probe: _Probe) -> bool:
    """Whether a mask of keys changes the outputs at the hidden positions, and those alone."""
    if probe.inputs.length != probe.inputs.key_length:
        return False
    rows = (_change(probe) > 0).any(1)
    return rows.equal(~probe.given[:, 0, 0].expand(rows.shape))


def _weights(probe: _Probe) -> tuple[SeenAttention, SeenAttention] | None:
    """The attention that the mask goes to, without and with it."""
    open_ = _masks_of(probe.mask, torch.ones_like(probe.given), probe.inputs)
    masks = _masks_of(probe.mask, probe.given, probe.inputs)
    try:
        with influence.seeded(), torch.no_grad():
            # on copies: what a target keeps of a call with gradients cannot be copied afterwards
            before = measured(probe.subject.fresh(), probe.inputs, **open_)
            after = measured(probe.subject.fresh(), probe.inputs, **masks)
    except (Inapplicable, TargetError):
        return None
    shape = (probe.inputs.length, probe.inputs.key_length)
    for one, other in zip(before, after, strict=False):
        if (
            one.weights.shape == other.weights.shape
            and one.weights.shape[-2:] == shape
            and not one.weights.equal(other.weights)
        ):
            return one, other
    return None


def _by_weights(before: SeenAttention, after: SeenAttention, given: Tensor) -> _Defect | None:
    first, second = before.weights.double(), after.weights.double()
    shown = given.to(first.device).expand(first.shape)
    if _close(second, first * shown):
        return _Defect(
            "Hidden weights are set to 0 after the softmax, whose sum has counted them: rows no longer sum to 1, and "
            "outputs still depend on what is hidden.",
        )  # fmt: skip
    hidden = second.masked_fill(shown, torch.nan)
    low, high = hidden.nan_to_num(torch.inf).amin(-1), hidden.nan_to_num(-torch.inf).amax(-1)
    several = (~shown).sum(-1) > 1
    if bool(((high - low).abs() <= 1e-5 * high.abs())[several].all()) and bool((high > 0)[several].all()):
        return _constant(after, shown)
    ratio = (second / first).masked_fill(shown, torch.nan)
    return _Defect(f"Hidden keys keep {float(ratio.nanmean()):.3g} of their weight: the number that is added to their "
                   "scores is too small to hide them.") if bool((ratio.nan_to_num(0.0) < 1).all()) else None  # fmt: skip


def _constant(after: SeenAttention, shown: Tensor) -> _Defect:
    if after.logits is None:
        zero = None
    else:
        zero = float(after.logits.double()[~shown.expand(after.logits.shape)].median())
    if zero is None or abs(zero) < 1e-6:
        return _Defect(
            "Hidden scores are 0 instead of -inf: the mask is multiplied into the scores, or they are filled with 0, and "
            "exp(0) is 1, so hidden keys keep their weight."
        )
    return _Defect(f"Hidden scores are set to {zero:.3g} instead of -inf, which is too small a number to hide them.")


def _close(one: Tensor, other: Tensor) -> bool:
    return bool(torch.isclose(one, other, rtol=1e-4, atol=1e-6).all())


def _alike_sizes(probe: _Probe) -> list[Finding]:
    """The same with as many items as heads, and as queries: a mask broadcast along the wrong axis passes otherwise."""
    if "B" not in probe.mask.axes:
        return []
    heads = probe.subject.reading.heads or 1
    for batch in sorted({heads, probe.inputs.length} - {1, probe.inputs.batch}):
        if batch > 8:
            continue
        try:
            other = _probe(probe.subject, probe.mask, batch=batch, seed=batch)
        except TargetError:
            continue
        if not other.fits(other.given):
            defect = _Defect(
                f"With as many batch items as {'heads' if batch == heads else 'queries'} ({batch}) what is seen is not "
                "what the mask shows: it is broadcast along the wrong axis.",
                "mask[:, None] makes (B, Lq, Lk) fit scores of shape (B, H, Lq, Lk)",
            )
            line = _line(other, defect)
            return [_finding(probe.subject, probe.mask, defect, {"batch": batch, "heads": heads}, line)]
    return []


def _conventions(probe: _Probe) -> Iterator[Finding]:
    mask = probe.mask
    name = str(mask.argument)
    if mask.meaning != "ignore" or mask.documented == "ignore" or probe.subject.promise.mask == "ignore":
        return
    if "padding" in name:
        words, severity = f"True in `{name}` means ignore, as in nn.MultiheadAttention; {_SDPA}.", "note"
    else:
        words = f"True in `{name}` means ignore, and nothing says so; {_SDPA}, and nn.MultiheadAttention True = ignore."
        severity = "warning"
    defect = _Defect(words, "Say it in the docstring, or take True = attend: " + _MEND, severity)
    yield _finding(probe.subject, mask, defect, {"argument": mask.argument, "meaning": "ignore"}, None)


def _contradicting(masks: tuple[MaskReading, ...]) -> Iterator[Finding]:
    """Two arguments of which one means attend and the other ignore."""
    plain = [mask for mask in masks if mask.meaning != "additive" and (mask.behaves or mask.meaning) == mask.meaning]
    kinds = {mask.meaning: mask for mask in reversed(plain)}
    if len(kinds) < 2:
        return
    attend, ignore = kinds["attend"], kinds["ignore"]
    said = all(mask.documented is not None for mask in (attend, ignore)) or "padding" in str(ignore.argument)
    yield Finding(
        "mask-meaning", "mask-meaning", "warning" if said else "error",
        f"True in `{attend.argument}` means attend, and True in `{ignore.argument}` means ignore.", _EFFECT,
        f"Let both mean the same: `{ignore.argument}` = ~{ignore.argument}", {"attend": attend.argument, "ignore": ignore.argument},
    )  # fmt: skip


def _finding(
    subject: Subject, mask: MaskReading, defect: _Defect, evidence: dict[str, object], line: Location | None
) -> Finding:
    words = defect.words[:1].upper() + defect.words[1:]
    return Finding(
        "mask-meaning", "mask-meaning", defect.severity, words,  # type: ignore[arg-type]
        _EFFECT if defect.severity == "error" else "Whoever passes the other one's mask hides what should be seen.",
        defect.mend, evidence, line,
    )  # fmt: skip


CHECK = Check(
    "mask-meaning", "mask-meaning",
    "A mask hides exactly the keys that it says, for each query, head and batch item",
    "Random masks, other ones for each query, head and batch item, are given; what outputs then depend on is compared "
    "with them pair by pair, and where it differs the weights say why",
    _EFFECT, _run, follows_from=("mixing",),
)  # fmt: skip

"""Whether a mask hides its keys from its queries, heads and batch items, and nothing else.

Shape legend: B batch, H heads (1 for modules, whose heads are merged), Lq / Lk lengths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ....support._numbers import rounded
from ...findings._finding import Finding, Inapplicable, Location, Severity, TargetError, Unmeasured
from ...subject import _influence as influence
from ...subject._check import Check
from ...subject._influence import is_causal
from ...subject._inputs import NamedInputs, Side
from ...subject._reading import MaskReading, Meaning
from ...subject._source import line_with
from ...subject._subject import Subject
from ...subject._words import no_mask
from ...tracing._mask_code import MaskCode
from ...tracing._visible import attentions_of
from .._fills import averages_all, averaging, weak_fill
from ._defects import (
    INVERTED,
    MaskArgumentProbe,
    MaskDefect,
    as_number,
    code_of,
    counted,
    inside,
    line_of,
    masks_of,
    named,
    sums_to_one,
    with_fix,
)

_BATCH, _QUERIES, _KEYS = 3, 5, 6
_EFFECT = (
    "Attention uses positions that should be hidden, or ignores visible ones; training continues, with worse results."
)
_TAKEN_FOR_ANOTHER = "Passing a mask made for another implementation gives a wrong result."
_SDPA = "F.scaled_dot_product_attention expects True = attend"


def _run(subject: Subject) -> Iterator[Finding]:
    parts = [subject] if subject.own_part is None else [subject, subject.own_part]
    masks = tuple(mask for part in parts for mask in part.reading.masks)
    if not masks:
        raise Inapplicable(no_mask(subject))
    reasons: list[str] = []
    reported: list[Finding] = []
    # the axes that say most first: what is wrong with them is wrong with the others
    asked = [(part, mask) for part in parts for mask in part.reading.masks]
    for part, mask in sorted(asked, key=lambda pair: -len(set(pair[1].axes) & set("BHQK"))):
        if any(
            finding.severity == "error" and finding.evidence.get("argument") == mask.argument for finding in reported
        ):
            continue
        alone = replace(part, reading=replace(part.reading, masks=(mask,)))
        try:
            new = [
                finding
                for finding in _findings_of(alone, mask)
                if not any(_are_alike(finding, other) for other in reported)
            ]
        except Inapplicable as reason:
            reasons.append(str(reason))
            continue
        reported += new
        yield from new
    if not any(finding.severity == "error" for finding in reported):
        yield from _contradicting(masks)
    if len(reasons) == len(masks):
        raise Inapplicable(reasons[0])


def _are_alike(finding: Finding, other: Finding) -> bool:
    """Whether two findings are of the same defect in two arguments, or of the same convention of one argument."""
    if finding.severity == other.severity == "error":
        return finding.fix == other.fix
    return finding.severity == other.severity and finding.message == other.message


def _findings_of(subject: Subject, mask: MaskReading) -> Iterator[Finding]:
    try:
        probe = _probe(subject, mask)
    except TargetError as error:
        other = _with_other_sizes(subject, mask)
        if other is None:
            words = f"a call with `{mask.argument}` of axes {mask.axes} raised {error.error}"
            defect = MaskDefect(words, MaskCode(mask).hiding)
            yield _finding(subject, mask, defect, {"raised": error.error}, error.location)
            return
        probe = other
    if probe.fits(probe.given):
        yield from _equal_sizes(probe) or [
            *_conventions(probe),
            *(_cast(probe) or _finite_values(probe)),
            *_fills(probe),
        ]
    else:
        yield from _not_obeyed(probe)


def _with_other_sizes(subject: Subject, mask: MaskReading) -> MaskArgumentProbe | None:
    """Inputs with other sizes: equal ones hide a mask that is broadcast along the wrong axis."""
    heads = subject.reading.heads or 1
    for batch in (_BATCH, heads):
        try:
            probe = _probe(subject, mask, batch=batch, square=True)
        except TargetError:
            continue
        # that it takes as many keys as queries alone is its right; as many items as heads alone is none
        return probe if batch == _BATCH or not probe.fits(probe.given) else None
    return None


def _not_obeyed(probe: MaskArgumentProbe) -> Iterator[Finding]:
    """The finding about a mask that is not obeyed."""
    subject, mask = probe.subject, probe.mask
    inner = inside(probe)
    if inner is not None and inner.fits(probe.given) and sums_to_one(inner):
        return  # the weights obey it: something around the attention joins positions, which other checks name
    useful = inner is not None and not inner.fits(probe.given) and not inner.fits(torch.ones_like(probe.given))
    defect = with_fix(probe, named(inner if inner is not None and useful else probe))
    if inner is not None and inner.normalised in ("query", "head", "batch"):
        words = f"The softmax runs over the {inner.normalised} axis, so that what is hidden changes its sums."
        defect = MaskDefect(words, "weights = scores.softmax(dim=-1)", "note")
    wrong = (probe.visible != probe.expected(probe.given)) & probe.known & probe.asked
    if not wrong.any():
        raise Unmeasured("no output depends on another position's input, so the effect of the mask cannot be measured")
    is_apart = inner is None or not sums_to_one(inner)
    if subject.form == "tokens" and is_apart and not (wrong & probe.visible).any():
        # through a window of its own a layer reaches a token by others, and these may be hidden
        raise Unmeasured("its weights were not traced, and a visible token may carry the content of a hidden token")
    item, head, row, column = (int(index) for index in wrong.nonzero()[0])
    sees = bool(probe.visible[item, head, row, column])
    where = f"batch item {item}" + (f", head {head}" if probe.visible.shape[1] > 1 else "")
    example = (
        f"Under a random mask output {row} {'depends on input' if sees else 'does not see input'} {column}, which the "
        f"mask {'hides from' if sees else 'shows'} it ({where}). {defect.words}"
    )
    pairs = [pair[2:] for pair in wrong.nonzero().tolist()]
    evidence: dict[str, object] = {"pairs": pairs[:20], "how_many": len(pairs), "argument": mask.argument}
    evidence |= {"axes": mask.axes, "hides_all": mask.required and defect.words.startswith(INVERTED)}
    yield _finding(subject, mask, replace(defect, words=example), evidence, line_of(probe, defect))


def _probe(
    subject: Subject, mask: MaskReading, *, batch: int = _BATCH, seed: int = 0, square: bool = False
) -> MaskArgumentProbe:
    inputs = _inputs(subject, batch, square)
    everything = torch.ones(inputs.length, inputs.key_length, dtype=torch.bool)
    one_input = subject.form in ("self", "tokens")
    known = ~torch.eye(inputs.length, dtype=torch.bool) if one_input else everything
    side = "both" if one_input else "key"
    steady = influence.steady(
        subject, inputs, **masks_of(mask, _expanded(everything[None, None], mask, inputs, subject), inputs)
    )
    own = _unmasked(steady, mask, inputs, side)  # type: ignore[arg-type]
    given = _random(subject, mask, inputs, own, seed)
    masks = masks_of(mask, given, inputs)
    visible = influence.effects(steady, inputs, **masks, side=side) > 0  # type: ignore[arg-type]
    return MaskArgumentProbe(subject, mask, inputs, given, own.cpu(), visible.cpu(), known)


def _unmasked(steady: influence.SteadySubject, mask: MaskReading, inputs: NamedInputs, side: Side) -> Tensor:
    """(B, H', Lq, Lk) which inputs outputs depend on under a mask that hides nothing."""
    whole = torch.ones(1, 1, inputs.length, inputs.key_length, dtype=torch.bool)
    own = torch.zeros(())
    # where showing everything leaves nothing (NaN), the polarity is the other one
    for shown in (whole, ~whole):
        masks = masks_of(mask, _expanded(shown, mask, inputs, steady.subject), inputs)
        own = influence.effects(steady, inputs, **masks, side=side) > 0
        if influence.off_diagonal(own).any():
            break
    return own


def _inputs(subject: Subject, batch: int, square: bool) -> NamedInputs:
    if subject.form in ("self", "tokens"):
        return subject.inputs(batch, _KEYS)
    if square or is_causal(subject) or subject.reading.causal_flag is not None:
        return subject.one_sequence(subject.inputs(batch, _KEYS))
    try:
        inputs = subject.inputs(batch, _QUERIES, _KEYS)
        with torch.no_grad():
            subject(inputs)
    except TargetError:  # one sequence only
        return subject.one_sequence(subject.inputs(batch, _KEYS))
    return inputs


def _expanded(whole: Tensor, mask: MaskReading, inputs: NamedInputs, subject: Subject) -> Tensor:
    """The mask expanded along the axes that the argument has."""
    sizes = {"B": inputs.batch, "H": subject.reading.heads or 1, "Q": inputs.length, "K": inputs.key_length}
    shape = [sizes[letter] if letter in mask.axes else 1 for letter in "BHQ"]
    return whole[:, :, :1].expand(*shape, -1) if "Q" not in mask.axes else whole.expand(*shape, -1)


def _random(subject: Subject, mask: MaskReading, inputs: NamedInputs, own: Tensor, seed: int) -> Tensor:
    """A random mask that hides about half of the pairs. Each query keeps a key that it sees without the mask, and loses
    one if it sees several."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.ones(1, 1, inputs.length, inputs.key_length, dtype=torch.bool)
    shape = _expanded(whole, mask, inputs, subject).shape
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


def _equal_sizes(probe: MaskArgumentProbe) -> list[Finding]:
    """The check with as many items as heads or queries: a mask broadcast along the wrong axis raises no error there."""
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
        inner = None if other.fits(other.given) else inside(other)
        if inner is not None and inner.fits(other.given) and sums_to_one(inner):
            continue  # the weights obey it: further layers join positions
        if not other.fits(other.given):
            defect = MaskDefect(
                f"With as many batch items as {'heads' if batch == heads else 'queries'} ({batch}) what is seen is not "
                "what the mask shows: it is broadcast along the wrong axis.",
                "mask[:, None] makes (B, Lq, Lk) fit scores of shape (B, H, Lq, Lk)",
            )
            evidence = {"argument": probe.mask.argument, "batch": batch, "heads": heads}
            return [_finding(probe.subject, probe.mask, defect, evidence, line_of(other, defect))]
    return []


def _conventions(probe: MaskArgumentProbe) -> Iterator[Finding]:
    """A note or warning if True has an undocumented meaning that callers may not expect."""
    mask, name = probe.mask, str(probe.mask.argument)
    is_attend = mask.meaning == "attend"
    if mask.meaning == "additive" or mask.meaning in (mask.documented, probe.subject.promise.mask):
        return
    if is_attend and "key_padding_mask" not in name:
        return
    severity: Severity = "note" if not is_attend and "padding" in name else "warning"
    if is_attend:
        words = f"True in `{name}` means attend, and this is not documented; nn.MultiheadAttention's key_padding_mask "
        words += "is True = ignore."
    elif severity == "note":
        words = f"True in `{name}` means ignore, as in nn.MultiheadAttention; {_SDPA}."
    else:
        words = (
            f"True in `{name}` means ignore, and this is not documented; {_SDPA}, and nn.MultiheadAttention True "
            "= ignore."
        )
    other: Meaning = "ignore" if is_attend else "attend"
    code = replace(code_of(probe), mask=replace(mask, meaning=other))
    fix = f"Document it in the docstring, or use True = {other}: {code.hiding}"
    evidence = {"argument": mask.argument, "meaning": mask.meaning}
    yield _finding(probe.subject, mask, MaskDefect(words, fix, severity), evidence, None)


_BOOLEANS = r"\.(float|double|half|bfloat16|int|long)\(\)|\.(to|type|type_as)\("
_OF_IT = r"(\[[^\]\n]*\]|\.\w+\(([^()\n]|\([^()\n]*\))*\))*?"  # indices and calls between a mask and its cast
_EITHER = ("attn_mask", "attention_mask")  # names of booleans as often as of numbers, which may be cast to be wider
_WIDER = r"\.(float|double)\(\)"


def _cast_of(name: str) -> str:
    """A regular expression for a cast of this expression and of its parts, with or without brackets."""
    alone = rf"\b{name}\b{_OF_IT}"
    once = rf"(?<!\w)\(\s*{alone}\s*\){_OF_IT}"
    return rf"({alone}|{once}|(?<!\w)\(\s*{once}\s*\){_OF_IT})({_BOOLEANS})"


def _cast(probe: MaskArgumentProbe) -> list[Finding]:
    """Findings about a boolean mask that is cast to 0 and 1 and added, although it is not documented as numbers."""
    mask, name = probe.mask, str(probe.mask.argument)
    silent = mask.documented is None and probe.subject.promise.mask is None and "bias" not in name
    if mask.meaning != "additive" or not silent or (times := as_number(probe)) is None:
        return []
    cast = _cast_of(name)
    line = line_with(probe.subject, cast)
    if line is None:  # by another name: m = mask[:, None, None]
        named = line_with(probe.subject, rf"^\s*\w+\s*=\s*{name}{_OF_IT}\s*$")
        cast = cast if named is None else _cast_of(named.code.partition("=")[0].strip())
        line = named and line_with(probe.subject, cast)
    if line is None or re.search(_WIDER, re.sub(cast, "", line.code)):  # scores and mask are made wider together
        return []  # numbers are added as they come: whoever gives booleans is told by its documentation
    own = re.search(cast, line.code)
    plain = own is None or re.search(r"\.(to|type|type_as)\($", own.group()) is None
    plain = plain and name not in _EITHER
    words = (
        f"A boolean `{name}` is cast to 0 and 1 and added to the scores: it counts {times:.3g} and hides nothing. 0 "
        "and 1 are not an additive mask; if the numbers should be added, pass --mask-meaning additive."
    )
    boolean = replace(code_of(probe), mask=replace(mask, meaning="attend", dtype="bool"))
    steps = {"argument": name, "counts": rounded(times)}
    return [
        _finding(probe.subject, mask, MaskDefect(words, boolean.hiding, "error" if plain else "warning"), steps, line)
    ]


def _finite_values(probe: MaskArgumentProbe) -> Iterator[Finding]:
    """Finite values of an additive mask: they are added to the logits as they are."""
    times = counted(probe) if probe.mask.meaning == "additive" else None
    if times is None or abs(times - 1) < 0.01:
        return
    words = f"A finite value in `{probe.mask.argument}` counts {times:.3g} times: it is added before logits are scaled."
    fix = "scores = q @ k.transpose(-2, -1) * scale + mask  # scaled first"
    steps = {"argument": probe.mask.argument, "times": rounded(times)}
    defect = MaskDefect(words, fix, "warning")
    yield _finding(probe.subject, probe.mask, defect, steps, line_of(probe, defect))


def _fills(probe: MaskArgumentProbe) -> Iterator[Finding]:
    """Findings about the numbers that this mask fills hidden scores with."""
    if probe.mask.meaning != "additive":
        plain = weak_fill("mask-meaning", attentions_of(probe.subject, probe.inputs))
        masked = attentions_of(probe.subject, probe.inputs, **masks_of(probe.mask, probe.given, probe.inputs))
        yield from [] if plain else weak_fill("mask-meaning", masked)
    if not probe.mask.by_pair:
        return  # an item that is all padding: the padding check asks
    given = torch.ones_like(probe.given)
    given[:, :, 1] = False
    rows = torch.zeros(probe.inputs.batch, probe.inputs.length, dtype=torch.bool)
    rows[:, 1] = True
    for attention in attentions_of(probe.subject, probe.inputs, **masks_of(probe.mask, given, probe.inputs)):
        if averages_all(attention, rows):
            yield averaging("mask-meaning", f"A query from which `{probe.mask.argument}` hides every key", attention)
            return


def _contradicting(masks: tuple[MaskReading, ...]) -> Iterator[Finding]:
    """Two arguments of which one means attend and the other ignore."""
    plain = [mask for mask in masks if mask.meaning != "additive" and (mask.behaves or mask.meaning) == mask.meaning]
    kinds = {mask.meaning: mask for mask in reversed(plain)}
    if len(kinds) < 2:
        return
    attend, ignore = kinds["attend"], kinds["ignore"]
    said = all(mask.documented is not None for mask in (attend, ignore)) or "padding" in str(ignore.argument)
    yield Finding(
        "mask-meaning",
        "mask-meaning",
        "warning" if said else "error",
        f"True in `{attend.argument}` means attend, and True in `{ignore.argument}` means ignore.",
        _EFFECT,
        f"Let both mean the same: {ignore.argument} = ~{ignore.argument}",
        {"attend": attend.argument, "ignore": ignore.argument},
    )


def _finding(
    subject: Subject, mask: MaskReading, defect: MaskDefect, evidence: Mapping[str, object], line: Location | None
) -> Finding:
    words = defect.words[:1].upper() + defect.words[1:]
    effect = _EFFECT if defect.severity == "error" else _TAKEN_FOR_ANOTHER
    return Finding("mask-meaning", "mask-meaning", defect.severity, words, effect, defect.fix, evidence, line)


CHECK = Check(
    "mask-meaning",
    "mask-meaning",
    "A mask hides exactly the keys that it marks, by query, head and item",
    "Random masks are given, different for each query, head and batch item; the inputs on which outputs depend are "
    "compared with them pair by pair, and where they differ the weights show why",
    _EFFECT,
    _run,
    follows_from=("softmax", "mixing"),
)

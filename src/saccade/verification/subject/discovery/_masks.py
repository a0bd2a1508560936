"""The mask arguments of a target: the shapes that each accepts, and its meaning.

A key is hidden and then changed: where no other query notices, and they notice a change of the keys that were not
hidden, the mask hid it.

Letters: B batch, H heads, Q queries, K keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._inputs import NamedInputs
from .._reading import MaskReading, Meaning, Promise, Reading, own_part
from ._documentation import documented, documented_axes
from ._forms import TargetClues, is_pytorch
from ._signature import TargetArgument
from ._trials import TargetTrials, TrialSizes, differs, sizes_for

BY_PAIR = ("QK", "BQK", "B1QK", "BHQK", "11QK", "1QK", "HQK")
BY_KEY = ("BK", "B1K", "B11K", "K")
_FOR_KEYS = r".*(pad|key_mask|keys_mask|valid|kv_mask|context_mask|token_mask|seq_mask).*"
_OWN = "tgt|trg|target|self|dec|x_mask|look_ahead|causal"  # of the queries' own sequence, beside a context
_HIDDEN = 1e-6  # of the movement that a key makes which is not hidden: rounding, or the weight e^-14


def with_masks(trials: TargetTrials, clues: TargetClues, promise: Promise, reading: Reading) -> Reading:
    """The reading with its mask arguments."""
    required = {mask.argument for mask in reading.masks}
    chosen = clues.of("mask", "lengths", given=False)
    if clues.hints.mask is not None:
        chosen = [argument for argument in clues.arguments if argument.name == clues.hints.mask] or chosen
    for argument in sorted(chosen, key=_of_a_side):
        # what is promised of masks is none of a bias beside them
        promised = None if _is_bias(argument) and not all(map(_is_bias, chosen)) else promise.mask
        masks = _of_argument(trials, clues, promised, reading, argument)
        if argument.name in required and masks:
            masks = [replace(mask, required=True) for mask in masks]
            reading = replace(reading, masks=tuple(mask for mask in reading.masks if mask.argument != argument.name))
        reading = replace(
            reading, masks=(*reading.masks, *masks), assumed=(*reading.assumed, *_in_words(argument, masks, promised))
        )
    return reading


def with_own_masks(trials: TargetTrials, clues: TargetClues, promise: Promise, reading: Reading) -> Reading:
    """Form "cross": the reading with the masks of the queries' own sequence, found while the context stays the same."""
    own = [argument for argument in clues.of("mask") if re.search(_OWN, argument.name.lower())]
    if reading.form != "cross" or not own or "B" not in reading.layout:
        return reading
    others = [argument for argument in clues.arguments if argument.role not in ("mask", "lengths")]
    own_clues = replace(clues, arguments=(*others, *own), hints=replace(clues.hints, mask=None))
    own_reading = with_masks(trials, own_clues, promise, replace(own_part(reading), masks=(), assumed=()))
    return replace(reading, own_masks=own_reading.masks, assumed=(*reading.assumed, *own_reading.assumed))


def _of_a_side(argument: TargetArgument) -> bool:
    """Sort key: with a context, the context's mask comes first."""
    return "memory" not in argument.name and re.search("tgt|trg|src", argument.name) is not None


def _of_argument(
    trials: TargetTrials, clues: TargetClues, promised: Meaning | None, reading: Reading, argument: TargetArgument
) -> list[MaskReading]:
    if reading.form == "cross" and of_queries(argument.name, clues):
        return []
    if reading.form == "self" and re.search("context|memory|mem_|cross|encoder_|additional", argument.name.lower()):
        return []  # of a context, which is not given
    names = [known.name for known in clues.arguments]
    silent = is_pytorch(clues.target)
    said, words = (None, "") if silent else documented(clues.source, argument.name, names)
    shape = None if silent else documented_axes(clues.source, argument.name, names)
    for lengths in _lengths(trials, reading):
        # kernels take a boolean in its place, too: what is called a bias is first tried as one
        is_bias = said is None and _is_bias(argument)
        trial = _MaskTrial(trials, reading, argument.name, said == "additive" or is_bias, lengths, is_bias)
        masks: list[MaskReading] = []
        for axes in _axes(argument, reading, shape):
            if axes in BY_PAIR and _for_keys(argument, shape) and any(not mask.by_pair for mask in masks):
                continue
            mask, nearest = trial.of(axes)
            if mask is None and axes == "BHQK":
                merged = trial.of(axes, merged=reading.heads or 0)[0] if (reading.heads or 0) > 1 else None
                mask = merged if merged is not None and merged.behaves is not None else None
            if mask is not None:
                meaning = promised or said or mask.behaves or nearest or _usual_meaning(argument)
                # PyTorch's documentation says of all of its boolean masks that True is ignored.
                known = "ignore" if silent and mask.behaves == "ignore" else said
                masks.append(replace(mask, meaning=meaning, documented=known, words=words[:200]))
        if masks:
            break
    clear = [mask for mask in masks if mask.behaves is not None]
    if not clear and not argument.is_open:  # nothing hides: shapes that scramble the output broadcast by accident
        clear = [mask for mask in masks if trial.is_neutral(mask)] or masks
    return _shapes_kept(clear, shape)


def _shapes_kept(masks: list[MaskReading], shape: str | None) -> list[MaskReading]:
    """One reading of each kind of shape: by pair, by pair and item, by pair, item and head, by key and item. With a
    documented shape, only shapes of its rank are kept, and the documented one comes first."""
    if shape is not None and any(mask.axes == shape for mask in masks):
        masks = sorted((mask for mask in masks if len(mask.axes) == len(shape)), key=lambda mask: mask.axes != shape)
    pairs = [mask for mask in masks if mask.by_pair]
    rich = [mask for mask in pairs if "B" in mask.axes]
    keys = [mask for mask in masks if not mask.by_pair and "B" in mask.axes]
    chosen = [*pairs[:1], *rich[:1], *[mask for mask in rich if "H" in mask.axes][:1], *keys[:1]]
    return list({mask.axes: mask for mask in chosen}.values()) or masks[:1]


def of_queries(name: str, clues: TargetClues) -> bool:
    """Whether, in a target with a context, a mask covers only one sequence: that of the queries, or the context before
    it was encoded."""
    lowered = name.lower()
    if re.search(_OWN, lowered):
        return True
    beside = any(re.search("(memory|context|cross).*mask", argument.name) for argument in clues.arguments)
    return re.search("src|source|enc", lowered) is not None and beside and "memory" not in lowered


def _axes(argument: TargetArgument, reading: Reading, shape: str | None) -> list[str]:
    """The shapes to try, the documented one first."""
    if argument.role == "lengths":
        return ["B"]
    if "B" not in reading.layout:
        return ["QK", "1QK", "HQK", "K", "11QK"]
    order = (*BY_KEY, *BY_PAIR) if _for_keys(argument, shape) else (*BY_PAIR, *BY_KEY)
    return list(dict.fromkeys([*([shape] if shape else []), *order]))


def _for_keys(argument: TargetArgument, shape: str | None) -> bool:
    """Whether a mask hides keys from all queries alike, by its documented shape or its name."""
    return "Q" not in shape if shape else re.fullmatch(_FOR_KEYS, argument.name.lower()) is not None


def _is_bias(argument: TargetArgument) -> bool:
    return re.search("bias|alibi", argument.name.lower()) is not None


def _usual_meaning(argument: TargetArgument) -> Meaning:
    """The usual meaning of a mask by its name: PyTorch's `key_padding_mask` is True at padding; in most other masks
    True is visible."""
    if _is_bias(argument):
        return "additive"
    return "ignore" if re.search("pad", argument.name.lower()) else "attend"


@dataclass(frozen=True)
class _OutputMovement:
    """The movement of outputs when the hidden key changes, and when the other keys change."""

    hidden: float
    others: float

    @property
    def hides(self) -> bool:
        return 0 < self.others < math.inf and self.hidden <= _HIDDEN * self.others


class _MaskTrial:
    """One argument, given masks of one shape after the other."""

    def __init__(
        self,
        trials: TargetTrials,
        reading: Reading,
        argument: str,
        additive: bool,
        lengths: TrialSizes,
        is_bias: bool = False,
    ):
        self.trials, self.argument, self.additive, self.is_bias = trials, argument, additive, is_bias
        others = (mask for mask in reading.masks if mask.required and mask.argument != argument)
        self.reading = replace(reading, masks=tuple(others))
        self.crossed = reading.form != "self"
        self.inputs = trials.inputs(reading, lengths)
        out = trials.out(reading, self.inputs)
        is_required = any(mask.argument == argument for mask in reading.masks)
        self.plain = None if is_required else out  # the output without this mask, where it can be left out
        self.shape = None if out is None else out.shape

    def of(self, axes: str, *, merged: int = 0) -> tuple[MaskReading | None, Meaning | None]:
        """The reading of a mask of this shape with its meaning; if it hides nothing completely, the nearest one.

        None if the shape raises an error.
        """
        codes = [*self._codes(axes, self.additive), *self._codes(axes, not self.additive)]
        codes = [replace(mask, merged=merged) for mask in codes]
        moved: dict[MaskReading, _OutputMovement] = {}
        for mask in codes:
            movement_of = self._moved(mask)
            if movement_of is not None and movement_of.hides and self._matters(mask):
                return replace(mask, behaves=mask.meaning), None
            if movement_of is not None:
                moved[mask] = movement_of
        if not moved:
            return None, None
        first = next(iter(moved))
        return first, _nearest([(mask, movement) for mask, movement in moved.items() if mask.dtype == first.dtype])

    def _codes(self, axes: str, additive: bool) -> Iterator[MaskReading]:
        """All codings of hidden keys."""
        if axes == "B":
            yield from () if additive else (MaskReading(self.argument, axes, "attend", "int64"),)
        elif additive:
            for fill in (float("-inf"), torch.finfo(torch.float32).min):
                yield MaskReading(self.argument, axes, "additive", fill=fill)
        else:
            for dtype in ("bool", "int64", "float32"):
                yield MaskReading(self.argument, axes, "attend", dtype)
                yield MaskReading(self.argument, axes, "ignore", dtype)

    def _moved(self, mask: MaskReading) -> _OutputMovement | None:
        """The movement of outputs under a mask; None if the mask raises an error."""
        before = self._out(mask, self.inputs)
        if before is None or (mask.meaning == "additive" and not self._adds(mask)):
            return None
        at = self._hidden(mask)
        rows = self._rows(at)
        hidden = self._movement(mask, before, [at], rows)
        # one key at a time, or the only one that is left would do; a neighbour, because windows see no other
        others = [self._movement(mask, before, [key], rows[-1:]) for key in (rows[-1] - 1, 0)]
        return _OutputMovement(hidden, max(others))

    def _matters(self, mask: MaskReading) -> bool:
        """Whether the hidden key would move those rows if it were not hidden."""
        if self.plain is None:
            return True
        at = self._hidden(mask)
        after = self.trials.out(self.reading, self.inputs.changed([at], "key"))
        return after is not None and bool(differs(self.plain, after)[..., self._rows(at), :].any())

    def _rows(self, at: int) -> list[int]:
        """The queries to compare: not the hidden key's own, nor the first two, which see few keys if causal."""
        return [row for row in range(2, self.inputs.length - 1) if self.crossed or row != at]

    def _adds(self, mask: MaskReading) -> bool:
        """Whether zeros are like no mask at all, as they are where a mask is added; a bias that is given may take the
        place of the target's own, as T5's `position_bias` does."""
        reading = replace(self.reading, masks=(replace(mask, required=True), *self.reading.masks))
        zeros = self.trials.out(reading, self.inputs)
        if self.plain is None or zeros is None or self.is_bias:
            return zeros is not None
        return zeros.shape == self.plain.shape and torch.allclose(zeros, self.plain, equal_nan=True)

    def is_neutral(self, mask: MaskReading) -> bool:
        """Whether under one of its meanings a mask that hides nothing is like no mask."""
        others: list[Meaning] = ["additive"] if mask.meaning == "additive" else ["attend", "ignore"]
        return self.plain is None or any(self._adds(replace(mask, meaning=meaning)) for meaning in others)

    def _movement(self, mask: MaskReading, before: Tensor, positions: list[int], rows: list[int]) -> float:
        """The mean movement of these rows when these keys change; infinite if no finite number is left."""
        after = self._out(mask, self.inputs.changed(positions, "key"))
        if after is None:
            return float("inf")
        moved = (after - before)[..., rows, :].abs()
        finite = moved[moved.isfinite()]
        return float(finite.mean()) if finite.numel() else float("inf")

    def _out(self, mask: MaskReading, inputs: NamedInputs) -> Tensor | None:
        """The output with the hidden key hidden; None if the call fails or the mask's shape spreads into it."""
        reading = replace(self.reading, masks=(mask, *self.reading.masks))
        if mask.by_pair:
            pairs = torch.ones(inputs.length, inputs.key_length, dtype=torch.bool)
            pairs[:, self._hidden(mask)] = False
            if "B" in mask.axes or "H" in mask.axes:
                heads = (reading.heads or 1) if "H" in mask.axes else 1
                pairs = pairs.expand(inputs.batch if "B" in mask.axes else 1, heads, *pairs.shape)
            out = self.trials.out(reading, inputs, pairs=pairs)
        else:
            padding = torch.ones(inputs.batch, inputs.key_length, dtype=torch.bool)
            padding[:, self._hidden(mask)] = False
            out = self.trials.out(reading, inputs, padding=padding)
        return out if out is not None and out.shape == self.shape else None

    def _hidden(self, mask: MaskReading) -> int:
        """The index of the hidden key: the last for lengths, otherwise 1."""
        return self.inputs.key_length - 1 if mask.axes == "B" else 1


def _lengths(trials: TargetTrials, reading: Reading) -> Iterator[TrialSizes]:
    """Sizes with more keys than queries, if the target accepts them, to distinguish a mask's axes; then equal sizes."""
    same = sizes_for(reading)
    if reading.form in ("cross", "qkv", "attention"):
        more = replace(same, key_length=same.length + 4)
        out = trials.out(reading, trials.inputs(reading, more))
        if out is not None and out.shape[-2] == more.length:
            yield more
    yield same


def _nearest(moved: list[tuple[MaskReading, _OutputMovement]]) -> Meaning | None:
    """For a mask that hides no key completely: the meaning under which hidden keys have far less influence; None if
    there is none."""
    ratios = {
        mask.meaning: movement.hidden / movement.others
        for mask, movement in moved
        if movement.others and math.isfinite(movement.others)
    }
    ordered = sorted((ratio, meaning) for meaning, ratio in ratios.items() if math.isfinite(ratio))
    return ordered[0][1] if len(ordered) > 1 and ordered[0][0] < 0.25 * ordered[1][0] else None


def _in_words(argument: TargetArgument, masks: list[MaskReading], promised: Meaning | None) -> Iterator[str]:
    if not masks:
        return
    first = masks[0]
    if first.axes == "B":
        yield f"{argument.name} is the number of real positions of each batch item"
        return
    why = f'as documented ("{first.words}")' if first.documented else "by what it does"
    if not first.documented and first.behaves is None:
        why = "the usual or nearest meaning, because neither meaning hides a key completely"
    if first.meaning == promised and first.meaning not in (first.documented, first.behaves):
        why = "as promised"
    said = {"attend": "True = attend", "ignore": "True = ignore", "additive": "added to the scores"}[first.meaning]
    yield f"{argument.name}: {said}, {why} (otherwise --mask-meaning)"

"""The mask arguments of a target: which shapes each takes, and what it does with them.

A key is hidden and then changed: where no other query notices, the mask hid it.

Letters: B batch, H heads, Q queries, K keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._inputs import Inputs
from .._reading import MaskReading, Meaning, Promise, Reading
from ._documented import documented
from ._forms import Clues, is_pytorch
from ._signature import Argument
from ._trials import Trials, sizes_for

BY_PAIR = ("QK", "BQK", "B1QK", "BHQK", "11QK", "1QK", "HQK")
BY_KEY = ("BK", "B1K", "B11K", "K")
_PADDING = r".*(pad|key_mask|keys_mask|valid|kv_mask|context_mask|token_mask|seq_mask).*"
_ENOUGH = 3  # shapes of one argument that are kept


@dataclass(frozen=True)
class _Effects:
    """How much the outputs move when a hidden key changes, relative to the same unhidden."""

    attend: float  # hidden by 0 among 1, as True = attend says it
    ignore: float
    additive: float

    @property
    def meaning(self) -> Meaning | None:
        """What hides the key: wholly, else far better than the other way."""
        kinds: tuple[Meaning, ...] = ("attend", "ignore", "additive")
        by_kind = {kind: getattr(self, kind) for kind in kinds if getattr(self, kind) == getattr(self, kind)}
        wholly = [kind for kind, effect in by_kind.items() if effect <= 1e-6]
        if wholly and any(effect > 1e-6 for effect in by_kind.values()):
            return wholly[0]
        ordered = sorted(by_kind, key=lambda kind: by_kind[kind])
        if len(ordered) > 1 and by_kind[ordered[0]] < 0.25 * by_kind[ordered[1]]:
            return ordered[0]
        return None


def with_masks(trials: Trials, clues: Clues, promise: Promise, reading: Reading) -> Reading:
    """The reading with its mask arguments."""
    chosen = [one for one in clues.arguments if one.role in ("mask", "lengths") and one.name not in clues.given]
    if clues.hints.mask is not None:
        chosen = [one for one in clues.arguments if one.name == clues.hints.mask] or chosen
    for one in chosen:
        masks = tuple(_of_argument(trials, clues, promise, reading, one))
        reading = replace(reading, masks=(*reading.masks, *masks), assumed=(*reading.assumed, *_told(one, masks)))
    return replace(reading, masks=tuple(sorted(reading.masks, key=lambda mask: _rank(mask, reading))))


def _rank(mask: MaskReading, reading: Reading) -> int:
    """The main mask argument first; in decoder layers the one over the context."""
    return 0 if "memory" in str(mask.argument) or not re.search("tgt|trg|src", str(mask.argument)) else 1


def _of_argument(
    trials: Trials, clues: Clues, promise: Promise, reading: Reading, argument: Argument
) -> Iterator[MaskReading]:
    if reading.form == "cross" and _of_queries(argument.name, clues):
        return
    said, words = (None, "") if is_pytorch(clues.target) else documented(clues.source, argument.name)
    trial = _Trial(trials, reading, argument.name)
    found: list[tuple[MaskReading, Meaning | None]] = []
    for axes in _axes(argument, reading):
        taken = trial.of(axes)
        if taken is None or (axes in BY_PAIR and any(not mask.by_pair for mask, _ in found) and _for_keys(argument)):
            continue
        mask, behaves = taken
        meaning = promise.mask or said or behaves or _usual(argument)
        found.append((replace(mask, meaning=meaning, documented=said, words=words, behaves=behaves), behaves))
    clear = [mask for mask, behaves in found if behaves is not None]
    yield from _kept(clear or [mask for mask, _ in found][:1])


def _kept(masks: list[MaskReading]) -> list[MaskReading]:
    """One plain shape by pair, the richest by pair, and one by key."""
    pairs = [mask for mask in masks if mask.by_pair]
    rich = [mask for mask in pairs if "B" in mask.axes]
    keys = [mask for mask in masks if not mask.by_pair and "B" in mask.axes]
    chosen = [*pairs[:1], *rich[:1], *[mask for mask in rich if "H" in mask.axes][:1], *keys[:1]]
    return list(dict.fromkeys(chosen)) or masks[:1]


def _of_queries(name: str, clues: Clues) -> bool:
    """Whether, beside a context, a mask is of the queries' own sequence."""
    lowered = name.lower()
    if re.search("tgt|trg|self|dec|x_mask|look_ahead|causal", lowered):
        return True
    return "src" in lowered and any("memory_mask" in one.name for one in clues.arguments)


def _axes(argument: Argument, reading: Reading) -> tuple[str, ...]:
    if argument.role == "lengths":
        return ("B",)
    order = (*BY_KEY, *BY_PAIR) if _for_keys(argument) else (*BY_PAIR, *BY_KEY)
    return order if "B" in reading.layout else ("QK", "1QK", "HQK", "K", "11QK")


def _for_keys(argument: Argument) -> bool:
    """Whether its name says that it hides keys from all queries alike."""
    return re.fullmatch(_PADDING, argument.name.lower()) is not None


def _usual(argument: Argument) -> Meaning:
    return "additive" if re.search("bias", argument.name.lower()) else "attend"


class _Trial:
    """One argument, given masks of one shape after the other."""

    def __init__(self, trials: Trials, reading: Reading, argument: str):
        self.trials, self.reading, self.argument = trials, replace(reading, masks=()), argument
        self.inputs = trials.inputs(reading, sizes_for(reading))
        self.shape = getattr(trials.out(self.reading, self.inputs), "shape", None)

    def of(self, axes: str) -> tuple[MaskReading, Meaning | None] | None:
        """The mask reading of a shape that is taken, and what it does; None where the shape is refused."""
        best = None
        for dtype in ("bool", "int64", "float32"):
            attend = MaskReading(self.argument, axes, "attend", dtype)
            if self._out(attend) is None:
                continue
            additive = self._moved(replace(attend, meaning="additive", fill=-1e9)) if dtype == "float32" else None
            effects = _Effects(
                self._moved(attend),
                self._moved(replace(attend, meaning="ignore")),
                additive if additive is not None else float("nan"),
            )
            meaning = effects.meaning
            best = best or (attend, None)
            if meaning is not None:
                return replace(attend, meaning=meaning, dtype=dtype), meaning
        return best

    def _out(self, mask: MaskReading, inputs: Inputs | None = None) -> Tensor | None:
        reading = replace(self.reading, masks=(mask,))
        given = self.inputs if inputs is None else inputs
        if mask.by_pair:
            pairs = torch.ones(self.inputs.length, self.inputs.key_length, dtype=torch.bool)
            pairs[:, 1] = False
            if "B" in mask.axes or "H" in mask.axes:
                heads = (reading.heads or 1) if "H" in mask.axes else 1
                pairs = pairs.expand(self.inputs.batch if "B" in mask.axes else 1, heads, *pairs.shape)
            return self._shaped(self.trials.out(reading, given, pairs=pairs))
        padding = torch.ones(self.inputs.batch, self.inputs.key_length, dtype=torch.bool)
        padding[:, self._hidden(mask)] = False
        return self._shaped(self.trials.out(reading, given, padding=padding))

    def _shaped(self, out: Tensor | None) -> Tensor | None:
        """None where the mask's shape has spread into the output's."""
        return out if out is not None and out.shape == self.shape else None

    def _hidden(self, mask: MaskReading | None) -> int:
        return -1 if mask is not None and mask.axes == "B" else 1

    def _moved(self, mask: MaskReading | None) -> float:
        """The mean movement of outputs after the hidden key's own position when its content changes."""
        at = self._hidden(mask)
        changed = self.inputs.changed([at], "key")
        if mask is None:
            before, after = self.trials.out(self.reading, self.inputs), self.trials.out(self.reading, changed)
        else:
            before, after = self._out(mask), self._out(mask, changed)
        if before is None or after is None:
            return float("nan")
        rows = slice(2, None) if at == 1 else slice(0, -1)
        moved = (after - before)[..., rows, :].abs()
        finite = moved[moved.isfinite()]
        return float(finite.mean()) if len(finite) else float("nan")


def _told(argument: Argument, masks: tuple[MaskReading, ...]) -> Iterator[str]:
    if not masks:
        return
    first = masks[0]
    if first.axes == "B":
        yield f"{argument.name} is the number of real positions of each batch item"
        return
    why = f'as documented ("{first.words}")' if first.documented else "by what it does"
    if not first.documented and first.behaves is None:
        why = "as is usual, because it hides no key either way"
    said = {"attend": "True = attend", "ignore": "True = ignore", "additive": "added to the scores"}[first.meaning]
    yield f"{argument.name}: {said}, {why} (otherwise --promise-mask)"

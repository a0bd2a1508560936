"""Everything that is shown of one look at one text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..models import LanguageModel
from ._collect import AttentionMap, collect
from ._findings import Finding, find
from ._models import TextModel, as_text_model
from ._roles import ROLE_NAMES
from ._scores import here, telling


@dataclass(frozen=True, eq=False)
class Look:
    """A text as a model attends to it: the map, the findings, the roles of the heads and the head to show large.

    ``roles`` is what ``measure_roles`` returned, None where the roles of this model were never measured.
    ``query`` is the word a viewer selects first.
    """

    seen: AttentionMap
    findings: list[Finding]
    roles: dict[str, Any] | None
    layer: int
    head: int
    query: int
    model: str = "embedded model"
    source: str = ""

    @cached_property
    def habits(self) -> dict[str, np.ndarray]:
        return here(self.seen)

    @cached_property
    def gain(self) -> np.ndarray:
        """(W, W): how telling each weight of the shown head is."""
        return telling(self.seen.weights[self.layer, self.head], self.seen.causal)

    def measured(self, layer: int, head: int) -> dict[str, Any] | None:
        """The head's entry in ``heads.json``, None if its role was never measured."""
        heads = (self.roles or {}).get("heads", ())
        return next((h for h in heads if (h["layer"], h["head"]) == (layer, head)), None)

    def habit(self, name: str, layer: int, head: int) -> float | None:
        """The head's own score ``name`` on this text, None where the text cannot tell (no repeated word, say)."""
        value = float(self.habits[name][layer, head])
        return None if np.isnan(value) else value

    def span(self, size: int) -> tuple[int, int]:
        """The ``size`` neighbouring words (start, stop) of the text in which the shown head is most telling."""
        low, high = int(self.seen.ordinary[0]), int(self.seen.ordinary[-1]) + 1
        if high - low <= size:
            return low, high
        sums = np.zeros((len(self.seen.words) + 1,) * 2)
        sums[1:, 1:] = self.gain.cumsum(0).cumsum(1)
        starts = np.arange(low, high - size + 1)
        ends = starts + size
        inside = sums[ends, ends] - sums[starts, ends] - sums[ends, starts] + sums[starts, starts]
        start = int(starts[inside.argmax()])
        return start, start + size

    def columns(self, size: int) -> list[int]:
        """The words of ``span(size)`` and beside them the first token and the special ones around the text."""
        low, high = int(self.seen.ordinary[0]), int(self.seen.ordinary[-1]) + 1
        around = [*range(low), 0, *range(high, len(self.seen.words))]
        return sorted({*around, *range(*self.span(size))})

    def number(self, i: int) -> int:
        """The number of word ``i`` in the text, counted from 1; special tokens before the text are not counted."""
        return i - int(self.seen.ordinary[0]) + 1

    def looking(self, columns: Sequence[int]) -> list[int]:
        """Those of the words ``columns`` whose rows say anything: not that of a token which sees itself alone."""
        return [i for i in columns if not (i == 0 and self.seen.causal and self.seen.words[0].special)]


def look(
    model: TextModel | LanguageModel,
    text: str,
    head: tuple[int, int] | None = None,
    *,
    name: str = "embedded model",
    source: str = "",
) -> Look:
    """Look at ``text`` through ``model``; ``head`` (layer, head) is the one to show large, else the most telling one.

    Raises ValueError for a text without words or too long for the model and for a head that does not exist.
    """
    model = as_text_model(model)
    check_head(model, head)
    _check_roles(model)
    seen = collect(model, text)
    findings = find(seen, model.roles)
    first = next((f for f in findings if f.layer is not None and head in (None, f.place)), None)
    layer, number = head or (first.place if first else (0, 0))
    query = first.query if first else None
    if query is None:
        gain = telling(seen.weights[layer, number], seen.causal).max(-1)[seen.ordinary]
        query = int(seen.ordinary[gain.argmax()])
    return Look(seen, findings, model.roles, layer, number, query, name, source)


def check_head(model: TextModel, head: tuple[int, int] | None) -> None:
    """Raises ValueError for a head that ``model`` does not have."""
    if head is None or (0 <= head[0] < model.layers and 0 <= head[1] < model.heads[head[0]]):
        return
    few, many = min(model.heads), max(model.heads)
    each = f"each with the heads 0 to {many - 1}" if few == many else f"with {few} to {many} heads each, counted from 0"
    raise ValueError(
        f"head: {head[0]}.{head[1]} does not exist; this model has the layers 0 to {model.layers - 1}, {each}"
    )


def _check_roles(model: TextModel) -> None:
    known = {"role": ROLE_NAMES, "decided_by": ROLE_NAMES}
    try:
        heads = [] if model.roles is None else model.roles["heads"]
        for h in heads:
            right = 0 <= h["layer"] < model.layers and 0 <= h["head"] < model.heads[h["layer"]]
            if not (right and 0 <= h["score"] <= 1) or any(h[name] not in names for name, names in known.items()):
                raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{model.name}: heads.json is damaged; without it the roles are simply not shown") from None

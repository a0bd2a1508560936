"""Everything that is shown of one look at one text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..models import LanguageModel
from ._collect import AttentionMap, collect
from ._findings import Finding, find
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
        return telling(self.seen.weights[self.layer, self.head])

    def measured(self, layer: int, head: int) -> dict[str, Any] | None:
        """The head's entry in ``heads.json``, None if its role was never measured."""
        heads = (self.roles or {}).get("heads", ())
        return next((h for h in heads if (h["layer"], h["head"]) == (layer, head)), None)

    def habit(self, name: str, layer: int, head: int) -> float | None:
        """The head's own score ``name`` on this text, None where the text cannot tell (no repeated word, say)."""
        value = float(self.habits[name][layer, head])
        return None if np.isnan(value) else value

    def span(self, size: int) -> tuple[int, int]:
        """The ``size`` neighbouring words (start, stop), without ``<s>``, in which the shown head is most telling."""
        words = len(self.seen.words)
        if words - 1 <= size:
            return 1, words
        sums = np.zeros((words + 1, words + 1))
        sums[1:, 1:] = self.gain.cumsum(0).cumsum(1)
        starts = np.arange(1, words - size + 1)
        ends = starts + size
        inside = sums[ends, ends] - sums[starts, ends] - sums[ends, starts] + sums[starts, starts]
        start = int(starts[inside.argmax()])
        return start, start + size


def look(
    lm: LanguageModel,
    text: str,
    head: tuple[int, int] | None = None,
    *,
    model: str = "embedded model",
    source: str = "",
) -> Look:
    """Look at ``text`` through ``lm``; ``head`` (layer, head) is the one to show large, else the most telling one.

    Raises ValueError for a text without words or too long for the model and for a head that does not exist.
    """
    config = lm.model.config
    if head is not None and not (0 <= head[0] < config.layers and 0 <= head[1] < config.heads):
        raise ValueError(
            f"head: {head[0]}.{head[1]} does not exist; this model has the layers 0 to {config.layers - 1}, "
            f"each with the heads 0 to {config.heads - 1}"
        )
    _check_roles(lm)
    seen = collect(lm, text)
    findings = find(seen, lm.heads)
    first = next((f for f in findings if f.layer is not None and head in (None, f.place)), None)
    layer, number = head or (first.place if first else (0, 0))
    query = first.query if first else None
    if query is None:
        query = int(telling(seen.weights[layer, number]).max(-1).argmax()) or 1
    return Look(seen, findings, lm.heads, layer, number, query, model, source)


def _check_roles(lm: LanguageModel) -> None:
    config, known = lm.model.config, {"role": ROLE_NAMES, "decided_by": ROLE_NAMES}
    try:
        heads = [] if lm.heads is None else lm.heads["heads"]
        for h in heads:
            right = 0 <= h["layer"] < config.layers and 0 <= h["head"] < config.heads and 0 <= h["score"] <= 1
            if not right or any(h[name] not in names for name, names in known.items()):
                raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{lm.name}: heads.json is damaged; without it the roles are simply not shown") from None

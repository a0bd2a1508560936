"""Observations of a running model or from a file: the data.

Shape legend: B batch, H query heads.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from ...operator._weights import Chosen
from ._aggregates import Aggregate, RunningSums
from ._alarms import Alarm
from ._kept_calls import KeptCall
from ._record import CallSite, StepCounts


@dataclass
class SiteObservations:
    """The observations of one call site."""

    site: CallSite
    heads: tuple[int, ...]  # watched query heads, in the order of the columns below
    of_all: int  # the number of query heads
    running: dict[str, RunningSums] = field(default_factory=dict)  # by the kind of sample: "rows", "steps", "gradients"
    kept: KeptCall | None = None

    def add(self, kind: str, new: RunningSums) -> None:
        self.running[kind] = self.running[kind].join(new) if kind in self.running else new

    def of_heads(self) -> list[dict[str, Aggregate]]:
        """Every statistic of each watched head, by name."""
        parts = [part.of_heads() for part in self.running.values()]
        return [{k: v for part in parts for k, v in part[column].items()} for column in range(len(self.heads))]


class CallObservations(StepCounts):
    """Statistics of a model's attention calls by call and head, kept calls, and unobserved calls.

    Attributes:
        calls: the places of attention calls, in order of first appearance.
        aggregates: `aggregates[call][head][statistic]`, an `Aggregate` (count, mean, spread, min, max).
        kept: by call name, the latest call that was chosen to be kept.
        alarms: the alarms, in the order in which they fired.
        unobserved: by name, attention that was not observed: how often, and why.
        without_attention: layers that ran without softmax attention beside layers with it, such as the linear layers of
            a hybrid model: by path, the class of what they have instead.
        unknown: by call name, unknown properties of observed calls: how often, and why.
        steps, observed: the number of forwards, and of observed forwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[str, SiteObservations] = {}
        self._alarms: list[Alarm] = []
        self._without_attention: dict[str, str] = {}

    @property
    def _places(self) -> dict[str, SiteObservations]:
        """The places by name, with everything that was observed so far."""
        return self._known

    @property
    def alarms(self) -> list[Alarm]:
        return list(self._alarms)

    @property
    def without_attention(self) -> dict[str, str]:
        return dict(self._without_attention)

    @property
    def calls(self) -> list[CallSite]:
        return [place.site for place in self._places.values()]

    @property
    def kept(self) -> dict[str, KeptCall]:
        return {name: place.kept for name, place in self._places.items() if place.kept is not None}

    @property
    def aggregates(self) -> dict[str, dict[int, dict[str, Aggregate]]]:
        return {name: dict(zip(place.heads, place.of_heads(), strict=True)) for name, place in self._places.items()}

    def table(self, *, pandas: bool = False) -> Any:
        """One row for each call, head and statistic.

        Args:
            pandas: a DataFrame instead of a list of dicts.

        Returns:
            Rows with "call", "layer", "head", "statistic", "count", "mean", "spread", "min", "max".

        Raises:
            ImportError: `pandas` is true and pandas not installed.
        """
        lines = list(self._lines())
        if not pandas:
            return lines
        try:
            frame = importlib.import_module("pandas").DataFrame
        except ImportError:
            raise ImportError("table(pandas=True) needs pandas: pip install pandas") from None
        return frame(lines, columns=["call", "layer", "head", "statistic", "count", "mean", "spread", "min", "max"])

    def _lines(self) -> Iterator[dict[str, Any]]:
        for place in self._places.values():
            for head, statistics in zip(place.heads, place.of_heads(), strict=True):
                for name, aggregate in statistics.items():
                    where = {"call": place.site.name, "layer": place.site.layer, "head": head, "statistic": name}
                    yield where | asdict(aggregate)

    def weights(self, call: str, head: Chosen = None, rows: Chosen = None, keys: Chosen = None) -> Tensor:
        """The exact weights of a kept call, of any part of its map, computed again.

        Args:
            call: its name.
            head, rows, keys: an int, a slice, ints, ...: as in `saccade.attention_weights`; None is all.

        Returns:
            (B, rows, keys) for one head given as an int, otherwise (B, heads, rows, keys).

        Raises:
            KeyError: no such call was kept; the message names those that were.
            IndexError: an index out of range.
        """
        if call not in self.kept:
            kept = ", ".join(map(repr, self.kept)) or "none; choose them with watch(model, keep=...)"
            raise KeyError(f"call: {call!r} was not kept. Kept: {kept}")
        return self.kept[call].weights(head, rows, keys)

"""The numbers of one training step at one call site, ready for a log.

Shape legend: Hq / Hkv query and key-value heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ._monitor_log import Histogram
from ._record import CallRecord, GradientRecord

VECTORS = ("query", "key", "value")
_MEANS = ("entropy", "evenness", "largest")


class StepTally:
    """Adds up the calls of a step at one site; with accumulated gradients each micro-batch has a call."""

    def __init__(self) -> None:
        self._rows: Tensor | float = 0.0
        self._sums: Tensor | float = 0.0
        self._logit: Tensor | None = None
        self._calls = 0
        self._norms: Tensor | float = 0.0
        self._squares: dict[str, Tensor] = {}
        self._histograms: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def add(self, record: CallRecord) -> None:
        measured, heads = record.statistics, record.statistics.heads
        sinks = measured.mean("mass.first") + measured.mean("mass.sink")
        means = torch.stack([*(measured.mean(n) for n in _MEANS), sinks])
        rows = measured.counted.sum((0, 2))
        self._rows = self._rows + rows
        self._sums = self._sums + torch.where(rows > 0, means, 0.0) * rows
        logit = heads["logits"]["max"]
        self._logit = logit if self._logit is None else torch.maximum(self._logit, logit)
        norms = [heads[name]["norm"] for name in VECTORS if name in heads]
        by_query_head = (norm.repeat_interleave(len(logit) // len(norm)) for norm in norms)
        self._norms = self._norms + torch.stack([*by_query_head, record.out_norm])
        self._calls += 1
        for name in VECTORS:
            if "counts" in heads.get(name, {}):
                self._histograms.setdefault(name, []).append((heads[name]["edges"], heads[name]["counts"]))

    def add_gradients(self, record: GradientRecord, scale: float) -> None:
        for name, norm in record.gradients.items():
            square = (norm.double() / scale) ** 2
            self._squares[name] = square if name not in self._squares else self._squares[name] + square

    def heads(self) -> dict[str, list[float]]:
        """Lists of a number for each head, by name; gradients of keys and values are by key-value head."""
        if self._logit is None:
            return {}
        assert isinstance(self._sums, Tensor) and isinstance(self._norms, Tensor)
        means = self._sums / self._rows
        names = [*_MEANS, "sink_mass", "max_logit", *(f"norm_{name}" for name in self._normed)]
        numbers = torch.cat([means, self._logit[None], self._norms / self._calls]).double().tolist()
        gradients = {f"gradient_{name}": square.sqrt().tolist() for name, square in self._squares.items()}
        return {**dict(zip(names, numbers, strict=True)), **gradients}

    @property
    def _normed(self) -> list[str]:
        assert isinstance(self._norms, Tensor)
        return [*VECTORS, "out"] if len(self._norms) == len(VECTORS) + 1 else [*VECTORS[:2], "out"]

    def histograms(self) -> Iterator[tuple[str, Histogram]]:
        """One histogram over all heads for the queries, the keys and the values."""
        for name, held in self._histograms.items():
            edges, counts = (torch.cat([pair[n] for pair in held]).tolist() for n in (0, 1))
            sound = [(e, c) for e, c in zip(edges, counts, strict=True) if math.isfinite(e[0]) and math.isfinite(e[-1])]
            yield name, Histogram.together([e for e, _ in sound], [c for _, c in sound])


def of_layer(heads: dict[str, list[float]]) -> dict[str, float]:
    """Numbers of a call as a whole: means over heads, but the largest logit and the norm of all gradients."""
    shown: dict[str, float] = {}
    for name, numbers in heads.items():
        known = [number for number in numbers if not math.isnan(number)] or [math.nan]
        if name == "max_logit":
            shown[name] = max(known)
        elif name.startswith("gradient_"):
            shown[name] = math.hypot(*numbers)
        else:
            shown[name] = sum(known) / len(known)
        if name == "entropy":
            shown["entropy_lowest"] = min(known)
        if name == "sink_mass":
            shown["sink_mass_highest"] = max(known)
    return shown

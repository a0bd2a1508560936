"""The statistics of one observed attention call, and samples of them for the running aggregates.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, Dv value width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...operator._call import ObservedCall
from ...operator._masks import as_mask, keys_seen
from ...operator._statistics import Statistics, statistics
from ._aggregates import RunningSums

Groups = Mapping[str, Tensor] | Callable[[ObservedCall], Mapping[str, Tensor] | None]


@dataclass(frozen=True)
class ObservationRequest:
    """The statistics to compute for each call, as arguments of `saccade.statistics`."""

    top: int = 0
    received: bool = False
    groups: Groups | None = None
    histograms: Any = None


def observed(call: ObservedCall, request: ObservationRequest) -> tuple[Statistics, Tensor]:
    """The statistics of a call, and the mean norm (Hq,) of its output over the counted rows."""
    groups = request.groups(call) if callable(request.groups) else request.groups
    measured = statistics(
        call.query.detach(),
        call.key.detach(),
        value=call.value.detach(),
        **{**call.scoring(), "mask": call.counted_mask},
        groups=groups,
        received=request.received,
        top=request.top,
        histograms=request.histograms,
    )
    norms = torch.linalg.vector_norm(call.out.detach(), dim=-1, dtype=measured.lse.dtype)
    rows = measured.counted.sum((0, 2))
    return measured, torch.where(measured.counted, norms, 0.0).sum((0, 2)) / rows


def real_keys(call: ObservedCall) -> Tensor | None:
    """(B or 1, H or 1, Lk) bool: keys that some counted row may see; None if all are."""
    length_q, length_k, real = call.query.shape[2], call.key.shape[2], call.real
    keys = keys_seen(as_mask(call.mask), length_q, length_k, device=call.query.device)
    if real is None or length_q != length_k:
        return keys
    return real[:, None] if keys is None else keys & real[:, None]


def row_samples(statistics: Statistics, heads: tuple[int, ...]) -> RunningSums:
    """One sample for each counted row: entropy, evenness, largest weight, distance and the masses."""
    names = [name for name in statistics.names if name not in ("lse", "keys_seen")]
    samples = torch.stack([statistics.of(name) for name in names])
    counted = (statistics.counted & statistics.lse.isfinite()).expand(samples.shape).clone()
    counted[names.index("evenness")] &= statistics.keys_seen > 1
    if heads != tuple(range(samples.shape[2])):
        samples, counted = samples[:, :, heads], counted[:, :, heads]
    return RunningSums.of(names, samples, counted)


def step_samples(statistics: Statistics, out_norm: Tensor, heads: tuple[int, ...]) -> RunningSums:
    """One sample for each head: extremes of the logits, norms, shares of NaN and infinities."""
    held = statistics.heads
    vectors = ("query", "key", "value")
    values = {f"logits.{end}": held["logits"][end] for end in ("max", "min")}
    values |= {f"{what}.norm": held[what]["norm"] for what in vectors} | {"out.norm": out_norm}
    values |= {f"{what}.nonfinite": held[what]["nonfinite"] for what in (*vectors, "logits")}
    if statistics.received is not None:
        rows = statistics.counted.sum(2, keepdim=True).clamp(min=1)
        values["received.max"] = (statistics.received / rows).amax((0, 2))
    return of_step(values, out_norm.shape[0], heads)


def of_step(values: Mapping[str, Tensor], of_all: int, heads: tuple[int, ...]) -> RunningSums:
    """Samples of each head from values (H,) or (H, n); those of key-value heads are repeated for their query heads."""
    lines = [value.repeat_interleave(of_all // value.shape[0], 0) for value in values.values()]
    wide = torch.stack([line.to(lines[0].dtype) for line in lines])
    wide = wide if heads == tuple(range(of_all)) else wide[:, heads]
    wide = wide.reshape(len(lines), 1, len(heads), -1)
    return RunningSums.of(tuple(values), wide, wide.isfinite())

"""The statistics requested of a call: their checked form, and the few tensors that every backend needs for it.

Shape legend: B items, Lk keys, G named groups.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._call import CheckedCall
from .._masks._data import dense, describe, whole

PLACES = ("self", "previous", "next", "first")
RESERVED = (*PLACES, "sink")
HISTOGRAMS = ("query", "key", "value", "logits", "weights")


@dataclass(frozen=True)
class StatisticsRequest:
    groups: tuple[str, ...]
    members: Tensor | None  # (B|1, G, Lk) bool
    received: bool
    top: int
    histograms: frozenset[str]


def make_request(
    call: CheckedCall, groups: Mapping[str, Tensor] | None, received: bool, top: int, histograms: Any
) -> StatisticsRequest:
    """Check the request; every error names the argument, the value and the expected one."""
    names, members = _groups(call, groups)
    return StatisticsRequest(names, members, bool(received), whole(top, "top", least=0), _histograms(histograms))


def _groups(call: CheckedCall, groups: Any) -> tuple[tuple[str, ...], Tensor | None]:
    if groups is None:
        return (), None
    if not isinstance(groups, Mapping):
        raise TypeError(f"groups must be a dict of names and boolean tensors, got {describe(groups)}")
    marks = [_group(call, name, group) for name, group in groups.items()]
    if not marks:
        return (), None
    batch = max(mark.shape[0] for mark in marks)
    return tuple(groups), torch.stack([mark.expand(batch, -1) for mark in marks], 1)


def _group(call: CheckedCall, name: Any, group: Any) -> Tensor:
    if not isinstance(name, str):
        raise TypeError(f"groups: a name must be a str, got {describe(name)}")
    if name in RESERVED:
        raise ValueError(f"groups: {', '.join(RESERVED)} are always measured, expected another name, got {name!r}")
    if not isinstance(group, Tensor) or group.dtype != torch.bool:
        raise TypeError(f"groups[{name!r}] must be a boolean tensor (Lk,) or (B, Lk), got {describe(group)}")
    dense(group, f"groups[{name!r}]")
    shapes = ((call.length_k,), (call.batch, call.length_k))
    if tuple(group.shape) not in shapes:
        raise ValueError(
            f"groups[{name!r}] must be (Lk,) = {shapes[0]} or (B, Lk) = {shapes[1]}, got {tuple(group.shape)}"
        )
    if group.device != call.device:
        raise ValueError(f"groups[{name!r}] is on {group.device}, expected query's device {call.device}")
    return group if group.dim() == 2 else group[None]


def _histograms(asked: Any) -> frozenset[str]:
    if asked is None:
        return frozenset()
    names = HISTOGRAMS if asked is True else (asked,) if isinstance(asked, str) else () if asked is False else asked
    if not isinstance(names, Collection):
        raise TypeError(f"histograms must be names among {', '.join(HISTOGRAMS)}, got {describe(asked)}")
    for name in names:
        if name not in HISTOGRAMS:
            raise ValueError(f"histograms must be names among {', '.join(HISTOGRAMS)}, got {name!r}")
    return frozenset(names)

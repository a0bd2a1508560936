"""An attention call as a watch gets it.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ... import _tap
from ..._masks import Mask, Padding, as_mask, keys_seen


class GraphTensor(NamedTuple):
    """A tensor of the model's own graph, and how its gradient becomes that of the call's (B, H, L, D) tensor."""

    tensor: Tensor
    seen_as: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, eq=False)
class ObservedCall(_tap.AttentionCall):
    """A call whose tensors are views of what the model computed with."""

    used: dict[str, GraphTensor] | None = None  # "query", "key", "value", "out"; None: the call's own tensors
    real: Tensor | None = None  # (B, Lq) bool: query rows that are tokens; None: all count
    rows_unknown: bool = False  # keys are padded, and nobody knows whether queries are the same tokens


def used_in(call: _tap.AttentionCall) -> dict[str, GraphTensor]:
    """The tensors that gradients flow through, by "query", "key", "value", "out"."""
    given = getattr(call, "used", None)
    return given or {name: GraphTensor(getattr(call, name)) for name in ("query", "key", "value", "out")}


def counted(call: _tap.AttentionCall) -> Mask | None:
    """The call's mask with padded queries as empty rows: what statistics count."""
    mask, real = as_mask(call.mask), getattr(call, "real", None)
    if real is None:
        return mask
    keys = real.new_full((call.query.shape[0],), call.key.shape[2], dtype=int)
    rows = Padding(keys, queries=real)
    return rows if mask is None else mask & rows


def real_keys(call: _tap.AttentionCall) -> Tensor | None:
    """(B or 1, H or 1, Lk) bool: the keys that some row which counts may see; None: all."""
    length_q, length_k, real = call.query.shape[2], call.key.shape[2], getattr(call, "real", None)
    keys = keys_seen(as_mask(call.mask), length_q, length_k, device=call.query.device)
    if real is None or length_q != length_k:
        return keys
    return real[:, None] if keys is None else keys & real[:, None]

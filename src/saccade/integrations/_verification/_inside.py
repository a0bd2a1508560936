"""What happens inside of a model during one call: which pairs of each layer and head have weight, and where two runs
part.

Shape legend: R rows, H query heads, Lq / Lk lengths, Dv value width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...see.monitoring import KeptCall, watch

_FAINT = 1e-3
_ROUNDING = 1e-4  # of an output: kernels sum in float32, whatever the dtype of what they are given
_UNITS = 8  # of the dtype of an output and its weights, which may be half precision


@dataclass(frozen=True, eq=False)
class CallInside:
    """One attention call of a run, in float64."""

    name: str  # as `saccade.watch` names calls
    layer: int
    weights: Tensor  # (R, H, Lq, Lk)
    pairs: Tensor  # (R, H, Lq, Lk) bool: the pairs that no mask hides
    out: Tensor  # (R, H, Lq, Dv)
    unexplained: float  # the largest difference of `out` from weights times values, relative to `out`
    unit: float  # of the dtype of the output

    @property
    def is_explained(self) -> bool:
        """Whether the output is that of the observed arguments: a kernel may leave a mask or a window out."""
        return self.unexplained < max(_ROUNDING, _UNITS * self.unit)


@dataclass(frozen=True)
class Inside:
    """The attention calls of one run in their order; `unobserved` has the names and reasons of the others."""

    calls: tuple[CallInside, ...]
    unobserved: dict[str, str]


class Parting(NamedTuple):
    """The first place where two runs differ."""

    call: str
    layer: int
    head: int
    query: int
    key: int | None  # None: the weights are the same, and the values are not
    words: str


def inside(module: nn.Module, run: Callable[[], Any]) -> Inside:
    """The attention calls in the forwards of `module` while `run` runs."""
    with torch.no_grad(), watch(module, keep=True, alarms=False) as watched:
        run()
    parts = dict(module.named_modules())
    calls = []
    for site in watched.calls:
        kept = watched.kept.get(site.name)
        if kept is not None:
            numbered = getattr(parts.get(site.path), "layer_idx", None)
            calls.append(_call(site.name, numbered if isinstance(numbered, int) else site.layer, kept))
    reasons = {name: missed.reason for name, missed in watched.unobserved.items()}
    return Inside(tuple(calls), reasons)


def _call(name: str, layer: int, kept: KeptCall) -> CallInside:
    assert kept.value is not None and kept.out is not None
    exact = replace(kept, query=kept.query.double(), key=kept.key.double())
    # With queries this small no pair's weight is 0 by what it says: only what is added to a score can make it so.
    pairs = replace(exact, query=exact.query * _FAINT).weights() != 0
    weights, out = exact.weights(), kept.out.double()
    values = kept.value.double().repeat_interleave(weights.shape[1] // kept.value.shape[1], 1)
    rows = weights.sum(-1) > 0  # of padding, weights are not computed
    apart = ((weights @ values - out) * rows[..., None]).nan_to_num(0.0).abs().max()
    size = (out * rows[..., None]).nan_to_num(0.0).abs().max()
    unexplained, unit = float(apart / size) if size else 0.0, torch.finfo(kept.out.dtype).eps
    return CallInside(name, layer, weights, pairs, out, unexplained, unit)


def first_parting(first: Inside, second: Inside, bound: float) -> Parting | None:
    """The first call, head and pair where the runs differ by more than `bound`; None if no observed call does.

    Calls are compared in their order. Weights are compared before outputs, which differ through values, too.
    """
    for call, other in zip(first.calls, second.calls, strict=False):
        if call.weights.shape != other.weights.shape:
            words = f"weights of shape {list(call.weights.shape)} and {list(other.weights.shape)}"
            return Parting(call.name, call.layer, 0, 0, None, words)
        parting = _in_weights(call, other, bound) or _in_outputs(call, other, bound)
        if parting is not None:
            return parting
    return None


def _in_weights(call: CallInside, other: CallInside, bound: float) -> Parting | None:
    # What a query of padding sees is anybody's choice, and some runs do not count it.
    both = (call.weights.sum(-1) > 0) & (other.weights.sum(-1) > 0)
    apart = (call.weights - other.weights).nan_to_num(float("inf")).abs() * both[..., None]
    beyond = apart > bound
    if not bool(beyond.any()):
        return None
    hidden = beyond & (call.pairs != other.pairs)
    if bool(hidden.any()):  # a pair that only one of them sees, the one that needs the fewest tokens
        row, head, query, key = min(hidden.nonzero().tolist(), key=lambda at: (max(at[2:]), at))
    else:
        row, head, query, key = _largest(apart)
    first, second = (float(run.weights[row, head, query, key]) for run in (call, other))
    words = f"the weight of key {key} for query {query} is {first:.3g} in one and {second:.3g} in the other"
    return Parting(call.name, call.layer, head, query, key, words)


def _in_outputs(call: CallInside, other: CallInside, bound: float) -> Parting | None:
    if call.out.shape != other.out.shape:
        return None
    both = (call.weights.sum(-1) > 0) & (other.weights.sum(-1) > 0)
    apart = (call.out - other.out).nan_to_num(0.0).abs().amax(-1) * both
    size = float(call.out.nan_to_num(0.0).abs().max()) or 1.0
    if not bool((apart > bound * size).any()):
        return None
    row, head, query = _largest(apart)
    words = f"the weights agree, and the output of query {query} differs by {float(apart[row, head, query]):.3g}"
    return Parting(call.name, call.layer, head, query, None, words)


def _largest(tensor: Tensor) -> list[int]:
    """The indices of the largest entry, the first of several."""
    first = (tensor >= tensor.max()).nonzero()[0]
    return [int(index) for index in first]

"""Scores between the product of queries and keys and the softmax, and the effect of each function on them.

Shape legend: ... leading axes, Lq / Lk lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ._by_hand_edits import ScoresReplay
from ._observed_products import ObservedProduct, ScoreTerm


@dataclass(frozen=True, eq=False)
class ObservedScores:
    """`scale * product + bias`, -inf where a mask hides."""

    product: ObservedProduct
    lead: tuple[int, ...]  # their present leading axes
    scale: float = 1.0
    masks: tuple[ScoreTerm, ...] = ()  # True = attend
    bias: ScoreTerm | None = None
    changed: bool = False  # by something other than scale, masks and bias
    replay: ScoresReplay | None = None  # computes scores of other factors, if known


Arguments = tuple[Any, ...]


def changed_by(
    scores: ObservedScores, at: int, func: Any, args: Arguments, kwargs: Mapping[str, Any]
) -> ObservedScores:
    """Scores, which were argument `at`, after a function that kept their number and their last two axes."""
    name = getattr(func, "__name__", "").rstrip("_")
    if name in _SAME:
        return scores
    change = _CHANGES.get(name)
    with torch.no_grad(), torch._C.DisableTorchFunction():
        changed = None if change is None or kwargs else change(scores, at, args)
    return replace(scores, changed=True) if changed is None else changed


# Functions that change only shape and dtype.
_SAME = frozenset(
    """view reshape unsqueeze squeeze flatten unflatten contiguous clone expand detach float double half bfloat16 to
    type type_as view_as reshape_as""".split()
)


def _times(scores: ObservedScores, at: int, args: Arguments) -> ObservedScores | None:
    return _scaled(scores, _number(args[1 - at])) if len(args) == 2 else None


def _over(scores: ObservedScores, at: int, args: Arguments) -> ObservedScores | None:
    by = _number(args[1]) if len(args) == 2 and at == 0 else None
    return _scaled(scores, 1 / by) if by else None


def _scaled(scores: ObservedScores, by: float | None) -> ObservedScores | None:
    if by is None or not 0 < by < math.inf:
        return None
    bias = None if scores.bias is None else scores.bias._replace(tensor=scores.bias.tensor * by)
    return replace(scores, scale=scores.scale * by, bias=bias)


def _plus(scores: ObservedScores, at: int, args: Arguments) -> ObservedScores | None:
    return _added(scores, args[1 - at], 1) if len(args) == 2 else None


def _minus(scores: ObservedScores, at: int, args: Arguments) -> ObservedScores | None:
    return _added(scores, args[1], -1) if len(args) == 2 and at == 0 else None


def _added(scores: ObservedScores, other: Any, sign: int) -> ObservedScores | None:
    if not isinstance(other, Tensor) or not other.is_floating_point() or other.dim() > len(scores.lead) + 2:
        return None
    given = _with_two_axes(other.detach())
    given = given if sign > 0 else -given
    if scores.bias is None:
        return replace(scores, bias=ScoreTerm(given, scores.lead))
    if scores.bias.lead != scores.lead:
        return None
    return replace(scores, bias=ScoreTerm(scores.bias.tensor + given, scores.lead))


def _filled(scores: ObservedScores, at: int, args: Arguments) -> ObservedScores | None:
    if len(args) != 3 or at != 0 or _number(args[2]) != -math.inf:
        return None
    return _masked(scores, args[1], hidden=True)


def _chosen(scores: ObservedScores, at: int, args: Arguments) -> ObservedScores | None:
    """torch.where(condition, scores, other), torch.where(condition, other, scores), scores.where(condition, other)."""
    if len(args) != 3:
        return None
    condition = args[1] if at == 0 else args[0]
    other = args[2] if at < 2 else args[1]
    return _masked(scores, condition, hidden=at == 2) if _number(other) == -math.inf else None


def _masked(scores: ObservedScores, condition: Any, *, hidden: bool) -> ObservedScores | None:
    if not isinstance(condition, Tensor) or condition.dtype != torch.bool or condition.dim() > len(scores.lead) + 2:
        return None
    visible = ~condition if hidden else condition
    return replace(scores, masks=(*scores.masks, ScoreTerm(_with_two_axes(visible), scores.lead)))


def _with_two_axes(tensor: Tensor) -> Tensor:
    return tensor[(None,) * (2 - tensor.dim())] if tensor.dim() < 2 else tensor


def _number(value: Any) -> float | None:
    if isinstance(value, Real):
        return float(value)
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else None


_CHANGES: dict[str, Callable[[ObservedScores, int, Arguments], ObservedScores | None]] = {
    "mul": _times,
    "multiply": _times,
    "div": _over,
    "divide": _over,
    "true_divide": _over,
    "add": _plus,
    "sub": _minus,
    "subtract": _minus,
    "__imul": _times,  # `scores *= 0.3`, and the like
    "__itruediv": _over,
    "__iadd": _plus,
    "__isub": _minus,
    "masked_fill": _filled,
    "where": _chosen,
}

"""From dot products to weights, with any of scale, mask, positions and the shift left out.

Shape legend: L keys, Dv value width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import torch

SWITCHES = ("scale", "mask", "position", "shift")
"""The parts of attention that `step` can leave out: `step(..., without=...)`."""


@dataclass(frozen=True, eq=False)
class SoftmaxStep:
    """The softmax of one row with all intermediate numbers, each (L,)."""

    maximum: float  # the number subtracted from the logits: 0 without the shift
    exponentials: np.ndarray
    total: float
    weights: np.ndarray


@dataclass(frozen=True, eq=False)
class Scores:
    """The dot products of a row, and everything applied to them before the softmax."""

    products: np.ndarray  # (L,) q . k_j
    unplaced: np.ndarray | None  # (L,) from query and key before rotation; None without rotary positions
    scale: float
    softcap: float | None
    bias: np.ndarray | None
    bias_of_positions: bool
    visible: np.ndarray | None
    sink: float | None
    dtype: torch.dtype  # of the model's computation

    def why_not(self, switch: str) -> str:
        """The reason why ``switch`` cannot be left out; "" if it can."""
        if switch == "scale" and self.scale == 1.0:
            return "this head does not scale its dot products"
        if switch == "mask" and self.visible is None:
            return "this head has no mask: every token sees every other"
        if switch == "position" and self.unplaced is None and not (self.bias is not None and self.bias_of_positions):
            return (
                "no positions can be seen at this head: they are added to the embeddings before the first layer, or "
                "are in queries and keys already"
            )
        return ""

    def logits(self, without: Collection[str] = ()) -> np.ndarray:
        """(L,) the logits, -inf for hidden keys."""
        turned = self.unplaced is None or "position" not in without
        out = self.products if turned or self.unplaced is None else self.unplaced
        out = out if "scale" in without else out * self.scale
        if self.softcap is not None:
            out = self.softcap * np.tanh(out / self.softcap)
        if self.bias is not None and not (self.bias_of_positions and "position" in without):
            out = out + self.bias
        return out if self.visible is None or "mask" in without else np.where(self.visible, out, -np.inf)

    def softmax(self, without: Collection[str] = ()) -> SoftmaxStep:
        """The softmax in float64; without the shift in the model's dtype, where it may overflow."""
        logits = self.logits(without)
        if "shift" in without:
            return unshifted(logits, self.sink, self.dtype)
        among = logits if self.sink is None else np.append(logits, self.sink)
        maximum = float(among.max())
        maximum = maximum if np.isfinite(maximum) else 0.0
        exponentials = np.exp(logits - maximum)
        total = float(exponentials.sum()) + (0.0 if self.sink is None else float(np.exp(self.sink - maximum)))
        return SoftmaxStep(maximum, exponentials, total, exponentials / (total or 1.0))


def unshifted(logits: np.ndarray, sink: float | None, dtype: torch.dtype) -> SoftmaxStep:
    """exp(s_j) / sum exp(s_j) with every number rounded to ``dtype``: inf and NaN where it overflows."""
    exponentials = torch.exp(torch.tensor(logits).to(dtype))
    total = exponentials.sum()
    if sink is not None:
        total = total + torch.exp(torch.tensor(sink).to(dtype))
    weights = exponentials / total
    return SoftmaxStep(0.0, exponentials.double().numpy(), float(total), weights.double().numpy())


def largest_exponent(dtype: torch.dtype) -> float:
    """The score above which exp overflows in ``dtype``."""
    return float(np.log(torch.finfo(dtype).max))


def checked_switches(without: Iterable[str], scores: Scores) -> tuple[str, ...]:
    """The switches in the order of ``SWITCHES``. ValueError for an unknown one, or one without effect in this head."""
    names = [without] if isinstance(without, str) else list(without)
    for name in names:
        if name not in SWITCHES:
            raise ValueError(f"without: expected {', '.join(SWITCHES)}, got {name!r}")
        reason = scores.why_not(name)
        if reason:
            raise ValueError(f"without: {name} cannot be left out: {reason}")
    return tuple(name for name in SWITCHES if name in names)

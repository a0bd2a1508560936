"""Checks a contender's result before timing: some of its rows are computed in float64.

The upstream gradient of the check is zero outside of these rows. So the gradients of *all* keys and values are sums
over these rows, and backward passes of long problems are checked without Lq x Lk memory or work.

Shape legend: B batch, Hq / Hkv heads, R rows chosen, Lk keys, D and Dv widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import CaseInputs
from .contenders import Forward, dense_bias

ALL_ROWS = 2**24  # up to this number of logits all rows are checked
SOME_ROWS = 2**25  # number of logits computed in larger cases
# A result may be this many times further off than PyTorch's plain operations in the same dtype, plus as many units in
# the last place of the largest entry: another order of summation, another exponential.
FACTOR = 4.0


@dataclass(frozen=True)
class Verdict:
    """The largest error of any output, in units of the tolerance. A result is right if it is at most 1."""

    error: float
    worst: str  # "out", "d_query", "d_key" or "d_value"
    rows: int

    @property
    def right(self) -> bool:
        return self.error <= 1.0  # False for NaN


@dataclass(frozen=True)
class CaseJudge:
    """The expected results of a case, shared by all contenders."""

    inputs: CaseInputs
    rows: Tensor  # (R,) int64
    truth: dict[str, Tensor]  # float64
    allowed: dict[str, float]

    @classmethod
    def of(cls, inputs: CaseInputs) -> CaseJudge:
        rows = chosen_rows(inputs)
        truth = written_out(inputs, rows, torch.float64)
        plain = written_out(inputs, rows, inputs.case.torch_dtype)
        unit = torch.finfo(inputs.case.torch_dtype).eps / 2
        allowed = {}
        for name, right in truth.items():
            off = _largest(plain[name].double() - right)
            allowed[name] = FACTOR * (off + unit * _largest(right)) + torch.finfo(torch.float64).tiny
        return cls(inputs, rows, truth, allowed)

    def verdict(self, forward: Forward) -> Verdict:
        got = self._results(forward)
        errors = {name: _largest(got[name].double() - right) / self.allowed[name] for name, right in self.truth.items()}
        worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
        return Verdict(errors[worst], worst, len(self.rows))

    def _results(self, forward: Forward) -> dict[str, Tensor]:
        if not self.inputs.case.derives:
            with torch.no_grad() if not self.inputs.case.records else torch.enable_grad():
                return {"out": forward().detach()[:, :, self.rows]}
        out = forward()
        kept = torch.zeros_like(self.inputs.upstream)
        kept[:, :, self.rows] = self.inputs.upstream[:, :, self.rows]
        gradients = torch.autograd.grad(out, self.inputs.leaves, kept)
        return {"out": out.detach()[:, :, self.rows], **_named(gradients)}


def chosen_rows(inputs: CaseInputs) -> Tensor:
    """All rows of a small case; some rows of a large one, including the first and the last."""
    case = inputs.case
    across = case.batch * case.heads * case.length_k
    if across * case.length_q <= ALL_ROWS:
        return torch.arange(case.length_q)
    count = min(case.length_q, max(8, SOME_ROWS // across))
    return torch.linspace(0, case.length_q - 1, count, dtype=torch.float64).round().long().unique()


def written_out(inputs: CaseInputs, rows: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """out (B, Hq, R, Dv) of the rows, and the gradients if the stage has any, head by head in `dtype`."""
    case = inputs.case
    first, stop = (end.expand(case.batch, -1)[:, rows, None] for end in case.pattern.ranges(case.sizes))
    bias, keys = dense_bias(inputs, dtype, rows), torch.arange(case.length_k)
    group = case.heads // case.kv_heads
    out = torch.zeros(case.batch, case.heads, len(rows), case.value_width, dtype=dtype)
    sums = [torch.zeros(leaf.shape, dtype=dtype) for leaf in inputs.leaves] if case.derives else []
    for b in range(case.batch):
        visible = (keys >= first[b]) & (keys < stop[b])
        for h in range(case.heads):
            kv = h // group
            parts = (inputs.query[b, h, rows], inputs.key[b, kv], inputs.value[b, kv])
            query, key, value = leaves = [part.detach().to(dtype).requires_grad_(case.derives) for part in parts]
            expected = _one_head(query, key, value, visible, None if bias is None else bias[0, h], case.width**-0.5)
            out[b, h] = expected.detach()
            if case.derives:
                by_query, by_key, by_value = torch.autograd.grad(
                    expected, leaves, inputs.upstream[b, h, rows].to(dtype)
                )
                sums[0][b, h, rows] = by_query
                sums[1][b, kv] += by_key
                sums[2][b, kv] += by_value
    return {"out": out, **(_named(sums) if case.derives else {})}


def _one_head(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """(R, Dv) from (R, D), (Lk, D), (Lk, Dv) and visible (R, Lk); rows without visible keys are 0."""
    logits = query @ key.mT * scale
    if bias is not None:
        logits = logits + bias
    empty = ~visible.any(-1, keepdim=True)
    weights = torch.softmax(logits.masked_fill(~(visible | empty), -math.inf), -1)
    return weights.masked_fill(empty, 0.0) @ value


def _named(gradients: list[Tensor] | tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip(("d_query", "d_key", "d_value"), gradients, strict=True))


def _largest(tensor: Tensor) -> float:
    """The largest magnitude; NaN if any entry is."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def staged(forward: Forward, inputs: CaseInputs) -> Callable[[], object]:
    """The function to time for the stage: a forward pass, its backward pass, or both."""
    stage = inputs.case.stage
    if stage == "recorded":
        return forward
    if stage == "forward+backward":
        return lambda: torch.autograd.grad(forward(), inputs.leaves, inputs.upstream)
    if stage == "backward":
        out = forward()
        return lambda: torch.autograd.grad(out, inputs.leaves, inputs.upstream, retain_graph=True)

    def unrecorded() -> Tensor:
        with torch.no_grad():
            return forward()

    return unrecorded

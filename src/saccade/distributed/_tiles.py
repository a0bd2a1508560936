"""One rectangle of a distributed call, by the operator: the rows of one span with the keys of another.

The backward pass of a rectangle gets the lse of whole rows: p_ij = exp(s_ij - lse_i) are then the weights of the whole,
and the gradients of the rectangles add up.

Shape legend: B batch, Hq / Hkv query and key-value heads, r rows, c keys, D and Dv widths.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..operator._attention import choose
from ..operator._backends import native
from ..operator._backends.native import _kernels
from ..operator._biases import Bias, TensorBias
from ..operator._call import CheckedCall
from ..operator._dropout import Dropout
from ..operator._masks import Mask
from ..operator._masks._intervals import Span
from ._plan import SequencePlan
from ._spans import within

EMPTY = float("-inf")
# With at most so many keys the kernels of half precision take delta = sum_j p_ij dp_ij from these keys alone, since it
# is rounded less than that of d_out . out: right for a whole row, but not for a rectangle of it.
_ONE_TILE = 128
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class TileSettings:
    """The arguments of a distributed call other than tensors; of a bias its form, without the parameter."""

    plan: SequencePlan
    mask: Mask | None
    bias: Bias | None
    scale: float
    softcap: float | None
    dropout: Dropout | None
    own_rows: bool  # whether a tensor of scores has only the rows of this rank

    def scores_of(self, parameter: Tensor, rows: Span, keys: Span) -> Tensor:
        """The part of a bias's parameter that a rectangle reads."""
        if not isinstance(self.bias, TensorBias):
            return parameter
        if parameter.shape[2] > 1:
            if self.own_rows:
                (rows,) = within((rows,), self.plan.rows[self.plan.rank])
            parameter = parameter.narrow(2, rows[0], rows[1] - rows[0])
        return parameter.narrow(3, keys[0], keys[1] - keys[0]) if parameter.shape[3] > 1 else parameter

    def call(self, rows: Span, keys: Span, query: Tensor, key: Tensor, value: Tensor, scores: Any) -> CheckedCall:
        """The call of a rectangle; rows and keys count in the whole sequence, the tensors have just those."""
        bias = None
        if self.bias is not None:
            bias = copy.copy(self.bias)
            bias.parameter = scores
            if bias.offset is not None:
                bias.offset = bias.offset + rows[0] - keys[0]
        mask = self.plan._mask_of(self.mask, rows, keys)
        return CheckedCall(query, key, value, mask, bias, self.scale, self.softcap, None, self.dropout, needs_lse=True)


def forward(call: CheckedCall) -> Pair:
    """out (B, Hq, r, Dv) in the input dtype or wider, and lse (B, Hq, r) in float64."""
    if native.refuses(call) is not None:
        out, lse = choose(call, "auto")[0].run(call)
        return out, lse.double()
    settings, parameter = _native(call)
    out, parts = _kernels.forward(settings, True, call.query, call.key, call.value, parameter, None)
    assert parts is not None
    return out, parts.double().sum(0)  # the lse and its rounding error


def backward(
    call: CheckedCall,
    wanted: tuple[bool, ...],
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    whole: bool,
) -> list[Tensor | None]:
    """Gradients of query, key, value and the bias's parameter: this rectangle's share of them.

    Args:
        wanted: which of the four.
        out, d_out: (B, Hq, r, Dv), of whole rows.
        lse: (2, B, Hq, r) float32, of whole rows with the sink, and its rounding error; -inf on rows that see no key.
        d_lse: (B, Hq, r).
        whole: whether the rows see no other keys.
    """
    if not any(wanted):  # the sink's alone, which takes whole rows
        return [None] * 4
    if native.refuses(call) is not None:
        return _by_recomputing(call, wanted, out, lse.double().sum(0), d_out, d_lse)
    if call.query.dtype != torch.float32 and not whole and call.length_k <= _ONE_TILE:
        query, key, value, out, d_out = (x.float() for x in (call.query, call.key, call.value, out, d_out))
        call = replace(call, query=query, key=key, value=value)
    settings, parameter = _native(call)
    given = [call.query, call.key, call.value, parameter, None]
    return _kernels.backward(settings, given, (*wanted, False), out, lse, d_out, d_lse)[:4]


def _native(call: CheckedCall) -> tuple[_kernels.KernelSettings, Tensor | None]:
    settings = _kernels.KernelSettings.of(call, native.lowered(call.mask, call.query, call.key))
    return settings, None if call.bias is None else call.bias.parameter


def _by_recomputing(
    call: CheckedCall, wanted: tuple[bool, ...], out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None
) -> list[Tensor | None]:
    """Gradients by any backend: out = sum_n w_n out_n with w_n = exp(lse_n - lse), so that d_out_n = w_n d_out and
    d_lse_n = w_n (d_out . out_n - d_out . out + d_lse)."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(want) for x, want in zip(call.tensors(), wanted, strict=False)]
        query, key, value, *rest = leaves
        bias = copy.copy(call.bias)
        if bias is not None:
            (bias.parameter,) = rest
        again = replace(call, query=query, key=key, value=value, bias=bias)
        part, part_lse = choose(again, "auto")[0].run(again)
    with torch.no_grad():
        unseen = part_lse == EMPTY
        weight = torch.where(unseen, 0.0, torch.exp(part_lse.double() - torch.where(unseen, 0.0, lse)))
        d_out = torch.where(unseen[..., None], 0.0, d_out).double()
        inner = (d_out * (part - out)).sum(-1) + (0.0 if d_lse is None else torch.where(unseen, 0.0, d_lse))
        cotangents = ((d_out * weight[..., None]).to(part.dtype), (inner * weight).to(part_lse.dtype))
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad((part, part_lse), asked, cotangents, allow_unused=True))
    return [next(found) if want and n < len(leaves) else None for n, want in enumerate(wanted)]

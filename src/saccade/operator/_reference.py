"""The meaning of attention: dense, slow, obvious. Specification and oracle of every other backend.

    s_ij  = softcap(scale q_i.k_j) + bias_ij                       softcap(x) = c tanh(x / c), then a `Score`
    p_ij  = exp(s_ij) / (exp(sink) + sum_j' exp(s_ij'))            over the keys j' that query i sees
    out_i = sum_j p_ij m_ij v_j                                    m_ij in {0, 1 / (1 - p)} with dropout

Every operand is selected element by element before it is multiplied: 0 * NaN is NaN, so a matrix product could not
keep what a query may not see out of its result or of the derivatives. Any dtype; O(B Hq Lq Lk (D + Dv)) memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._biases import Span, TensorBias
from ._call import CheckedCall, add_sink, without_autocast
from ._costs import Costs, wide_bytes
from ._scores._score import ModifiedScores, leaves_of

NEGATIVE = float("-inf")


def refuses(call: CheckedCall) -> str | None:
    """None: the reference takes every call of the contract."""
    return None


def costs(call: CheckedCall) -> Costs:
    """Query, key and value selected pair by pair, and their products."""
    pairs = call.batch * call.heads * call.length_q * call.length_k
    return Costs(1.0, pairs * (3 * call.query.shape[3] + 2 * call.value.shape[3] + 4) * wide_bytes(call))


def run(call: CheckedCall) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Lq, Dv) in the input dtype, lse (B, Hq, Lq) in the accumulator's."""
    with without_autocast(call.device):
        seen, bias = _seen_and_bias(call)
        logits = torch.where(seen, _logits(call, seen, bias), NEGATIVE)
        top = logits.detach().amax(-1) if call.length_k else logits.new_full(logits.shape[:3], NEGATIVE)
        pivot = torch.where(top == NEGATIVE, 0.0, top)
        weights = torch.exp(logits - pivot[..., None])
        total = weights.sum(-1)
        empty = total == 0
        some = torch.where(empty, 1.0, total)
        lse = torch.where(empty, NEGATIVE, pivot + torch.log(some))
        out = _weighted_values(call, seen, weights / some[..., None])
        out, lse = add_sink(torch.where(empty[..., None], 0.0, out), lse, call.sink)
        return out.to(call.query.dtype), lse


def _seen_and_bias(call: CheckedCall) -> tuple[Tensor, Tensor]:
    """The visible pairs and their additive scores, both (B, Hq, Lq, Lk); -inf in a tensor bias hides a pair."""
    shape = (call.batch, call.heads, call.length_q, call.length_k)
    if call.mask is None:
        seen = torch.ones(shape, dtype=torch.bool, device=call.device)
    else:
        seen = call.mask.dense(call.length_q, call.length_k, device=call.device).expand(shape)
    if call.bias is None or isinstance(call.bias, ModifiedScores):
        return seen, torch.zeros((), dtype=call.accumulator, device=call.device)
    # Pair by pair, not along diagonals: this is the specification of that, too.
    rows = Span(0, call.length_q, torch.arange(call.length_q, device=call.device), unbroken=False)
    keys = Span(0, call.length_k, torch.arange(call.length_k, device=call.device), unbroken=False)
    bias = call.bias._tile(call.bias.parameter, rows, keys, call.placement, call.accumulator).expand(shape)
    if isinstance(call.bias, TensorBias):
        seen = seen & (bias != NEGATIVE)
    return seen, torch.where(seen, bias, 0.0)


def _logits(call: CheckedCall, visible: Tensor, bias: Tensor) -> Tensor:
    """softcap(scale q.k) + bias, or what a `Score` makes of it, computed only for visible pairs."""
    key = call.key.repeat_interleave(call.heads // call.kv_heads, dim=1)
    query = torch.where(visible[..., None], call.query[:, :, :, None].to(call.accumulator), 0.0)
    key = torch.where(visible[..., None], key[:, :, None].to(call.accumulator), 0.0)
    logits = call.scale * (query * key).sum(-1)
    logits = logits if call.softcap is None else call.softcap * torch.tanh(logits / call.softcap)
    return _modified(call.bias, call, logits, visible) if isinstance(call.bias, ModifiedScores) else logits + bias


def _modified(bias: ModifiedScores, call: CheckedCall, scores: Tensor, visible: Tensor) -> Tensor:
    heads, rows, keys = (torch.arange(size, device=call.device) for size in (call.heads, call.length_q, call.length_k))
    origin = 0 if call.mask is None else call.mask._origin()[1]
    leaves = leaves_of((0, call.batch), heads, rows + origin, keys + origin, call.placement)
    loads = bias._loads(bias.parameter, leaves, visible, call.accumulator)
    return bias._apply(scores, loads, leaves, visible)


def _weighted_values(call: CheckedCall, visible: Tensor, weights: Tensor) -> Tensor:
    if call.dropout is not None:
        row, key = (0, 0) if call.mask is None else call.mask._origin()
        batch, heads = (torch.arange(size, device=call.device) for size in (call.batch, call.heads))
        rows, keys = (torch.arange(size, device=call.device) for size in (call.length_q, call.length_k))
        weights = weights * call.dropout.factor(batch, heads, rows + row, keys + key, call.accumulator)
    value = call.value.repeat_interleave(call.heads // call.kv_heads, dim=1)
    value = torch.where(visible[..., None], value[:, :, None].to(call.accumulator), 0.0)
    return (weights[..., None] * value).sum(-2)

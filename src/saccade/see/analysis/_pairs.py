"""Exact attention weights of listed pairs of tokens, for targets that are sparse and differ from row to row.

    p_ij = exp(s_ij - lse_i),  s_ij = softcap(scale q_i.k_j) + bias_ij

Shape legend: B texts, Hq / Hkv query and key-value heads, L tokens, D width, P pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...operator._biases import RelativeScores
from ...operator._call import CheckedCall, ObservedCall
from ...operator._checks import make_call
from ...operator._scores._score import ModifiedScores, leaves_of

_ENTRIES = 2**22  # products formed at once: 16 MiB of float32


def pair_weights(call: ObservedCall, lse: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """The weight that row `rows[n]` gives to key `keys[n]`, for every n: O(P D) work for each head.

    Args:
        call: an attention call of one text (B = 1).
        lse: (1, Hq, Lq), log of each row's softmax denominator, as `saccade.statistics` gives it.
        rows, keys: (P,) int64.

    Returns:
        (Hq, P) in the dtype of `lse`; 0 where the row does not see the key.
    """
    checked = make_call(
        call.query,
        call.key,
        call.value,
        **call.scoring(),
        dropout=0.0,
    )
    if checked.batch != 1:
        raise ValueError(f"call: expected one text, got a batch of {checked.batch}")
    rows, keys = rows.to(checked.device), keys.to(checked.device)
    step = max(1, _ENTRIES // (checked.heads * checked.query.shape[3]))
    parts = [_weights(checked, lse, rows[i : i + step], keys[i : i + step]) for i in range(0, len(rows), step)]
    return torch.cat(parts, 1) if parts else lse.new_zeros(checked.heads, 0)


def _weights(call: CheckedCall, lse: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    heads = torch.arange(call.heads, device=call.device)[:, None]
    of_key = heads[:, 0] // (call.heads // call.kv_heads)
    query, key = call.query[0, :, rows], call.key[0][of_key[:, None], keys]  # (Hq, P, D)
    products = (query.to(lse.dtype) * key.to(lse.dtype)).sum(-1)
    logits = call.scale * products
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    shown = _visible(call, heads, rows, keys)
    if isinstance(call.bias, ModifiedScores):
        logits = _modified(call.bias, call, logits, shown, rows, keys)
    else:
        logits = logits + _scores(call, heads, rows, keys).to(lse.dtype)
    visible = shown & (lse[0, :, rows] > float("-inf"))
    return torch.where(visible, torch.exp(logits - torch.where(visible, lse[0, :, rows], 0.0)), 0.0)


def _scores(call: CheckedCall, heads: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """The bias of each head (H, 1) and pair (P,)."""
    bias = call.bias
    if bias is None:
        return torch.zeros((), device=call.device)
    if isinstance(bias, RelativeScores):
        placement = call.placement
        at = placement if isinstance(placement, int) else placement.to(call.device)
        distance = keys - rows - at
        return bias._value(bias.parameter, *torch.broadcast_tensors(heads, distance))
    table = bias.parameter.expand(1, call.heads, call.length_q, call.length_k)
    return table[0, heads, rows, keys]


def _modified(
    bias: ModifiedScores, call: CheckedCall, scores: Tensor, visible: Tensor, rows: Tensor, keys: Tensor
) -> Tensor:
    """The scores (H, P) after a `Score`; pairs lie along the axis of keys."""
    heads, origin = torch.arange(call.heads, device=call.device), 0 if call.mask is None else call.mask._origin()[1]
    leaves = leaves_of((0, 1), heads, rows[:1] * 0, keys + origin, 0)
    at = call.placement if isinstance(call.placement, int) else call.placement.to(call.device)
    leaves["q"] = (rows + at + origin).view(1, 1, 1, -1)
    shown = visible.expand(scores.shape)[None, :, None]
    loads = bias._loads(bias.parameter, leaves, shown, scores.dtype)
    return bias._apply(scores[None, :, None], loads, leaves, shown)[0, :, 0]


def _visible(call: CheckedCall, heads: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    if call.mask is None:
        return torch.ones((), dtype=torch.bool, device=call.device)
    item = torch.zeros_like(heads)
    sizes = call.length_q, call.length_k
    return call.mask._attends(item, heads, rows[None], keys[None], *sizes).expand(call.heads, len(rows))

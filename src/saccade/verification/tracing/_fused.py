"""Attention computed in one call, as scores and weights: F.scaled_dot_product_attention and Saccade's own.

Shape legend: U units (a head of a batch item each), Lq / Lk lengths, D / Dv widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...operator._backends import chunked
from ...operator._call import ObservedCall
from ...operator._checks import make_call
from ...operator._weights import attention_weights
from ._scores import ScoreProduct, rows_of
from ._shadow import TensorShadow

Known = Callable[[Any], TensorShadow | None]
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def fused(first: int, of: Known, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ScoreProduct:
    """A call of F.scaled_dot_product_attention."""
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    query, key, value = given["query"], given["key"], given["value"]
    tokens = [_tokens(of(query), query), _tokens(of(key), key)]
    if given.get("enable_gqa") and key.shape[-3] != query.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value, tokens[1] = (tensor.repeat_interleave(times, -3) for tensor in (key, value, tokens[1]))
    scale = given.get("scale") or 1 / math.sqrt(query.shape[-1])
    logits = query @ key.transpose(-2, -1) * scale
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
    weights = logits.softmax(-1).masked_fill(logits.isneginf().all(-1, keepdim=True), 0.0)
    depth = max(_depth(of(given[name])) for name in _NAMES[:3])
    made = _scores(first, depth, (query, key, value), tokens, logits, weights)
    for shadow in (of(given["query"]), of(given["key"])):
        if shadow is not None:
            made.scaled, made.learned = made.scaled * shadow.scaled.by, made.learned or shadow.scaled.learned
    return made


def told(first: int, of: Known, call: ObservedCall) -> ScoreProduct:
    """A call of Saccade's operator, as its observer receives it."""
    query, key, value = call.query, call.key, call.value
    weights = attention_weights(query, key, **call.scoring())
    # float32 has weights of 0 where a logit lies 104 below its row's largest; float64 tells them from hidden ones.
    exact = attention_weights(query.double(), key.double(), **call.scoring())
    _, lse = chunked.run(make_call(query.double(), key.double(), value.double(), **call.scoring(), needs_lse=True))
    tokens = [_tokens(of(query), query), _tokens(of(key), key)]
    times = query.shape[1] // key.shape[1]
    key, value, tokens[1] = (tensor.repeat_interleave(times, 1) for tensor in (key, value, tokens[1]))
    depth = max(_depth(of(tensor)) for tensor in (call.query, call.key))
    logits = (exact.log() + lse.unsqueeze(-1)).to(weights.dtype)
    return _scores(first, depth, (query, key, value), tokens, logits, weights)


def _scores(
    first: int, depth: int, given: tuple[Tensor, Tensor, Tensor], tokens: list[Tensor], logits: Tensor, weights: Tensor
) -> ScoreProduct:
    """A score product from a fused call, where logits, weights and tokens are known at once."""
    lead = logits.shape[:-2]

    def units(tensor: Tensor) -> Tensor:
        return tensor.detach().expand(*lead, *tensor.shape[-2:]).reshape(-1, *tensor.shape[-2:])

    query, key, value = map(units, given)
    left, right = (rows_of(owners, torch.Size((*lead, *owners.shape[-2:]))) for owners in map(units, tokens))
    return ScoreProduct(
        first,
        query,
        key,
        left,
        right,
        depth,
        logits=units(logits),
        softened=units(weights),
        weights=units(weights),
        values=value,
        normalised="right",
        keys="right",
        source="F.scaled_dot_product_attention",
    )


def _tokens(shadow: TensorShadow | None, tensor: Tensor) -> Tensor:
    tokens = None if shadow is None else shadow.tokens
    return torch.full(tensor.shape, -1) if tokens is None else tokens


def _depth(shadow: TensorShadow | None) -> int:
    return 0 if shadow is None else shadow.depth

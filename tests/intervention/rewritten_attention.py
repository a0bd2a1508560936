"""Attention with its edits written into it: the judge of every intervention.

Nothing here comes from saccade but the dense form of masks and biases. A `Rewrite` holds what each step of one call is
changed by, as plain functions of dense tensors; `Oracle` stands in the place of a model's attention function, computes
each call from its formula, and rewrites the one that is edited.

Shape legend: B batch, H query heads (key heads are repeated), Lq / Lk lengths, D / Dv widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from saccade.operator._biases import Span, as_bias
from saccade.operator._checks import make_call
from saccade.operator._masks import as_mask

Change = Callable[[Tensor], Tensor]


def same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass
class Rewrite:
    """What is done to each step of a call; every tensor is (B, H, ., .)."""

    query: Change = same
    key: Change = same
    value: Change = same
    products: Change = same  # scale * q.k
    logits: Change = same  # after softcap, bias and mask
    weights: Change = same
    out: Change = same


@dataclass
class Oracle:
    """Computes the calls of a model in their order; `rewrites` by the number of a call in a forward."""

    rewrites: dict[int, Rewrite] = field(default_factory=dict)
    calls: list[dict[str, Tensor]] = field(default_factory=list)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        see: Tensor | None = None,
        bias: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        change, dtype = self.rewrites.get(len(self.calls), Rewrite()), query.dtype
        query, key, value = query.double(), key.double(), value.double()
        group = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
        query, key, value = change.query(query), change.key(key), change.value(value)
        products = change.products((query @ key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale))
        logits = products if softcap is None else softcap * torch.tanh(products / softcap)
        logits = logits if bias is None else logits + bias
        logits = change.logits(logits if see is None else logits.masked_fill(~see, -math.inf))
        weights = change.weights(normalised(logits, sink))
        out = change.out(weights @ value)
        kept = {"query": query, "key": key, "value": value, "weights": weights, "output": out}
        self.calls.append({name: tensor.detach().clone() for name, tensor in kept.items()})
        return out.to(dtype)

    def sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """In the place of F.scaled_dot_product_attention."""
        lead = query.shape[:-1]
        query, key, value = (
            tensor.reshape(math.prod(tensor.shape[:-3]), -1, *tensor.shape[-2:]) for tensor in (query, key, value)
        )
        see = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril() if is_causal else None
        bias = None
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            see = attn_mask if see is None else see & attn_mask
        elif attn_mask is not None:
            bias = attn_mask
        return self.attend(query, key, value, see, bias, scale).reshape(*lead, value.shape[-1])

    def operator(self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **options: Any) -> Tensor:
        """In the place of `saccade.attention`."""
        mask, sizes = as_mask(mask), (query.shape[2], key.shape[2])
        see = None if mask is None else mask.dense(*sizes)
        bias = as_bias(options.get("bias"))
        if bias is not None:
            call = make_call(query, key, value, mask, bias=bias)
            spans = [Span(0, size, torch.arange(size)) for size in sizes]
            bias = bias._tile(bias.parameter, *spans, call.placement, torch.float64)
        rest = {name: options.get(name) for name in ("scale", "softcap", "sink")}
        return self.attend(query, key, value, see, bias, **rest)

    def transformers(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
        """In the place of an attention function of transformers, with the float masks of the eager ones."""
        see = None if mask is None else mask > torch.finfo(mask.dtype).min
        bias = more.get("position_bias")
        if bias is not None and mask is not None:
            bias = bias + mask.masked_fill(~see, 0.0)
        out = self.attend(query, key, value, see, bias, more.get("scaling"), more.get("softcap"))
        return out.transpose(1, 2).contiguous(), None


def normalised(logits: Tensor, sink: Tensor | None = None) -> Tensor:
    """The softmax, 0 where a row sees nothing."""
    seen = (logits > -math.inf).any(-1, keepdim=True)
    logits = torch.where(seen, logits, 0.0)
    if sink is None:
        return torch.where(seen, logits.softmax(-1), 0.0)
    one_more = torch.cat([logits, sink[None, :, None, None].expand(*logits.shape[:3], 1)], -1)
    return torch.where(seen, one_more.softmax(-1)[..., :-1], 0.0)


def on(heads: list[int], change: Change, items: list[int] | None = None) -> Change:
    """`change` of the chosen heads and items (B, n, ., .); the others as they are."""

    def changed(tensor: Tensor) -> Tensor:
        new = tensor.clone()
        chosen = list(range(tensor.shape[0])) if items is None else items
        at = torch.tensor(chosen)[:, None], torch.tensor(heads)
        # of all items, because a mean or another item is taken from the whole batch
        given = change(tensor[:, heads])
        new[at] = given[chosen] if given.shape[0] == tensor.shape[0] else given.expand(len(chosen), *given.shape[1:])
        return new

    return changed

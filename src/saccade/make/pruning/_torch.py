"""`torch.nn.MultiheadAttention` with fewer heads than its width allows.

Shape legend: B batch, H remaining heads, L / S lengths of queries and keys, E width, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...operator.nn._cuts import Change, Cut, WeightSlice, head_rows, linear_cut
from ...operator.nn._fewer_heads import joined
from ...operator.nn.attention import HeadsLeft


class PrunedMultiheadAttention(nn.MultiheadAttention):
    """An `nn.MultiheadAttention` after `saccade.prune`: same call, with H D columns in its inner projections.

    Made by `saccade.prune`; it has no constructor. PyTorch's class requires H D = E, so this one projects and calls
    F.scaled_dot_product_attention itself. PyTorch's transformer layers work with it; their fused inference path, which
    needs E columns, is turned off. A three-dimensional mask is (B H, L, S) for the remaining heads.

    Example:
        >>> import saccade, torch
        >>> model = torch.nn.TransformerEncoderLayer(16, nhead=4, batch_first=True)
        >>> _ = saccade.prune(model, {0: [1, 2]})
        >>> type(model.self_attn).__name__, model.self_attn.num_heads
        ('PrunedMultiheadAttention', 2)
        >>> model(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention.forward`; `is_causal` is only a hint: `attn_mask` is required and decides."""
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x[None] for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        split = [x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in self._projected(query, key, value)]
        mask = _additive(attn_mask, key_padding_mask, split[0])
        dropout = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            logits = split[0] @ split[1].mT * self.head_dim**-0.5
            weights = F.dropout((logits if mask is None else logits + mask).softmax(-1), dropout)
            read = weights @ split[2]
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            read = F.scaled_dot_product_attention(split[0], split[1], split[2], mask, dropout)
        out: Tensor = self.out_proj(read.transpose(1, 2).flatten(2))
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        matrices: Any = (
            (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if self.in_proj_weight is None
            else self.in_proj_weight.chunk(3)
        )
        biases: Any = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [F.linear(x, *both) for x, *both in zip((query, key, value), matrices, biases, strict=True)]


def cut_heads(module: nn.MultiheadAttention, kept: Sequence[int]) -> Cut:
    """The change that keeps only these heads. ValueError if the module adds its own keys or values."""
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError("add_bias_kv and add_zero_attn add keys of the full width, which fewer heads cannot read")
    width = int(module.head_dim)
    inner = module.num_heads * width
    rows = head_rows(kept, width)
    all_rows = tuple(part * inner + row for part in range(3) for row in rows)
    separate = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    slices = [
        WeightSlice(module, name, 0, tuple(rows) if name in separate else all_rows)
        for name in (*separate, "in_proj_weight", "in_proj_bias")
        if module._parameters.get(name) is not None
    ]
    before = getattr(module, "heads_left", None) or HeadsLeft(tuple(range(module.num_heads)), module.num_heads)
    own = {
        "__class__": PrunedMultiheadAttention,
        "num_heads": len(kept),
        "heads_left": HeadsLeft(tuple(before.numbers[head] for head in kept), before.original_heads),
        "_qkv_same_embed_dim": False,  # checked by PyTorch's layers before their fused path
    }
    changes = [Change(module, name, value) for name, value in own.items()]
    return joined([Cut(slices, changes), linear_cut(module.out_proj, columns=rows)])


def _additive(attn_mask: Tensor | None, padding: Tensor | None, query: Tensor) -> Tensor | None:
    """One additive mask, broadcastable to (B, H, L, S); in PyTorch's masks True means hidden."""
    batch, heads = query.shape[:2]
    if attn_mask is not None and attn_mask.dim() == 3:
        if attn_mask.shape[0] != batch * heads:
            raise ValueError(
                f"attn_mask: expected {batch * heads} masks, for {batch} items and {heads} remaining heads, got "
                f"{attn_mask.shape[0]}"
            )
        attn_mask = attn_mask.unflatten(0, (batch, heads))
    parts = [attn_mask, None if padding is None else padding[:, None, None]]
    added = [_scores(part, query) for part in parts if part is not None]
    return None if not added else added[0] if len(added) == 1 else added[0] + added[1]


def _scores(mask: Tensor, query: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(query.dtype)
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, -torch.inf)

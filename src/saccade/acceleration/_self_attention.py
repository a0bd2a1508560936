"""`nn.MultiheadAttention` of one sequence with itself.

Shape legend: B batch, L length, H heads, E width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..operator._products import unrounded
from ._fused_layers import ARGUMENTS, DROPOUT, NOT_CALLED, PROVED, REPLACED, FusedLayer
from ._linears import PackedLinear


class FusedSelfAttention(FusedLayer):
    """Self-attention by `nn.MultiheadAttention`, with one product for queries, keys and values."""

    kind = "nn.MultiheadAttention"

    def __init__(self, name: str, module: nn.MultiheadAttention, weights: str | None):
        super().__init__(name, module)
        self.projection = PackedLinear(module, weights, "in_proj_")
        self.output = PackedLinear(module.out_proj, weights)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.state not in (NOT_CALLED, PROVED):
            return self.plain(*args, **kwargs)
        if self.state == PROVED and not self.structure.keeps_values():
            self.state = NOT_CALLED
        try:
            out = self._computed(*args, **kwargs)
        except Exception as error:
            if self.state == PROVED:
                raise
            self.state = f"raises {type(error).__name__}"  # the model shall not notice
            out = None
        if out is not None and self.state == PROVED and not self._due():
            return out, None
        if out is None:
            return self.plain(*args, **kwargs)
        exact = out
        if self.rounds:  # the module itself is not in 8 bits
            with unrounded():
                exact = self._computed(*args, **kwargs)  # type: ignore[assignment]
        if self.state == PROVED:
            proved = self._prove_again(exact, self._again(args, kwargs))
            return (out if proved is exact else proved), None
        expected = self._observed(args, kwargs)
        if self.state == NOT_CALLED and self._accept(exact, expected):
            self._settle()
            return (out, None) if self.rounds else expected
        return expected

    def parts(self) -> list[nn.Module]:
        return list(self.module.modules())

    def _computed(
        self,
        query: Any,
        key: Any,
        value: Any,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Tensor | None:
        module: Any = self.module
        refused = self._why_not((query,))
        if refused is None and not (
            self.structure.intact() and module.bias_k is None and module.in_proj_weight is not None
        ):
            refused = self.state = REPLACED
        if need_weights:
            refused = refused or "was called for its weights (need_weights=True is the default)"
        if query is not key or key is not value:
            refused = refused or "was called with a query that is not the key and value"
        if refused is None and (query.dim() != 3 or query.dtype != module.in_proj_weight.dtype):
            refused = ARGUMENTS
        if module.training and module.dropout:
            refused = refused or DROPOUT
        if refused is not None:
            self._refuse(refused)
            return None
        batch, length, width = query.shape
        heads = module.num_heads
        masks = _merged(key_padding_mask, attn_mask, query, heads)
        parts = self.projection(query).view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], masks)
        return self.output(out.transpose(1, 2).reshape(batch, length, width))


def _merged(padding: Any, attn_mask: Any, query: Tensor, heads: int) -> Tensor | None:
    """Merges both masks of nn.MultiheadAttention (True or -inf hides) into one for F.scaled_dot_product_attention."""
    batch, length, _ = query.shape
    parts = []
    if padding is not None:
        parts.append(padding.view(batch, 1, 1, length))
    if attn_mask is not None:
        parts.append(attn_mask.view(-1, heads, length, length) if attn_mask.dim() == 3 else attn_mask)
    if not parts:
        return None
    if all(part.dtype == torch.bool for part in parts):
        return ~(parts[0] if len(parts) == 1 else parts[0] | parts[1])
    added = [torch.where(part, -torch.inf, 0.0).to(query) if part.dtype == torch.bool else part for part in parts]
    return added[0] if len(added) == 1 else added[0] + added[1]

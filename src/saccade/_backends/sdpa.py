"""PyTorch's own F.scaled_dot_product_attention, where it means the same and needs no dense mask nobody brought.

It lacks the lse, sinks, softcap, reproducible dropout, forward-mode and double derivatives, and promise (b) of the
contract's poison line: a NaN key reaches every row that F.sdpa multiplies with weight 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._biases import TensorBias
from .._call import Call
from .._masks import Causal, FromTensor, Padding


def refuses(call: Call) -> str | None:
    """Why F.sdpa cannot do this call, or None."""
    if call.needs_lse:
        return "F.scaled_dot_product_attention does not return the lse"
    if call.softcap is not None:
        return "F.scaled_dot_product_attention has no softcap"
    if call.sink is not None:
        return "F.scaled_dot_product_attention has no sink"
    if call.dropout is not None:
        return "its dropout cannot be reproduced from a seed and an index"
    if call.transformed:
        return "its fused kernels lack forward-mode and torch.func derivatives"
    return _refuses_bias(call) or _refuses_mask(call)


def _refuses_bias(call: Call) -> str | None:
    if call.bias is None:
        return None
    if not isinstance(call.bias, TensorBias):
        return f"{call.bias!r} would need a dense (Hq, Lq, Lk) tensor"
    if not (call.mask is None or isinstance(call.mask, FromTensor)):
        return "mask and bias together would need a dense tensor"
    if call.bias.parameter.dtype != call.query.dtype:
        return f"bias is {call.bias.parameter.dtype} and query {call.query.dtype}"
    return None


def _refuses_mask(call: Call) -> str | None:
    mask = call.mask
    if mask is None or isinstance(mask, (FromTensor, Padding)):
        return None
    if isinstance(mask, Causal):
        # F.sdpa's causal is top-left: the same only where the lengths agree.
        if call.length_q == call.length_k or call.length_q == 1:
            return None
        return f"its causal mask is top-left, and Lq = {call.length_q}, Lk = {call.length_k}"
    return f"{mask!r} would need a dense (Lq, Lk) mask"


def run(call: Call) -> tuple[Tensor, None]:
    """out (B, Hq, Lq, Dv) and no lse."""
    query, key, value = call.query, call.key, call.value
    causal = isinstance(call.mask, Causal) and call.length_q > 1
    allowed = None
    if isinstance(call.mask, (FromTensor, Padding)):
        allowed = _allowed(call)
        seen = allowed.any(-2, keepdim=True).transpose(-1, -2)  # (B|1, H|1, Lk, 1): some query sees the key
        query = torch.where(allowed.any(-1, keepdim=True), query, 0.0)
        key, value = (torch.where(_by_kv_head(seen, call), x, 0.0) for x in (key, value))
    scores = allowed
    if call.bias is not None:
        scores = call.bias.parameter
        if allowed is not None:
            scores = torch.where(allowed, scores, float("-inf"))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=scores, is_causal=causal, scale=call.scale, enable_gqa=call.heads != call.kv_heads
    )
    if scores is not None:
        # Kernels differ on rows without keys (0, NaN, a mean): the contract says 0, in value and gradient.
        visible = scores if scores.dtype == torch.bool else scores != float("-inf")
        out = torch.where(visible.any(-1, keepdim=True), out, 0.0)
    return out, None


def _allowed(call: Call) -> Tensor:
    """Boolean (B|1, H|1, Lq|1, Lk), no larger than what the caller brought."""
    assert call.mask is not None
    if isinstance(call.mask, Padding) and call.mask.queries is None:
        rows = torch.zeros(1, dtype=torch.int64, device=call.device)
    else:
        rows = torch.arange(call.length_q, device=call.device)
    keys = torch.arange(call.length_k, device=call.device)
    return call.mask._bits(rows, keys, call.length_q, call.length_k)


def _by_kv_head(seen: Tensor, call: Call) -> Tensor:
    """(B|1, Hq|1, Lk, 1) to (B|1, Hkv|1, Lk, 1): some query head of the group sees the key."""
    if seen.shape[1] == 1 or call.heads == call.kv_heads:
        return seen
    return seen.view(seen.shape[0], call.kv_heads, -1, *seen.shape[2:]).any(2)

"""PyTorch's F.scaled_dot_product_attention, for calls with the same meaning that need no dense mask but the caller's.

It lacks the lse, sinks, softcap, reproducible dropout, forward-mode and double derivatives, and promise (b) of the
contract's poison line: a NaN key reaches every row that F.sdpa multiplies with weight 0.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .._biases import TensorBias
from .._call import CheckedCall
from .._costs import DERIVATIVES_OF_PYTORCH, Costs, lacks_of_pytorch, lse_bytes, output_bytes
from .._masks import Causal, FromTensor, Padding
from .._scores._score import ModifiedScores
from .._tiles import by_kv_head

_SDPA = F.scaled_dot_product_attention  # PyTorch's own, whoever answers for it later: this backend may have been named
LINE = 64  # bytes: float32 and float64 matrices that begin on no such line are multiplied by other kernels


def refuses(call: CheckedCall) -> str | None:
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


def costs(call: CheckedCall) -> Costs:
    """Costs besides the output: copies of the inputs if a mask or bias may hide NaN, and scores if SDPA is not
    fused."""
    rows, size = call.length_q, call.query.element_size()
    half = isinstance(call.mask, Causal) and rows > 1
    hidden = scores = 0
    if call.bias is not None or isinstance(call.mask, (FromTensor, Padding)):
        hidden = sum(tensor.numel() for tensor in (call.query, call.key, call.value)) * size
    learns_bias = call.bias is not None and call.bias.parameter.requires_grad
    if call.query.shape[3] != call.value.shape[3] or learns_bias:
        scores = 2 * call.batch * call.heads * rows * call.length_k * size
    return Costs(
        (rows + 1) / (2 * rows) if half else 1.0,
        output_bytes(call) + lse_bytes(call) + hidden + scores,
        DERIVATIVES_OF_PYTORCH,
        lacks_of_pytorch(call),
    )


def second_best(call: CheckedCall) -> str | None:
    """Why `auto` leaves a call to `chunked` that F.sdpa could do, or None."""
    if call.device.type != "cpu":
        return None
    width, value_width = call.query.shape[3], call.value.shape[3]
    if width != value_width:
        return f"with D = {width} and Dv = {value_width} PyTorch forms the dense (Lq, Lk) weights"
    if call.bias is not None and call.bias.parameter.requires_grad and torch.is_grad_enabled():
        return "with a gradient to the bias PyTorch forms the dense (Lq, Lk) weights"
    if call.query.dtype.itemsize >= 4 and width * call.query.dtype.itemsize % LINE:
        return f"at a width of {width} a sample's bits depend on its batch mates there"
    return None


def _refuses_bias(call: CheckedCall) -> str | None:
    if call.bias is None:
        return None
    if isinstance(call.bias, ModifiedScores):
        return f"it can add to scores, and {call.bias!r} changes them"
    if not isinstance(call.bias, TensorBias):
        return f"{call.bias!r} would need a dense (Hq, Lq, Lk) tensor"
    if call.bias.parameter.dtype != call.query.dtype:
        return f"bias is {call.bias.parameter.dtype} and query {call.query.dtype}"
    if call.mask is None:
        return None
    if isinstance(call.mask, FromTensor):
        shapes = call.mask.tensor.shape, call.bias.parameter.shape
        whole = torch.broadcast_shapes(*shapes)
        if math.prod(whole) <= max(math.prod(shape) for shape in shapes):
            return None
    return "mask and bias together would need a larger dense tensor than either"


def _refuses_mask(call: CheckedCall) -> str | None:
    mask = call.mask
    if mask is None or isinstance(mask, (FromTensor, Padding)):
        return None
    if isinstance(mask, Causal):
        # F.sdpa's causal is top-left: the same only where the lengths agree.
        if call.length_q == call.length_k or call.length_q == 1:
            return None
        return f"its causal mask is top-left, and Lq = {call.length_q}, Lk = {call.length_k}"
    # What a compiler looks on is not printed: the reason goes nowhere, and a repr reads values on the host.
    told = type(mask).__name__ if torch.compiler.is_compiling() else repr(mask)
    return f"{told} would need a dense (Lq, Lk) mask"


def run(call: CheckedCall) -> tuple[Tensor, None]:
    """out (B, Hq, Lq, Dv) and no lse."""
    query, key, value = call.query, call.key, call.value
    scores, rows, keys = _seen(call)
    # What nobody may see is never read: a weight of 0 times NaN would be NaN, and so would its derivatives.
    if rows is not None:
        query = torch.where(rows, query, 0.0)
    if keys is not None:
        key, value = (torch.where(by_kv_head(keys, call.kv_heads), x, 0.0) for x in (key, value))
    # To torch.jit.trace sizes are tensors, and so is what compares them.
    causal = bool(isinstance(call.mask, Causal) and call.length_q > 1)
    grouped = bool(call.heads != call.kv_heads)
    out = _SDPA(query, key, value, attn_mask=scores, is_causal=causal, scale=call.scale, enable_gqa=grouped)
    if scores is not None and scores.requires_grad and 0 in (call.batch, call.length_q, call.length_k):
        # Where there is nothing to do, its graph leaves the attn_mask out, whose gradient is 0.
        out = torch.where(torch.zeros((), dtype=torch.bool, device=out.device), scores.sum(), out)
    # Kernels differ on rows without keys (0, NaN, a mean): the contract says 0, in value and gradient.
    return (out if rows is None else torch.where(rows, out, 0.0)), None


def _seen(call: CheckedCall) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """F.sdpa's attn_mask, the rows that see a key (B|1, H|1, Lq, 1), and the keys some row sees (B|1, H|1, Lk, 1).

    The attn_mask is no larger than what the caller brought; None if there is nothing to say.
    """
    if isinstance(call.mask, Padding):
        rows, keys = call.mask.sides(call.length_q, call.length_k, call.device)
        return keys[..., None, :], None if rows is None else rows[..., None], keys[..., None]
    allowed = call.mask.tensor if isinstance(call.mask, FromTensor) else None
    if call.bias is None and allowed is None:
        return None, None, None
    scores = allowed
    if call.bias is not None:
        scores = call.bias.parameter
        scores = scores if allowed is None else torch.where(allowed, scores, float("-inf"))
        allowed = scores.detach() != float("-inf")
    assert allowed is not None
    return scores, allowed.any(-1, keepdim=True), allowed.any(-2)[..., None]

"""PyTorch's compiled FlexAttention on CUDA: every mask and bias, softcap and lse, with block sparsity.

It lacks promise (b) of the contract's poison line, reproducible dropout, and forward-mode and double derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .._biases import RelativeScores, TensorBias
from .._call import CheckedCall, add_sink
from .._costs import DERIVATIVES_OF_PYTORCH, Costs, lacks_of_pytorch, lse_bytes, output_bytes, share_of_tiles
from .._scores._score import ModifiedScores
from .._tiles import KEYS, ROWS, by_kv_head


def refuses(call: CheckedCall) -> str | None:
    """Why FlexAttention cannot do this call, or None."""
    if call.device.type != "cuda":
        return f"FlexAttention is used on CUDA only, and query is on {call.device.type}"
    if call.query.dtype == torch.float64:
        return "FlexAttention has no float64"
    if call.dropout is not None:
        return "FlexAttention has no dropout"
    if min(call.batch, call.length_q, call.length_k) == 0:
        return "FlexAttention does not take empty inputs"
    if call.query.shape[3] < 16 or call.value.shape[3] < 16:
        return "FlexAttention wants at least 16 columns in key and value"
    if call.bias is not None and not isinstance(call.bias, (TensorBias, RelativeScores, ModifiedScores)):
        return f"FlexAttention is given no {type(call.bias).__name__}"
    if call.transformed:
        return "FlexAttention lacks forward-mode and torch.func derivatives"
    return None


def costs(call: CheckedCall) -> Costs:
    """Costs besides the output: copies of keys and values without the entries that a mask hides. Tiles are in the
    chip's own memory."""
    cleaned = 0 if call.mask is None else (call.key.numel() + call.value.numel()) * call.key.element_size()
    peak = output_bytes(call) + lse_bytes(call) + cleaned
    return Costs(share_of_tiles(call, ROWS, KEYS), peak, DERIVATIVES_OF_PYTORCH, lacks_of_pytorch(call))


def run(call: CheckedCall) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Lq, Dv) and lse (B, Hq, Lq) in float32."""
    return attend(call, _compiled())


def attend(call: CheckedCall, flex_attention: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """The call through a given flex_attention (compiled, or PyTorch's eager one)."""
    from torch.nn.attention.flex_attention import AuxRequest

    from .._masks import keys_seen

    query, key, value = call.query, call.key, call.value
    seen = keys_seen(call.mask, call.length_q, call.length_k, device=call.device) if call.mask is not None else None
    if seen is not None:
        shown = by_kv_head(seen, call.kv_heads)[..., None]
        key, value = torch.where(shown, key, 0.0), torch.where(shown, value, 0.0)
    out, aux = flex_attention(
        query,
        key,
        value,
        score_mod=_score_mod(call),
        block_mask=_block_mask(call),
        scale=call.scale,
        enable_gqa=call.heads != call.kv_heads,
        return_aux=AuxRequest(lse=True),
    )
    empty = aux.lse == float("-inf")
    out = torch.where(empty[..., None], 0.0, out)
    out, lse = add_sink(out.to(call.accumulator), aux.lse, call.sink)
    return out.to(call.query.dtype), lse


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # fullgraph: after too many shapes PyTorch would otherwise go on in eager mode, dense, without a word.
    return torch.compile(flex_attention, fullgraph=True)


def _block_mask(call: CheckedCall) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    mask, lengths = call.mask, (call.length_q, call.length_k)
    if mask is None:
        return None
    batch, heads = mask._batch_and_heads()

    def rule(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return mask._attends(b, h, row, key, *lengths)

    return create_block_mask(
        rule, call.batch if batch > 1 else None, call.heads if heads > 1 else None, *lengths, device=str(call.device)
    )


def _score_mod(call: CheckedCall) -> Callable[..., Tensor] | None:
    """softcap, then the bias or a `Score`, as one function of a score and its indices."""
    bias, softcap = call.bias, call.softcap
    if bias is None and softcap is None:
        return None
    if isinstance(bias, ModifiedScores):
        last = _modified_at(bias, call)
    else:
        added = None if bias is None else _bias_at(call)

        def last(score: Tensor, *pair: Tensor) -> Tensor:
            return score if added is None else score + added(*pair)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return last(score, b, h, row, key)

    return score_mod


def _modified_at(bias: ModifiedScores, call: CheckedCall) -> Callable[..., Tensor]:
    """A `Score` of one (score, b, h, row, key)."""
    placement, origin = call.placement, 0 if call.mask is None else call.mask._origin()[1]

    def modified(score: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        offset = placement if isinstance(placement, int) else placement[b]
        return bias._value(score, b, h, row + offset + origin, key + origin)

    return modified


def _bias_at(call: CheckedCall) -> Callable[..., Tensor]:
    """The bias of one (b, h, row, key), from its parameter."""
    bias, placement = call.bias, call.placement
    assert bias is not None
    parameter = bias.parameter
    if isinstance(bias, TensorBias):
        sizes = parameter.shape

        def entry(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            at = [
                index if size > 1 else torch.zeros_like(index)
                for index, size in zip((b, h, row, key), sizes, strict=True)
            ]
            return parameter[at[0], at[1], at[2], at[3]]

        return entry

    assert isinstance(bias, RelativeScores)
    relative_scores = bias

    def relative(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        offset = placement if isinstance(placement, int) else placement[b]
        return relative_scores._value(parameter, h, key - row - offset)

    return relative

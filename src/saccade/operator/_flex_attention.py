"""`flex_attention`: PyTorch's FlexAttention, argument for argument, on every device and with every gradient.

Shape legend: B batch, Hq query heads, Hkv key-value heads, Lq and Lk lengths, D width of query and key, Dv width of
value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._attention import attention, attention_with_lse
from ._block_masks import mask_of_blocks
from ._call import AttentionCall
from ._checks import check_inputs
from ._scores._score import Score
from ._statistics import statistics
from ._surroundings import describe, uncompiled

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
_BACKENDS = ("AUTO", "TRITON", "FLASH", "TRITON_DECODE")
_OWN = ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX")  # kernel options that PyTorch sets itself


@uncompiled("saccade.flex_attention looks at functions and at the values of masks, which a graph cannot")
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """`torch.nn.attention.flex_attention.flex_attention` with Saccade's kernels (Dong et al. 2024, arXiv 2412.05496).

        out_i = sum_j softmax_j(score_mod(scale * q_i.k_j, b, h, i, j)) v_j     over the keys j that block_mask shows

    Arguments mean what they mean in PyTorch: i and j count from 0 (top-left), h is the query head, and the score is
    float32 (float64 for float64). It trains on a CPU: gradients reach query, key, value and every tensor that
    `score_mod` captures, the same bits in every run, in memory linear in the lengths. `attention` takes the same
    functions in Saccade's own terms, `bias=Score(score_mod)` and `mask=Predicate(mask_mod)`. torch.compile breaks its
    graph here and goes on after it.

    Args:
        query: (B, Hq, Lq, D); float32, bfloat16, float16 or float64.
        key: (B, Hkv, Lk, D). With a block_mask for the query's B > 1 items, key and value may have a batch of 1.
        value: (B, Hkv, Lk, Dv).
        score_mod: `score_mod(score, b, h, q_idx, kv_idx) -> score`, of scalars; None leaves scores as they are.
        block_mask: a BlockMask of PyTorch. Full blocks are visible, partial ones where its mask_mod says so.
        scale: factor of the dot products; None is D ** -0.5.
        enable_gqa: whether Hq may be a multiple of Hkv.
        return_lse: also return the lse. PyTorch has deprecated it for return_aux.
        kernel_options: checked as in PyTorch; they choose among its GPU kernels and do nothing here.
        return_aux: `AuxRequest(lse=..., max_scores=...)` of PyTorch.

    Returns:
        out (B, Hq, Lq, Dv) in query's dtype. With return_lse (out, lse), with return_aux (out, AuxOutput), of which
        lse (B, Hq, Lq) is differentiable and max_scores (B, Hq, Lq), each row's greatest score, is not. Rows that see
        no key are 0, and their lse and max_scores -inf.

    Raises:
        TypeError: tensors of a wrong kind, a score_mod or block_mask that is none.
        ValueError: shapes, devices or lengths that do not fit, a function that indexes outside of its tensors.
        RuntimeError: a BlockMask that lost its mask_mod when it was sliced, as in PyTorch.

    Example:
        >>> import torch, saccade
        >>> query, key, value = torch.randn(3, 1, 2, 37, 16)
        >>> slopes = torch.tensor([0.5, 0.25], requires_grad=True)
        >>> def alibi(score, b, h, q_idx, kv_idx):
        ...     return score - slopes[h] * (q_idx - kv_idx).abs()
        >>> saccade.flex_attention(query, key, value, alibi).sum().backward()
        >>> slopes.grad.shape
        torch.Size([2])
    """
    check_options(return_lse, return_aux, kernel_options)
    call = flex_call(query, key, value, score_mod, block_mask, scale, enable_gqa)
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    given = (call.query, call.key, call.value)
    if wants_lse:
        out, lse = attention_with_lse(*given, **call.arguments())
    else:
        out, lse = attention(*given, **call.arguments()), None
    return flex_output(call, out, lse, query.dtype, return_aux)


def flex_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    scale: float | None,
    enable_gqa: bool,
) -> AttentionCall:
    """The call in Saccade's terms. Raises as `flex_attention`."""
    query, key, value = _tensors(query, key, value, enable_gqa, block_mask)
    batch, heads, rows, _ = query.shape
    mask = None
    if block_mask is not None:
        mask = mask_of_blocks(block_mask, batch, heads, (rows, key.shape[2]), query.device)
    if score_mod is not None and not callable(score_mod):
        raise TypeError(f"score_mod must be a function (score, b, h, q_idx, kv_idx) or None, got {describe(score_mod)}")
    bias = None
    if score_mod is not None:
        bias = Score(score_mod)
        bias._argument = "score_mod"
        bias = bias.at(0)
    return AttentionCall(query, key, value, mask, bias, scale)


def flex_output(
    call: AttentionCall,
    out: Tensor,
    lse: Tensor | None,
    dtype: torch.dtype,
    return_aux: AuxRequest | None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """The result of `flex_attention`; `lse` is None unless it is requested."""
    out = out if out.dtype == dtype or torch._C._is_any_autocast_enabled() else out.to(dtype)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse, max_scores=max_scores(call) if return_aux.max_scores else None)
    return out if lse is None else (out, lse)


def max_scores(call: AttentionCall) -> Tensor:
    """The greatest score of each row (B, Hq, Lq), -inf where it sees no key: that of the largest weight.

    log p = score - lse, in memory linear in the lengths.
    """
    rows = statistics(call.query, call.key, value=call.value, received=False, **call.scoring())
    return torch.where(rows.counted, rows.lse + torch.log(rows.largest), float("-inf"))


def check_options(return_lse: bool, return_aux: AuxRequest | None, options: Mapping[str, Any] | None) -> None:
    """Raise ValueError for options that PyTorch rejects, too; names of its GPU kernels' options are ignored."""
    if return_lse and return_aux is not None:
        raise ValueError("return_lse and return_aux cannot both be passed; use return_aux=AuxRequest(lse=True)")
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise TypeError(f"kernel_options must be a dict or None, got {describe(options)}")
    for name in _OWN:
        if name in options:
            raise ValueError(f"kernel_options: {name} follows from return_lse and return_aux, expected it left out")
    backend = options.get("BACKEND", "AUTO")
    if backend not in _BACKENDS:
        raise ValueError(f"kernel_options: BACKEND must be one of {', '.join(_BACKENDS)}, got {backend!r}")
    if "BACKEND" in options and options.get("FORCE_USE_FLEX_ATTENTION", False):
        raise ValueError("kernel_options: expected BACKEND or FORCE_USE_FLEX_ATTENTION, got both")


def _tensors(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, block_mask: BlockMask | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors in one dtype, with one batch size. Further checks are made by `attention`."""
    given = (query, key, value)
    if not all(isinstance(tensor, Tensor) and tensor.dim() == 4 for tensor in given):
        return check_inputs(*given)  # which says what is wrong
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} heads (axis 1), expected key's {key.shape[1]}; "
            "enable_gqa=True takes a multiple"
        )
    if key.shape[0] == value.shape[0] == 1 < query.shape[0]:
        key, value = _broadcast(query, key, value, block_mask)
    if not query.dtype == key.dtype == value.dtype and not torch._C._is_any_autocast_enabled():
        # As PyTorch, which takes keys and values of another precision and sums in float32.
        wide = torch.promote_types(query.dtype, torch.promote_types(key.dtype, value.dtype))
        query, key, value = query.to(wide), key.to(wide), value.to(wide)
    return query, key, value


def _broadcast(query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask | None) -> tuple[Tensor, Tensor]:
    batch = query.shape[0]
    items = None if block_mask is None else block_mask.kv_num_blocks.shape[0]
    if items != batch:
        raise ValueError(
            f"key has batch size 1, expected {batch} like query; batch size 1 is broadcast only with a block_mask made "
            f"for {batch} items, got {'no block_mask' if items is None else f'a block_mask made for {items}'}"
        )
    return key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)

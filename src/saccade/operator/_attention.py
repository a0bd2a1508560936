"""Attention, in one place: check the call, choose a backend, compute the call.

    out_i = sum_j softmax_j(softcap(scale * q_i.k_j) + bias_ij) v_j       over the keys j that the mask shows to query i

Shape legend: B batch, Hq query heads, Hkv key-value heads (Hq % Hkv == 0; query head h reads h // (Hq // Hkv)),
Lq and Lk lengths, D width of query and key, Dv width of value. (Vaswani et al. 2017, equation 1; grouped queries:
Ainslie et al. 2023.)

How `backend="auto"` chooses, first match (plain calls on a CPU go to `native.fast_forward` at once, as by rule 2, and
so do those that name "native"):

1. forward-mode tangents or a torch.func transform: `chunked`, the only fast path that has every derivative;
2. on a CPU, in float32, bfloat16 or float16, where this installation has its compiled kernels: `native`;
3. what F.scaled_dot_product_attention means exactly, without a dense mask that the caller did not give, and on a CPU
   only where it is fused (Dv = D, no gradient to a bias) and, in float32 and float64, D fills 64-byte lines: `sdpa`;
4. on CUDA, anything FlexAttention can do: `flex`;
5. everything else: `chunked`.

`explain()` says which and why; a named backend that cannot do the call raises ValueError: nothing falls back silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import _observers, _reference
from ._backends import chunked, flex, native, sdpa
from ._biases import Bias
from ._call import AttentionCall, CheckedCall
from ._checks import make_call
from ._dropout import Dropout
from ._int8_rows import Int8Rows
from ._masks import Mask
from ._masks._data import dense, traced
from ._scores._score import Score
from ._surroundings import uncompiled
from ._unknown_arguments import advised, named, refused, with_arguments_of

BACKENDS: dict[str, Any] = {
    "reference": _reference,
    "chunked": chunked,
    "native": native,
    "sdpa": sdpa,
    "flex": flex,
}


@named
def attention(
    query: Tensor,
    key: Tensor | Int8Rows,
    value: Tensor | Int8Rows,
    mask: Mask | Tensor | None = None,
    *,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float | Dropout = 0.0,
    backend: str = "auto",
    **unknown: NoReturn,
) -> Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1).

    With `mask=Causal()` and fewer queries than keys the queries are the last ones (bottom-right), as in decoding:

        Lq = 2, Lk = 4   # # # .        Lq = 4, Lk = 2   . .   empty rows: output 0, never NaN
                         # # # #                         . .
                                                         # .
                                                         # #

    Args:
        query: (B, Hq, Lq, D), any strides; float32, bfloat16, float16 or float64.
        key: (B, Hkv, Lk, D), the same dtype and device; or `saccade.nn.Int8Rows`, what a cache in 8 bits holds.
        value: (B, Hkv, Lk, Dv), likewise.
        mask: who sees whom, True = attend: a mask value (`Causal() & Window(64, 0)`), or a boolean tensor (Lq, Lk) or
            4-D broadcastable to (B, Hq, Lq, Lk). Additive scores go into `bias`.
        bias: added to the logits after scale and softcap: a tensor (Lq, Lk) or 4-D, `ALiBi` or `RelativeBias`; or a
            `Score`, a function of them. torch.compile breaks its graph at a call with a `Score`.
        scale: factor of the dot products; None is D ** -0.5.
        softcap: c > 0 turns a logit x into c * tanh(x / c) (Gemma 2).
        sink: (Hq,), one learned logit per query head, in the denominator only (GPT-OSS).
        dropout: probability in [0, 1) of dropping a weight, or `Dropout(p, seed)`.
        backend: "auto", "reference", "chunked", "native", "sdpa" or "flex". `explain` says what "auto" chooses.

    Returns:
        (B, Hq, Lq, Dv) in the input dtype. Rows that see no key are 0, and so are their gradients.

    Raises:
        TypeError: an argument that is not a tensor, a wrong or mixed dtype, a float tensor as mask.
        ValueError: ranks, sizes or devices that do not fit, a scale that is not finite, softcap <= 0, an unknown
            backend or one that cannot do this call (the message says why).

    Example:
        >>> import torch, saccade
        >>> query = torch.randn(1, 8, 5, 64)  # 8 query heads, 5 new tokens
        >>> key, value = torch.randn(2, 1, 2, 9, 64)  # 2 key-value heads, 9 tokens so far
        >>> saccade.attention(query, key, value, saccade.Causal() & saccade.Window(3, 0)).shape
        torch.Size([1, 8, 5, 64])
    """
    if unknown:
        raise refused(attention, unknown)
    if (
        backend in ("auto", "native")
        and not _observers.THREAD.observers
        and bias is None
        and softcap is None
        and sink is None
        and type(dropout) is float
        and not dropout
    ):
        out = native.fast_forward(query, key, value, mask, scale)
        if out is not None:
            return out
    options: dict[str, Any] = {"bias": bias, "scale": scale, "softcap": softcap, "sink": sink, "dropout": dropout}
    if _observers.THREAD.elsewhere is not None:
        found = _elsewhere(query, key, value, mask, backend=backend, **options)
        if found is not None:
            return found[0]
    if isinstance(key, Int8Rows) and isinstance(value, Int8Rows) and backend in ("auto", "native"):
        out = _attend_rows(query, key, value, mask, options)
        if out is not None:
            return out
    if isinstance(bias, Score) and torch.compiler.is_compiling():
        return _run_apart(query, key, value, mask, backend=backend, **options)[0]
    return run(make_call(query, key, value, mask, **options), backend)[0]


@with_arguments_of(attention)
def attention_with_lse(*args: Any, backend: str = "auto", **options: Any) -> tuple[Tensor, Tensor]:
    """`attention` and the log of each row's softmax denominator. Arguments and errors are those of `attention`.

    Returns:
        out (B, Hq, Lq, Dv) in the input dtype, and lse (B, Hq, Lq): natural log, float32 (float64 for float64),
        differentiable, -inf on rows that see no key (the sink where there is one).

    Example:
        >>> import torch, saccade
        >>> query, key, value = torch.randn(3, 1, 2, 5, 16)
        >>> out, lse = saccade.attention_with_lse(query, key, value)
        >>> torch.allclose(lse, torch.logsumexp(query @ key.mT / 4, dim=-1), atol=1e-5)
        True
    """
    if _observers.THREAD.elsewhere is not None:
        found = _elsewhere(*args, backend=backend, **options)
        if found is not None:
            return found
    if isinstance(options.get("bias"), Score) and torch.compiler.is_compiling():
        return _run_apart(*args, backend=backend, **options, needs_lse=True)
    return run(make_call(*args, **options, needs_lse=True), backend)


def _elsewhere(*args: Any, **options: Any) -> tuple[Tensor, Tensor] | None:
    """The result from `distributed`; None: the call is computed here, as those inside of another one are."""
    compute = _observers.THREAD.elsewhere if _observers.THREAD.observers else None
    return None if compute is None else compute(*args, **options)


def _attend_rows(query: Tensor, key: Int8Rows, value: Int8Rows, mask: Any, options: dict[str, Any]) -> Tensor | None:
    """Attention to keys and values in 8 bits as they stand; None where they must become floats first."""
    if _observers.THREAD.observers or not native.streams_rows(query, key, value):
        return None
    bias, scale, softcap, sink, dropout = options.values()
    if bias is None and softcap is None and sink is None and type(dropout) is float and not dropout:
        out = native.fast_rows(query, key, value, mask, scale)
        if out is not None:
            return out
    nothing = query.new_empty(())
    keys, values = nothing.expand(key.shape), nothing.expand(value.shape)  # what a check reads
    return native.attend_rows(make_call(query, keys, values, mask, **options), key, value)


@uncompiled("a Score is a function that Saccade traces itself: torch.compile breaks its graph at this call")
def _run_apart(*args: Any, backend: str, **options: Any) -> tuple[Tensor, Any]:
    return run(make_call(*args, **options), backend)


def run(call: CheckedCall, backend: str, source: str = "saccade.attention") -> tuple[Tensor, Any]:
    """out, and lse if the call needs it; the observers of this thread are notified of a call of `source`."""
    if not _observers.THREAD.observers:
        found: tuple[Tensor, Any] = choose(call, backend)[0].run(call)
        return found
    edits = _observers.edits_of(source)
    with _observers.aside() as observers:
        if edits is not None:
            return _edited(call, backend, source, edits, observers)
        out, lse = choose(call, backend)[0].run(call)
        _observers.notify(observers, call.observed(out, source))
    return out, lse


def _edited(
    call: CheckedCall,
    backend: str,
    source: str,
    edits: _observers.CallEdits,
    observers: tuple[_observers.Observer, ...],
) -> tuple[Tensor, Any]:
    if call.needs_lse:
        raise ValueError("intervene: attention_with_lse is not supported, because edits do not give the lse")

    def compute(changed: AttentionCall) -> Tensor:
        checked = make_call(changed.query, changed.key, changed.value, **changed.arguments())
        out: Tensor = choose(checked, backend)[0].run(checked)[0]
        return out

    return _observers.notify_edited(observers, edits.answered(call, compute), source), None


def choose(call: CheckedCall, backend: str) -> tuple[Any, str, str]:
    """(module, its name, the reason for the choice). The rules are at the top of this file."""
    if backend != "auto":
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of auto, {', '.join(BACKENDS)}; got {backend!r}")
        reason = BACKENDS[backend].refuses(call)
        if reason is not None:
            raise ValueError(f"backend {backend!r} cannot do this call: {reason}")
        return BACKENDS[backend], backend, "named by the caller"
    if call.transformed:
        return chunked, "chunked", "forward-mode or torch.func derivatives are being taken"
    not_native = native.refuses(call)
    if not_native is None:
        return native, "native", "Saccade's own kernels for CPUs take this call"
    # A trace has sdpa or nothing: chunked's own derivatives are no part of it.
    not_sdpa = sdpa.refuses(call) or (None if traced() else sdpa.second_best(call))
    if not_sdpa is None:
        return sdpa, "sdpa", "PyTorch's fused kernel means exactly this call"
    if flex.refuses(call) is None:
        return flex, "flex", f"on CUDA, and not sdpa: {not_sdpa}"
    return chunked, "chunked", f"not sdpa: {not_sdpa}"


@advised
def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint key sets from the attention over each.

        lse = log sum_n exp(lse_n)        out = sum_n exp(lse_n - lse) out_n

    Args:
        parts: (out (B, Hq, Lq, Dv), lse (B, Hq, Lq)) pairs of the same queries over disjoint keys, as
            `attention_with_lse` returns them. The mask of a part is `mask.slice(rows, keys)` of the whole one. A sink
            goes into exactly one part.

    Returns:
        out in the parts' dtype and lse, float32 at least; sums are taken in float32 at least. Rows that are empty in
        all parts give (0, -inf).

    Raises:
        ValueError: no parts, or shapes, dtypes or devices that differ.
        TypeError: a part that is not a pair of floating-point tensors.

    Example:
        >>> import torch, saccade
        >>> query, key, value = torch.randn(3, 1, 2, 6, 16)
        >>> first = saccade.attention_with_lse(query, key[:, :, :4], value[:, :, :4])
        >>> rest = saccade.attention_with_lse(query, key[:, :, 4:], value[:, :, 4:])
        >>> out, lse = saccade.merge([first, rest])
        >>> torch.allclose(out, saccade.attention(query, key, value), atol=1e-5)
        True
    """
    outs, lses = _check_parts(parts)
    wide = torch.promote_types(outs[0].dtype, torch.float32)
    lse = torch.stack([part.to(wide) for part in lses])
    top = lse.detach().amax(0)
    pivot = torch.where(top == float("-inf"), 0.0, top)
    weight = torch.exp(lse - pivot)
    total = weight.sum(0)
    empty = total == 0
    some = torch.where(empty, 1.0, total)
    # A part a row sees nothing of has weight 0: whatever its output holds there is not read, here or in the backward.
    read = [torch.where((w != 0)[..., None], out, 0.0).to(wide) for w, out in zip(weight, outs, strict=True)]
    out = torch.stack([part * (w / some)[..., None] for w, part in zip(weight, read, strict=True)]).sum(0)
    return out.to(outs[0].dtype), torch.where(empty, float("-inf"), pivot + torch.log(some))


def _check_parts(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    if not isinstance(parts, Sequence):
        raise TypeError(f"merge: parts must be a sequence of (out, lse) pairs, got {type(parts).__name__}")
    pairs = list(parts)
    if not pairs:
        raise ValueError("merge: parts must hold at least one (out, lse) pair, got none")
    for number, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(isinstance(x, Tensor) for x in pair):
            raise TypeError(f"merge: part {number} must be a pair of tensors (out, lse), got {type(pair).__name__}")
        out, lse = pair
        for tensor in pair:
            dense(tensor, f"merge: part {number}")
        if not (out.is_floating_point() and lse.is_floating_point()):
            raise TypeError(f"merge: part {number} must be floating point, got {out.dtype} and {lse.dtype}")
        if out.dim() != 4 or lse.shape != out.shape[:3]:
            raise ValueError(
                f"merge: part {number} must be out (B, Hq, Lq, Dv) and lse (B, Hq, Lq), "
                f"got {tuple(out.shape)} and {tuple(lse.shape)}"
            )
        first = pairs[0][0]
        if (out.shape, out.dtype, out.device) != (first.shape, first.dtype, first.device) or lse.device != out.device:
            raise ValueError(
                f"merge: part {number} is {tuple(out.shape)} {out.dtype} on {out.device}, "
                f"expected part 0's {tuple(first.shape)} {first.dtype} on {first.device}"
            )
    return [out for out, _ in pairs], [lse for _, lse in pairs]

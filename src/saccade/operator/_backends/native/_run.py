"""Saccade's own kernels for CPUs: every mask and bias, forward and backward, in linear memory.

    s_ij = softcap(scale q_i.k_j) + bias_ij     lse_i = log(exp(sink) + sum_j exp s_ij)      p_ij = exp(s_ij - lse_i)
    out_i = sum_j p_ij v_j                      ds_ij = p_ij (do_i.v_j - delta_i),  delta_i = do_i.out_i - dlse_i

Eager calls go through an autograd.Function of the old form, whose `forward` takes the context: `setup_context` costs
37 us a call, more than the attention of a small model. Compilers and dispatch modes see the operator of `_operator.py`.
Derivatives of the backward pass are `chunked`'s, computed again from the inputs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from ..._biases import RelativeScores, TensorBias
from ..._call import CheckedCall, add_sink, sink_lse
from ..._costs import BY_CHUNKED, Costs, lse_bytes, output_bytes, share_of_tiles
from ..._int8_rows import Int8Rows
from ..._masks import Causal, Mask
from ..._scores._program import ProgramBias
from ..._tiles import TileProblem
from .. import chunked
from . import _kernels, _operator
from ._kernels import TYPES, KernelSettings, Tensors
from ._lowering import native_mask
from ._program import unsayable

_CPU = torch.device("cpu")
_FAR = 2**16
_GRAIN = 64  # rows and keys of the blocks that are left out or computed (about: it depends on the instruction set)


def refuses(call: CheckedCall) -> str | None:
    """Why the kernels cannot do this call, or None."""
    if _kernels.module is None:
        return _kernels.missing
    if call.device.type != "cpu":
        return f"the native kernels run on a CPU, and query is on {call.device.type}"
    if call.query.dtype not in TYPES:
        return f"the native kernels have float32, bfloat16 and float16, and query is {call.query.dtype}"
    if call.transformed:
        return "the native kernels lack forward-mode and torch.func derivatives"
    if watched():
        return _operator.refuses(call)
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace does not see what the native kernels do"
    if isinstance(call.bias, ProgramBias):
        sizes = call.batch, call.heads, call.length_q, call.length_k
        reason = unsayable(call.bias, sizes, call.placement, 0 if call.mask is None else call.mask._origin()[1])
        if reason is not None:
            return reason
    elif call.bias is not None and not isinstance(call.bias, (TensorBias, RelativeScores)):
        return f"the native kernels know no {type(call.bias).__name__}"
    if isinstance(call.bias, RelativeScores) and isinstance(call.placement, Tensor):
        low, high = _kernels.extent(call.placement) if call.batch else (0, 0)
        if high - low > _FAR + 8 * (call.length_q + call.length_k):
            return "the bias's items stand so far apart that one line of scores for all would not be small"
    if not all(is_plain(tensor) or is_plain(tensor.resolve_neg()) for tensor in call.tensors()):
        return "a tensor is of a kind of its own (a subclass that dispatches, a batch of torch._vmap_internals)"
    return None


def costs(call: CheckedCall) -> Costs:
    """Costs besides the output: keys and values in the order of the kernels, and one score per distance."""
    # bf16 products take bf16; everything else is packed as float32.
    size = 2 if call.query.dtype == torch.bfloat16 and _kernels.instructions() in _kernels.BF16_SETS else 4
    packed = call.batch * call.kv_heads * call.length_k * (call.query.shape[3] + call.value.shape[3]) * size
    line = call.heads * (call.length_q + call.length_k) * 4 if isinstance(call.bias, RelativeScores) else 0
    again = "a gradient that has derivatives itself (create_graph=True) is computed by chunked from the inputs"
    peak = output_bytes(call) + lse_bytes(call) + packed + line
    return Costs(share_of_tiles(call, _GRAIN, _GRAIN), peak, (BY_CHUNKED, again))


def watched() -> bool:
    """Whether a compiler or a dispatch mode needs operators instead of direct kernel calls."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def run(call: CheckedCall) -> tuple[Tensor, Tensor | None]:
    """out (B, Hq, Lq, Dv) in the input dtype, and lse (B, Hq, Lq) in float32 if requested."""
    if watched():
        return _operator.run(call)
    settings = KernelSettings.of(call, lowered(call.mask, call.query, call.key))
    parameter = None if call.bias is None else call.bias.parameter
    return attend(settings, call.needs_lse, call.query, call.key, call.value, parameter, call.sink)


def fast_forward(query: Any, key: Any, value: Any, mask: Any, scale: Any) -> Tensor | None:
    """Compute a call without bias, sink, softcap, dropout and lse; None for any call that is not ordinary.

    The full way makes and asks objects for some 20 us, as long as F.scaled_dot_product_attention needs for all its work
    at L = 16. Only the full way reports errors; this function recognises some correct calls.
    """
    if _kernels.module is None or interrupted() or not (is_plain(query) and is_plain(key) and is_plain(value)):
        return None
    shapes = shape, key_shape, value_shape = query.shape, key.shape, value.shape
    if not len(shape) == len(key_shape) == len(value_shape) == 4 or 0 in shape or 0 in key_shape:
        return None
    batch, heads, rows, width = shape
    kv_heads, keys, value_width = value_shape[1:]
    if key_shape != (batch, kv_heads, keys, width) or value_shape[0] != batch or heads % kv_heads:
        return None
    dtype, strides = query.dtype, (query.stride(), key.stride(), value.stride())
    if not (
        key.dtype is dtype is value.dtype and dtype in TYPES and strides[0][3] == strides[1][3] == strides[2][3] == 1
    ):
        return None
    if scale is None:
        scale = width**-0.5
    elif type(scale) is not float or scale - scale != 0.0:  # an infinity or NaN
        return None
    seen = None
    if type(mask) is Causal:
        seen = _causal(rows, keys)
    elif isinstance(mask, Mask):
        if mask._remembered("fits", (rows, keys)) != (batch, heads):  # else another layer has asked
            mask.check(batch, heads, rows, keys, _CPU)
            mask._remember("fits", (rows, keys), (batch, heads))
        seen = native_mask(mask, rows, keys)
    elif mask is not None:
        return None
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        settings = KernelSettings(mask, None, 0, scale, None, None, seen)
        return _NativeAttention.apply(settings, False, query, key, value, None, None)
    out = torch.empty_like(query) if width == value_width else _kernels.output_for(query, value_width)
    out_strides = out.stride()
    if out_strides[3] != 1:  # what a query with overlapping rows may lead to
        return None
    _kernels.module.forward(
        _kernels.problem(*shapes, TYPES[dtype], scale, seen),
        (query.data_ptr(), strides[0]),
        (key.data_ptr(), strides[1]),
        (value.data_ptr(), strides[2]),
        (out.data_ptr(), out_strides),
        0,
    )
    return out


def interrupted() -> bool:
    """Whether a compiler, a transform, a mode or autocast has to process the call."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_any_autocast_enabled()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


# What PyTorch's dispatcher knows of a tensor: of an ordinary one on a CPU, and of one made in inference mode. All else
# (other devices and layouts, lazy negation, wrappers of transforms, subclasses that dispatch) has other keys.
with torch.inference_mode(False):  # this module may be imported by a first call within it
    _PLAIN = torch._C._dispatch_keys(torch.empty(0))
with torch.inference_mode():
    _INFERENCE = torch._C._dispatch_keys(torch.empty(0))


def is_plain(tensor: Any) -> bool:
    """Whether this is an ordinary dense tensor in a CPU's memory."""
    if type(tensor) not in (Tensor, Parameter):
        return False
    keys = torch._C._dispatch_keys(tensor)
    return keys in (_PLAIN, _INFERENCE)


@lru_cache(64)
def _causal(rows: int, keys: int) -> Any:
    """The kernels' form of `Causal()`, which has no state and is often made anew for each call."""
    return native_mask(Causal(), rows, keys)


def lowered(mask: Mask | None, query: Tensor, key: Tensor | Int8Rows) -> Any:
    """The mask in the kernels' form; None if there is no mask."""
    rows, keys = query.shape[2], key.shape[2]
    return None if mask is None else _causal(rows, keys) if type(mask) is Causal else native_mask(mask, rows, keys)


def attend(
    settings: KernelSettings,
    needs_lse: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameter: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """out and, where needed, lse; through autograd only if an input requires a gradient."""
    given = (query, key, value, parameter, sink)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given):
        found = _NativeAttention.apply(settings, needs_lse, *given)
        return found if needs_lse else (found, None)
    out, lse = _forward(settings, needs_lse, *given)
    return out, None if lse is None else sink_lse(lse[0], sink)


def _forward(settings: KernelSettings, needs_lse: bool, *given: Any) -> tuple[Tensor, Tensor | None]:
    try:
        return _kernels.forward(settings, needs_lse, *given)
    except IndexError:
        _chunked(settings, *given)  # whose error says which index of which tensor
        raise


class _NativeAttention(torch.autograd.Function):
    """(query, key, value, parameter, sink) -> out or (out, lse)."""

    @staticmethod
    def forward(ctx: Any, settings: KernelSettings, needs_lse: bool, *given: Any) -> Any:
        out, lse = _forward(settings, True, *given)
        assert lse is not None
        ctx.settings = settings
        ctx.save_for_backward(*given, out, lse)
        ctx.set_materialize_grads(False)
        return (out, sink_lse(lse[0], given[4])) if needs_lse else out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        *given, out, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled() or not (ordinary(d_out) and ordinary(d_lse)):
            return None, None, *_by_chunked(ctx.settings, given, wanted, d_out, d_lse)
        return None, None, *_kernels.backward(ctx.settings, given, wanted, out, lse, d_out, d_lse)


def ordinary(cotangent: Tensor | None) -> bool:
    """Whether no transform wraps the cotangent, so that its memory holds its values."""
    return cotangent is None or not (
        torch._C._are_functorch_transforms_active() or torch._C._functorch.is_legacy_batchedtensor(cotangent)
    )


def _by_chunked(
    settings: KernelSettings, given: Tensors, wanted: tuple[bool, ...], d_out: Tensor | None, d_lse: Tensor | None
) -> Tensors:
    """The gradients as `chunked` computes them from the inputs, so that they can be differentiated again."""
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views: in attention(x, x, x) one tensor stands in three places, and each has a gradient of its own here.
        views = [None if x is None else x.view_as(x) for x in given]
        found = _chunked(settings, *views)
        asked = [view for view, want in zip(views, wanted, strict=True) if want and view is not None]
        pairs = [(x, c) for x, c in zip(found, (d_out, d_lse), strict=True) if c is not None and x.requires_grad]
        outputs, cotangents = [x for x, _ in pairs], [c for _, c in pairs]
        grads = iter(torch.autograd.grad(outputs, asked, cotangents, create_graph=create, allow_unused=True))
    return [next(grads) if want else None for want in wanted]


def _chunked(
    settings: KernelSettings, query: Any, key: Any, value: Any, parameter: Any, sink: Any
) -> tuple[Tensor, Tensor]:
    problem = TileProblem.with_settings(settings, query, key).guard_if(query, key, value, parameter)
    out, lse = add_sink(*chunked.attend(problem, query, key, value, parameter), sink)
    return out.to(query.dtype), lse

"""The native kernels as operators of PyTorch's library: what torch.compile and torch.export put into their graphs.

A graph holds tensors and numbers, so a call comes apart here and is put together again inside: the mask as the program
and tables of `_lowering.py`, of which the work list is made at run time; a bias as its parameter and a few numbers;
dropout as p and a tensor with the seed.

Shape legend: B batch, Hq / Hkv heads, Lq / Lk lengths, D and Dv widths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._biases import ALiBi, Bias, RelativeBias, RelativeScores, TensorBias
from ..._call import CheckedCall, sink_lse
from ..._dropout import Dropout, GraphDropout
from . import _kernels
from ._kernels import KernelSettings
from ._lowering import MaskProgram, built, is_structured, lower

Tensors = tuple[Tensor, ...]

# The mask is `program` and `tables`; `form` is the bias's, and its rows stand at `placement`, or at `placements` (B,);
# `origin` is the row and key of the whole problem at which this one begins. No list of numbers is ever empty: PyTorch's
# autograd would take it for a list of tensors.
_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? parameter, Tensor? sink, SymInt[]? program, Tensor[] tables, "
    "int[] form, SymInt placement, Tensor? placements, float scale, float softcap, float p, Tensor? seed, "
    "SymInt[] origin"
)
_OUTPUTS = "(Tensor out, Tensor kept, Tensor lse)"  # kept: what `_kernels.backward` wants as lse
_PULLED = f"{_INPUTS}, Tensor out, Tensor lse, Tensor? d_out, Tensor? d_lse, bool[] wanted"
_GRADIENTS = "(Tensor query, Tensor key, Tensor value, Tensor parameter, Tensor sink)"
_LEAVES, _COUNT = 5, 15  # of the inputs, so many may have a gradient, and so many there are
_NONE, _DENSE, _ALIBI, _RELATIVE = 0, 1, 2, 3  # forms of a bias

torch.library.define("saccade::attention", f"({_INPUTS}) -> {_OUTPUTS}")
torch.library.define("saccade::attention_backward", f"({_PULLED}) -> {_GRADIENTS}")


def refuses(call: CheckedCall) -> str | None:
    """Why a graph cannot hold this call, or None."""
    if call.bias is not None and type(call.bias) not in (TensorBias, ALiBi, RelativeBias):
        return f"{type(call.bias).__name__} is unknown to the operator that compiled graphs hold"
    if call.mask is not None and not is_structured(call.mask):
        return f"{type(call.mask).__name__} must be computed for these lengths, which a graph cannot hold"
    return None


def run(call: CheckedCall) -> tuple[Tensor, Tensor]:
    """out in the input dtype, and lse (B, Hq, Lq), the sink in it, in float32."""
    bias, mask, dropout = call.bias, call.mask, call.dropout
    program, tables = (None, []) if mask is None else lower(mask, call.length_q, call.length_k)
    placement: Any = call.placement if isinstance(bias, RelativeScores) else 0
    placements = placement if isinstance(placement, Tensor) else None
    seed, origin = None, (0, 0, 0)
    if dropout is not None:
        seed = dropout.seed if isinstance(dropout, GraphDropout) else torch.tensor([_signed(dropout.seed)])
        origin = call.origin
    out, _, lse = torch.ops.saccade.attention(
        call.query,
        call.key,
        call.value,
        None if bias is None else bias.parameter,
        call.sink,
        program,
        tables,
        _form(bias),
        placement if placements is None else 0,
        placements,
        call.scale,
        call.softcap or 0.0,
        0.0 if dropout is None else dropout.p,
        seed,
        list(origin),
    )
    return out, lse


def _signed(seed: int) -> int:
    """The low 64 bits of a seed as an int64."""
    low = seed & (2**64 - 1)
    return low - 2**64 if low >= 2**63 else low


def _form(bias: Bias | None) -> list[int]:
    if isinstance(bias, RelativeBias):
        return [_RELATIVE, bias.count, int(bias.bidirectional), bias.max_distance]
    return [_NONE if bias is None else _ALIBI if isinstance(bias, ALiBi) else _DENSE]


def _bias(form: list[int]) -> Bias | None:
    """A bias of that form, without its parameter."""
    if form[0] == _NONE:
        return None
    kinds: dict[int, type[Bias]] = {_DENSE: TensorBias, _ALIBI: ALiBi, _RELATIVE: RelativeBias}
    bias = object.__new__(kinds[form[0]])
    if isinstance(bias, RelativeBias):
        bias.count, bias.bidirectional, bias.max_distance = form[1], bool(form[2]), form[3]
    return bias


# --- forward ------------------------------------------------------------------------------------------------------


def _settings(*given: Any) -> KernelSettings:
    rows, keys = given[0].shape[2], given[1].shape[2]
    program, tables, form, placement, placements, scale, softcap, p, seed, origin = given[_LEAVES:_COUNT]
    lowered = None if program is None else built(MaskProgram(list(program), list(tables)), rows, keys)
    dropout = None if seed is None else Dropout(p, int(seed))
    placed = placement if placements is None else placements
    return KernelSettings(None, _bias(form), placed, scale, softcap or None, dropout, lowered, tuple(origin))


@torch.library.impl("saccade::attention", "CPU")
def _forward(*given: Any) -> Tensors:
    sink = given[4]
    out, kept = _kernels.forward(_settings(*given), True, *given[:_LEAVES])
    assert kept is not None
    return out, kept, kept[0].clone() if sink is None else sink_lse(kept[0], sink)  # outputs may not share memory


@torch.library.register_fake("saccade::attention")  # type: ignore[untyped-decorator]
def _forward_shapes(*given: Any) -> Tensors:
    query, value = given[0], given[2]
    kept = query.new_empty((2, *query.shape[:3]), dtype=torch.float32)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    return _kernels.output_for(_kernels.readable(query), value.shape[3]), kept, lse


# --- backward -----------------------------------------------------------------------------------------------------


@torch.library.impl("saccade::attention_backward", "CPU")
def _backward(*given: Any) -> Tensors:
    out, lse, d_out, d_lse, wanted = given[_COUNT:]
    found = _kernels.backward(_settings(*given), list(given[:_LEAVES]), tuple(wanted), out, lse, d_out, d_lse)
    return tuple(lse.new_empty(0) if gradient is None else gradient for gradient in found)


@torch.library.register_fake("saccade::attention_backward")  # type: ignore[untyped-decorator]
def _backward_shapes(*given: Any) -> Tensors:
    leaves, lse, wanted = given[:_LEAVES], given[_COUNT + 1], given[-1]
    made = []
    for number, (leaf, want) in enumerate(zip(leaves, wanted, strict=True)):
        if not want:
            made.append(lse.new_empty(0))
        else:
            made.append(_kernels.like(_kernels.readable(leaf)) if number < 3 else leaf.new_empty(leaf.shape))
    return tuple(made)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    program, tables, form, placement, placements, scale, softcap, p, seed, origin = inputs[_LEAVES:]
    ctx.save_for_backward(*inputs[:_LEAVES], *tables, placements, seed, *output[:2])
    ctx.numbers = program, form, placement, scale, softcap, p, origin
    ctx.set_materialize_grads(False)


def _pull(ctx: Any, d_out: Tensor | None, _: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    *saved, placements, seed, out, kept = ctx.saved_tensors
    leaves, tables = saved[:_LEAVES], saved[_LEAVES:]
    program, form, placement, scale, softcap, p, origin = ctx.numbers
    wanted = list(ctx.needs_input_grad[:_LEAVES])
    found = torch.ops.saccade.attention_backward(
        *leaves,
        program,
        tables,
        form,
        placement,
        placements,
        scale,
        softcap,
        p,
        seed,
        origin,
        out,
        kept,
        d_out,
        d_lse,
        wanted,
    )
    grads = [gradient if want else None for gradient, want in zip(found, wanted, strict=True)]
    return (*grads, None, [None] * len(tables), *[None] * (_COUNT - _LEAVES - 2))


torch.library.register_autograd("saccade::attention", _pull, setup_context=_save)

"""The native step of decoding: one token of each item through blocks of a decoder, in one call (`native/step.h`).

Nothing is kept from call to call: each step reads the addresses of all weights anew, so nothing can be stale. Who asks
for a step finds out whether a block computes nothing but what `Block` describes; `NotNative` says why not.

Shape legend: R items, E width, Hq / Hkv query and key-value heads, D, Dv key and value width, F hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import _observers
from ._backends.native import _kernels
from ._backends.native._run import interrupted, is_plain
from ._call import ObservedCall
from ._groups import GroupedWeight
from ._int8 import Int8Weight
from ._int8_rows import SCALE_BYTES
from ._products import FEW, compares, unfollowed

ACTIVATIONS = {"gelu": 0, "gelu_tanh": 1, "relu": 2, "silu": 3}
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_CALL = nn.Module.__call__
_OF_ALL = torch.nn.modules.module


class NotNative(Exception):
    """Why a step is not computed natively."""


@dataclass
class Norm:
    """A norm of rows: `kind` 1 is RMS, 2 has a mean; times `plus + weight`."""

    kind: int = 0
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 0.0
    plus: float = 0.0


@dataclass
class Matrix:
    """A weight (F, E), as it is or rounded to integers, and its bias (F,)."""

    weight: Tensor | Int8Weight | GroupedWeight
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(F, E); (-1, -1) for a tensor that is no matrix."""
        weight = self.weight
        if not isinstance(weight, Tensor):
            return weight.features, weight.width
        return (weight.shape[0], weight.shape[1]) if weight.dim() == 2 else (-1, -1)


@dataclass
class Block:
    """The description of a block, `StepLayer` in native/call.h. Without a `key`, `query` is the joined projection."""

    attention_norm: Norm
    query: Matrix
    output: Matrix
    heads: int
    kv_heads: int
    width: int
    value_width: int
    scale: float
    key_cache: Tensor  # (R, Hkv, slots, D); or the data of `Int8Rows`, which both caches are then
    value_cache: Tensor
    key: Matrix | None = None
    value: Matrix | None = None
    query_norm: Norm = field(default_factory=Norm)
    key_norm: Norm = field(default_factory=Norm)
    after_attention: Norm = field(default_factory=Norm)
    feed_forward_norm: Norm = field(default_factory=Norm)
    after_feed_forward: Norm = field(default_factory=Norm)
    up: Matrix | None = None
    gate: Matrix | None = None
    down: Matrix | None = None
    activation: str = "gelu"
    parallel: bool = False
    waves: tuple[Tensor, Tensor] | None = None  # cos and sin, (1 or R, at least pairs)
    pairs: int = 0
    interleaved: bool = False
    window: int = 0  # keys that a query sees; 0: all
    first: Tensor | None = None  # int64 (R,): the first key that a query sees, in place of a window
    sink: Tensor | None = None
    softcap: float = 0.0
    seen: tuple[Tensor, Tensor] | None = None  # of an observed call: query (R, Hq, 1, D) and output (R, Hq, 1, Dv)

    def observed(self, held: int, source: str, **more: Any) -> ObservedCall:
        """The attention call of a step computed while attention is observed, with `held` keys and `more` fields."""
        assert self.seen is not None
        query, out = self.seen
        key, value = self.key_cache.narrow(2, 0, held), self.value_cache.narrow(2, 0, held)
        options: dict[str, Any] = dict(scale=self.scale, softcap=self.softcap or None, sink=self.sink)
        return ObservedCall(query, key, value, out=out, source=source, **options, **more)


def check_call(x: Tensor) -> None:
    """Raise `NotNative` unless x (R, 1, E) is a step that nobody edits, differentiates or follows but by observing."""
    if _kernels.module is None:
        raise NotNative(_kernels.missing)
    if torch.is_grad_enabled() or interrupted() or not unfollowed():
        raise NotNative("gradients are recorded, or a mode or a compiler reads the call")
    if compares():
        raise NotNative("products are compared")
    if _observers.THREAD.editor is not None:
        raise NotNative("attention is edited")
    if nn.Module.__call__ is not _CALL or _OF_ALL._global_forward_hooks or _OF_ALL._global_forward_pre_hooks:
        raise NotNative("all modules have hooks")
    if not is_plain(x) or x.dtype not in DTYPES or not 0 < x.shape[0] <= FEW:
        raise NotNative(f"a step takes up to {FEW} items in float32 or bfloat16 on a CPU")


def check_bare(module: nn.Module, kind: type[nn.Module], forward: Any) -> dict[str, Any]:
    """The children of a module; raises `NotNative` if it has hooks or anything but the forward of its class."""
    own = module.__dict__
    if type(module) is not kind or kind.forward is not forward or "forward" in own:
        raise NotNative(f"a {type(module).__name__} with a forward of its own")
    hooks = own["_forward_hooks"], own["_forward_pre_hooks"]
    if any(hooks) and not _observers.passive(*hooks):
        raise NotNative(f"a {kind.__name__} has hooks")
    children: dict[str, Any] = own["_modules"]
    return children


def run(x: Tensor, held: list[int], blocks: list[Block], last: Norm) -> Tensor:
    """x (R, 1, E) through the blocks and the last norm; each cache gets the new token in slot `held[r] - 1`.

    Raises:
        NotNative: if a weight is of another kind, or a number that is not finite came to a product of bytes.
    """
    x = x.contiguous()
    kept: list[Any] = []  # what the addresses are of
    rows = [_row(block, x, max(held), kept) for block in blocks]
    norm, reals = _norm(last, x.shape[2], x)
    out = torch.empty_like(x)
    try:
        odd = _kernels.module.step(
            x.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.shape[2],
            DTYPES[x.dtype],
            held,
            [row for row, _ in rows] + [norm],
            [real for _, real in rows] + [reals],
            torch.get_num_threads(),
        )
    except ValueError as error:  # sizes that do not fit together: the modules say which
        raise NotNative(str(error)) from None
    if odd:
        raise NotNative("numbers that are not finite came to a product of bytes")
    return out


def _row(block: Block, x: Tensor, held: int, kept: list[Any]) -> tuple[list[int], list[float]]:
    """The fields of a layer, in the order of `step` in native/bindings.cpp."""
    model, head, hidden = x.shape[2], block.width, 0 if block.down is None else block.down.shape[1]
    read = block.heads * block.value_width
    norms = (
        *((block.attention_norm, model), (block.query_norm, head), (block.key_norm, head)),
        *((block.after_attention, model), (block.feed_forward_norm, model), (block.after_feed_forward, model)),
    )
    matrices = (
        *((block.query, model), (block.key, model), (block.value, model), (block.output, read)),
        *((block.up, model), (block.gate, model), (block.down, hidden)),
    )
    numbers: list[int] = []
    reals: list[float] = []
    for norm, width in norms:
        row, real = _norm(norm, width, x)
        numbers += row
        reals += real
    for matrix, width in matrices:
        numbers += _matrix(matrix, width, x, kept)
    numbers += [block.heads, block.kv_heads, head, block.value_width, hidden, block.window]
    if block.waves is None:
        numbers += [0, 0, 0, 0]
    else:
        cos, sin = (wave.float().contiguous() for wave in block.waves)
        if any(wave.shape[0] not in (1, x.shape[0]) or wave.shape[1] < block.pairs for wave in (cos, sin)):
            raise NotNative("positions of other tokens")
        kept += [cos, sin]
        numbers += [cos.data_ptr(), sin.data_ptr(), 0 if cos.shape[0] == 1 else cos.shape[1], block.pairs]
    sink = None if block.sink is None else block.sink.detach().float().contiguous()
    kept.append(sink)
    numbers += [0 if sink is None else sink.data_ptr(), 0 if block.first is None else block.first.data_ptr()]
    in_bytes = block.key_cache.dtype is torch.int8
    dtype, behind = (torch.int8, SCALE_BYTES) if in_bytes else (x.dtype, 0)
    for cache, width in ((block.key_cache, head), (block.value_cache, block.value_width)):
        shape = cache.shape
        fits = (shape[0], shape[1], shape[3]) == (x.shape[0], block.kv_heads, width + behind) and shape[2] >= held
        if not fits or not is_plain(cache) or cache.dtype is not dtype or cache.stride(3) != 1:
            raise NotNative("the cache is of another kind")
        numbers += [cache.data_ptr(), *cache.stride()[:3]]
    numbers.append(in_bytes)
    if _observers.THREAD.observers:
        if in_bytes:
            raise NotNative("observers read keys and values as floats")
        query, out = (x.new_empty(x.shape[0], block.heads, 1, size) for size in (head, block.value_width))
        block.seen = query, out
        numbers += [query.data_ptr(), out.data_ptr()]
    else:
        numbers += [0, 0]
    numbers += [ACTIVATIONS[block.activation], block.parallel, block.interleaved]
    return numbers, [*reals, block.scale, block.softcap]


def _norm(norm: Norm, width: int, x: Tensor) -> tuple[list[int], list[float]]:
    if not norm.kind:
        return [0, 0, 0], [0.0, 0.0]
    return [norm.kind, _vector(norm.weight, width, x), _vector(norm.bias, width, x)], [norm.eps, norm.plus]


def _vector(tensor: Tensor | None, width: int, x: Tensor) -> int:
    """The address of a bias or of a norm's weight."""
    if tensor is None:
        return 0
    if not is_plain(tensor) or tensor.dtype is not x.dtype or tensor.shape != (width,) or not tensor.is_contiguous():
        raise NotNative("a bias or a norm of another dtype or shape")
    return tensor.data_ptr()


def _matrix(matrix: Matrix | None, width: int, x: Tensor, kept: list[Any]) -> list[int]:
    if matrix is None:
        return [0, 0, 0, 0, 0]
    weight, (features, terms) = matrix.weight, matrix.shape
    if terms != width:
        raise NotNative("a weight of another shape")
    bias = _vector(matrix.bias, features, x)
    tensors = (weight,) if isinstance(weight, Tensor) else (weight.packed, weight.scales)
    if not all(is_plain(tensor) and tensor.is_contiguous() for tensor in tensors):
        raise NotNative("a weight of another kind or layout")
    if isinstance(weight, Tensor):
        if weight.dtype is not x.dtype and not (weight.dtype is torch.bfloat16 and x.dtype is torch.float32):
            raise NotNative("a weight of another dtype")
        return [DTYPES[weight.dtype], features, weight.data_ptr(), bias, 0]
    if isinstance(weight, GroupedWeight) and weight.order is not None:
        raise NotNative("a weight whose columns are held in another order")
    kept.append(weight)
    kind = 2 if isinstance(weight, Int8Weight) else 3 | weight.form.code << 8
    return [kind, features, weight.packed.data_ptr(), bias, weight.scales.data_ptr()]

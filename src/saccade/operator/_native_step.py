"""The native step of decoding: one token of each item through blocks of a decoder, in one call (`native/step.h`).

Who asks for a step finds out whether a block computes nothing but what `Block` describes; `NotNative` says why not.
The answer, `StepBlocks`, serves later steps while every object that it was read from is the same, and every tensor
where it was.

Shape legend: R items, E width, Hq / Hkv query and key-value heads, D, Dv key and value width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from . import _observers
from ._backends.native import _kernels
from ._backends.native._run import interrupted, is_plain
from ._call import ObservedCall
from ._derived import Unchanged
from ._groups import GroupedWeight
from ._int8 import Int8Weight
from ._int8_rows import SCALE_BYTES
from ._products import FEW, compares, rounds, unfollowed

ACTIVATIONS = {"gelu": 0, "gelu_tanh": 1, "relu": 2, "silu": 3}
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_DTYPE: Any = Tensor.dtype
_READ = Tensor.data_ptr, Tensor.size, Tensor.stride, _DTYPE.__get__, Tensor.is_neg  # fast to call
_CALL = nn.Module.__call__
_OF_ALL = torch.nn.modules.module


class NotNative(Exception):
    """Why a step is not computed natively."""


@dataclass
class StepNorm:
    """A norm of rows: `kind` 1 is RMS, 2 has a mean; times `plus + weight`."""

    kind: int = 0
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 0.0
    plus: float = 0.0


@dataclass
class Matrix:
    """A weight (F, E), as it is or rounded to integers, and its bias (F,).

    Attributes:
        again: of a weight that is a copy: gives it, renewed if the original has changed.
        memory: of a weight that is a view: the tensors that it is a view of.
    """

    weight: Tensor | Int8Weight | GroupedWeight
    bias: Tensor | None = None
    again: Callable[[], Any] | None = None
    memory: tuple[Tensor, ...] | None = None

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

    attention_norm: StepNorm
    query: Matrix
    output: Matrix
    heads: int
    kv_heads: int
    width: int
    value_width: int
    scale: float
    key: Matrix | None = None
    value: Matrix | None = None
    query_norm: StepNorm = field(default_factory=StepNorm)
    key_norm: StepNorm = field(default_factory=StepNorm)
    after_attention: StepNorm = field(default_factory=StepNorm)
    feed_forward_norm: StepNorm = field(default_factory=StepNorm)
    after_feed_forward: StepNorm = field(default_factory=StepNorm)
    up: Matrix | None = None
    gate: Matrix | None = None
    down: Matrix | None = None
    activation: str = "gelu"
    parallel: bool = False
    interleaved: bool = False
    window: int = 0  # keys that a query sees; 0: all
    sink: Tensor | None = None
    softcap: float = 0.0


@dataclass
class StepMemory:
    """The memory that a block reads and writes at one step alone."""

    key_cache: Tensor  # (R, Hkv, slots, D); or the data of `Int8Rows`, which both caches are then
    value_cache: Tensor
    waves: tuple[Tensor, Tensor] | None = None  # cos and sin, float32 (1 or R, at least pairs), contiguous
    pairs: int = 0
    first: Tensor | None = None  # int64 (R,): the first key that a query sees, in place of a window
    seen: tuple[Tensor, Tensor] | None = None  # of an observed call: query (R, Hq, 1, D) and output (R, Hq, 1, Dv)

    def observed(self, block: Block, held: int, source: str, **more: Any) -> ObservedCall:
        """The attention call of a step computed while attention is observed, with `held` keys and `more` fields."""
        assert self.seen is not None
        query, out = self.seen
        key, value = self.key_cache.narrow(2, 0, held), self.value_cache.narrow(2, 0, held)
        options: dict[str, Any] = dict(scale=block.scale, softcap=block.softcap or None, sink=block.sink)
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


def has_own_call(module: nn.Module) -> bool:
    """Whether an instance is called otherwise than its class, as after `module.compile()`."""
    return "_call_impl" in module.__dict__ or module._compiled_call_impl is not None


def check_bare(module: nn.Module, kind: type[nn.Module], forward: Any) -> dict[str, Any]:
    """The children of a module; raises `NotNative` if it has hooks or anything but the forward of its class."""
    own = module.__dict__
    if type(module) is not kind or kind.forward is not forward or "forward" in own or has_own_call(module):
        raise NotNative(f"a {type(module).__name__} with a forward of its own")
    hooks = own["_forward_hooks"], own["_forward_pre_hooks"]
    if any(hooks) and not _observers.passive(*hooks):
        raise NotNative(f"a {kind.__name__} has hooks")
    children: dict[str, Any] = own["_modules"]
    return children


class StepBlocks:
    """Blocks and the norm behind them, as they were read for a step.

    Args:
        x: the input of that step (R, 1, E).
        unchanged: of all modules and other objects that were read; None: they serve this step alone.
    """

    def __init__(self, blocks: list[Block], last: StepNorm, x: Tensor, unchanged: Unchanged | None = None):
        self.blocks, self._unchanged = blocks, unchanged
        self._kind, self._rounds = (x.shape[2], x.dtype), rounds()
        self._tensors: list[Tensor] = []
        self._kept: list[Any] = []  # what else the addresses are of
        self._again: list[tuple[Callable[[], Any], Any]] = []
        read = [self._row(block, x) for block in blocks]
        self.last, self.last_reals = self._norm(last, x.shape[2], x)
        self.rows, self.reals = [row for row, _ in read], [reals for _, reals in read]
        self._state = self._seen()

    def serve(self, x: Tensor) -> bool:
        """Whether a step with x would read the same."""
        return (
            self._unchanged is not None
            and (x.shape[2], x.dtype) == self._kind
            and rounds() == self._rounds
            and self._unchanged()
            and self._seen() == self._state
            and all(again() is weight for again, weight in self._again)
        )

    def _seen(self) -> tuple[list[Any], ...]:
        """Where the tensors' numbers are, and how they lie."""
        return tuple([*map(read, self._tensors)] for read in _READ)

    def _row(self, block: Block, x: Tensor) -> tuple[list[int], list[float]]:
        """The fields of a layer that stay as they are, in the order of `step` in native/bindings.cpp."""
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
            row, real = self._norm(norm, width, x)
            numbers += row
            reals += real
        for matrix, width in matrices:
            numbers += self._matrix(matrix, width, x)
        numbers += [block.heads, block.kv_heads, head, block.value_width, hidden, block.window]
        numbers += [ACTIVATIONS[block.activation], block.parallel, block.interleaved]
        return numbers, [*reals, block.scale, block.softcap]

    def _norm(self, norm: StepNorm, width: int, x: Tensor) -> tuple[list[int], list[float]]:
        if not norm.kind:
            return [0, 0, 0], [0.0, 0.0]
        weight, bias = (self._vector(tensor, width, x) for tensor in (norm.weight, norm.bias))
        return [norm.kind, weight, bias], [norm.eps, norm.plus]

    def _vector(self, tensor: Tensor | None, width: int, x: Tensor) -> int:
        """The address of a bias or of a norm's weight."""
        if tensor is None:
            return 0
        if (
            not is_plain(tensor)
            or tensor.dtype is not x.dtype
            or tensor.shape != (width,)
            or not tensor.is_contiguous()
        ):
            raise NotNative("a bias or a norm of another dtype or shape")
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def _matrix(self, matrix: Matrix | None, width: int, x: Tensor) -> list[int]:
        if matrix is None:
            return [0, 0, 0, 0, 0]
        weight, (features, terms) = matrix.weight, matrix.shape
        if terms != width:
            raise NotNative("a weight of another shape")
        bias = self._vector(matrix.bias, features, x)
        tensors = (weight,) if isinstance(weight, Tensor) else (weight.packed, weight.scales)
        if not all(is_plain(tensor) and tensor.is_contiguous() for tensor in tensors):
            raise NotNative("a weight of another kind or layout")
        if matrix.again is None:
            self._tensors += tensors if matrix.memory is None else matrix.memory
        else:
            self._again.append((matrix.again, weight))
        if isinstance(weight, Tensor):
            if weight.dtype is not x.dtype and not (weight.dtype is torch.bfloat16 and x.dtype is torch.float32):
                raise NotNative("a weight of another dtype")
            return [DTYPES[weight.dtype], features, weight.data_ptr(), bias, 0]
        if isinstance(weight, GroupedWeight) and weight.order is not None:
            raise NotNative("a weight whose columns are held in another order")
        self._kept.append(weight)
        kind = 2 if isinstance(weight, Int8Weight) else 3 | weight.form.code << 8
        return [kind, features, weight.packed.data_ptr(), bias, weight.scales.data_ptr()]


def run(x: Tensor, held: list[int], parts: list[StepBlocks], places: list[StepMemory]) -> list[Tensor]:
    """x (R, 1, E) through the blocks of all parts, each with its last norm; caches get the new token in slot
    `held[r] - 1`. Of parts before the last one only such as have one block and no norm.

    Returns:
        The output (R, 1, E) of each part.

    Raises:
        NotNative: if a weight is of another kind, or a number that is not finite came to a product of bytes.
    """
    x, most = x.contiguous(), max(held)
    kept: list[Any] = []
    outs = [torch.empty_like(x) for _ in parts]
    blocks = [block for part in parts for block in part.blocks]
    ends = [out.data_ptr() for out in outs[:-1]] + [0] * len(parts[-1].blocks)
    moving = [_moving(*given, x, most, kept) for given in zip(blocks, places, ends, strict=True)]
    try:
        odd = _kernels.module.step(
            x.data_ptr(),
            outs[-1].data_ptr(),
            x.shape[0],
            x.shape[2],
            DTYPES[x.dtype],
            held,
            [*map(add, [row for part in parts for row in part.rows], moving), parts[-1].last],
            [reals for part in parts for reals in part.reals] + [parts[-1].last_reals],
            torch.get_num_threads(),
        )
    except ValueError as error:  # sizes that do not fit together: the modules say which
        raise NotNative(str(error)) from None
    if odd:
        raise NotNative("numbers that are not finite came to a product of bytes")
    return outs


def _moving(block: Block, place: StepMemory, end: int, x: Tensor, held: int, kept: list[Any]) -> list[int]:
    """The fields of a layer that change from step to step, which follow the others."""
    numbers = [0, 0, 0, 0]
    if place.waves is not None:
        cos, sin = place.waves
        if any(wave.shape[0] not in (1, x.shape[0]) or wave.shape[1] < place.pairs for wave in place.waves):
            raise NotNative("positions of other tokens")
        numbers = [cos.data_ptr(), sin.data_ptr(), 0 if cos.shape[0] == 1 else cos.shape[1], place.pairs]
    sink = None if block.sink is None else block.sink.detach().float().contiguous()
    if sink is not None and sink.numel() != block.heads:
        raise NotNative("sinks of other heads")
    kept.append(sink)
    numbers += [0 if sink is None else sink.data_ptr(), 0 if place.first is None else place.first.data_ptr()]
    in_bytes = place.key_cache.dtype is torch.int8
    dtype, behind = (torch.int8, SCALE_BYTES) if in_bytes else (x.dtype, 0)
    for cache, width in ((place.key_cache, block.width), (place.value_cache, block.value_width)):
        items, heads, slots, entries = cache.shape
        strides = cache.stride()
        fits = (items, heads, entries) == (x.shape[0], block.kv_heads, width + behind) and slots >= held
        if not fits or not is_plain(cache) or cache.dtype is not dtype or strides[3] != 1:
            raise NotNative("the cache is of another kind")
        numbers += [cache.data_ptr(), *strides[:3]]
    numbers.append(in_bytes)
    if not _observers.THREAD.observers:
        return [*numbers, 0, 0, end]
    if in_bytes:
        raise NotNative("observers read keys and values as floats")
    query, out = (x.new_empty(x.shape[0], block.heads, 1, size) for size in (block.width, block.value_width))
    place.seen = query, out
    return [*numbers, query.data_ptr(), out.data_ptr(), end]

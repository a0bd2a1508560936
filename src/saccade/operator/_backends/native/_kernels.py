"""The calls of the compiled module `saccade._native`: tensors become addresses and strides; PyTorch computes the rest.

Nothing here knows of autograd; `_run.py` and `_operator.py` do. The kernels' lse is without the sink.
Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D and Dv widths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._biases import RelativeScores, TensorBias
from ..._call import CallSettings, CheckedCall, sink_lse, without_autocast
from ..._scores._program import ProgramBias
from ..._scores._terms import RelativeLine
from ._program import compiled, forms_of, missing as missing, module as module, narrow

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
BF16_SETS = ("avx512_bf16", "neon_bf16")  # instruction sets that multiply bfloat16; the others compute it in float32

_TENSOR, _LINE, _PROGRAM = 1, 2, 3  # native/call.h, Bias::Form
_WORD = 0xFFFFFFFF
_SERIAL = 2**15  # torch.sum shares no work among threads below so many entries (at::internal::GRAIN_SIZE)
_PULLED = 512  # distances whose gradients are taken to a bias's parameter at once

Tensors = list[Tensor | None]


def instructions() -> str | None:
    """The instruction set in use; None without a module."""
    return None if module is None else module.active()


@dataclass(frozen=True)
class KernelSettings(CallSettings):
    """The parameters of a call besides its tensors, and the form in which kernels get them."""

    lowered: Any  # the mask as the kernels see it
    origin: tuple[int, ...] = (0, 0, 0)  # row, key and head of the whole problem at which this one begins: for dropout
    # n of sigmoid attention, sigmoid(s - log n): (B|1, Hq|1, Lq), float32, 0 where a row sees nothing; None: softmax
    counts: Tensor | None = None

    @classmethod
    def of(cls, call: CheckedCall, lowered: Any) -> KernelSettings:
        return call.settings(cls, lowered, (0, 0, 0) if call.dropout is None else call.origin)


def forward(
    settings: KernelSettings,
    needs_lse: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameter: Tensor | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The output and, if `needs_lse`, the lse without the sink: (2, B, Hq, Lq), the lse and its rounding error.

    If all logits of a row are -1e9 (some models mask so), only the rounding error shows the number of its keys.
    """
    query, key, value = readable(query), readable(key), readable(value)
    bias, sink = _Scores.of(settings, query, key, parameter), _float(sink)
    out, lse = output_for(query, value.shape[3]), _row_numbers(query, 2) if needs_lse else None
    module.forward(
        _shared(settings, query, key, value, bias, sink), _at(query), _at(key), _at(value), _at(out), _address(lse)
    )
    return out, lse


def decode_int8(
    settings: KernelSettings, call: CheckedCall, key: Tensor, value: Tensor, parameter: Tensor | None
) -> Tensor:
    """The output of a call with few rows, whose keys and values are the data of `Int8Rows`."""
    query, bias, sink = readable(call.query), _Scores.of(settings, call.query, call.key, parameter), _float(call.sink)
    out, shared = output_for(query, call.value.shape[3]), _shared(settings, query, call.key, call.value, bias, sink)
    module.decode_int8(shared, _at(query), _at(key), _at(value), _at(out))
    return out


def backward(
    settings: KernelSettings,
    given: Tensors,
    wanted: tuple[bool, ...],
    out: Tensor | None,
    lse: Tensor | None,
    d_out: Tensor | None,
    d_lse: Tensor | None,
) -> Tensors:
    """Gradients of query, key, value, the bias's parameter and the sink; None for gradients that are not needed.

    Args:
        given: query, key, value, parameter | None, sink | None.
        out, lse: what `forward` gave, the sink's share in `out` and not in `lse` (2, B, Hq, Lq). None for sigmoid.
        d_out, d_lse: cotangents of out and of the lse with the sink; None for zeros, but not for both of out and d_out.
    """
    query, key, value = (readable(tensor) for tensor in given[:3] if tensor is not None)
    parameter, sink = given[3], _float(given[4])
    if d_out is None:
        assert out is not None
        d_out = torch.zeros_like(out)
    d_out = readable(d_out)
    d_lse = None if d_lse is None else d_lse.resolve_neg().contiguous()
    bias = _Scores.of(settings, query, key, parameter)
    d_scores = bias.gradient(query, key) if wanted[3] and bias is not None else None
    d_query = like(query) if wanted[0] else None
    d_key, d_value = (like(key), like(value)) if wanted[1] or wanted[2] else (None, None)
    delta, lse = (None, None) if lse is None else (_row_numbers(query), lse.contiguous())
    module.backward(
        _shared(settings, query, key, value, None if bias is None else bias.backward(), sink),
        _at(query),
        _at(key),
        _at(value),
        _at(out),
        _at(d_out),
        _address(lse),
        _address(d_lse),
        _at(d_query),
        _at(d_key),
        _at(d_value),
        _address(delta),
        0 if d_scores is None or bias is None else bias.gradient_fields(d_scores),
    )
    d_parameter = torch.zeros_like(parameter) if wanted[3] and parameter is not None else None
    if d_scores is not None and bias is not None:
        d_parameter = bias.pull(d_scores)
    d_sink = None
    if wanted[4] and given[4] is not None:
        assert lse is not None and delta is not None
        d_sink = _sink_gradient(given[4], lse[0], delta)
    return [d_query, d_key if wanted[1] else None, d_value if wanted[2] else None, d_parameter, d_sink]


def key_counts(settings: KernelSettings, query: Tensor, key: Tensor, parameter: Tensor | None) -> Tensor:
    """The number of keys that each row sees, (B|1, Hq|1, Lq), float32. Pairs that -inf in a tensor of scores hides do
    not count."""
    sizes = [(1, 1)]
    if settings.lowered is not None:
        sizes.append((settings.lowered.batch, settings.lowered.heads))
    if isinstance(settings.bias, TensorBias) and parameter is not None:
        sizes.append((parameter.shape[0], parameter.shape[1]))
    batch, heads = torch.broadcast_shapes(*sizes)
    counts = torch.empty(batch, heads, query.shape[2], dtype=torch.float32, device=query.device)
    bias = _Scores.of(settings, query, key, parameter)
    module.key_counts(_shared(settings, query, key, key, bias, None), batch, heads, counts.data_ptr())
    return counts


# --- tensors ------------------------------------------------------------------------------------------------------


def readable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it is lazily negated or its last axis is not contiguous."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor if tensor.stride()[3] == 1 or tensor.shape[3] == 1 else tensor.contiguous()


def _row_numbers(query: Tensor, parts: int = 0) -> Tensor:
    """(B, Hq, Lq), or (parts, B, Hq, Lq), float32, not filled; torch.empty with dtype and device takes 2 us longer."""
    batch, heads, rows, _ = query.shape
    shape, strides = (batch, heads, rows), (heads * rows, rows, 1)
    if parts:
        shape, strides = (parts, *shape), (batch * heads * rows, *strides)  # type: ignore[assignment]
    return torch.empty_strided(shape, strides, dtype=torch.float32, device=query.device)


def _at(tensor: Tensor | None) -> tuple[int, tuple[int, ...]] | int:
    return 0 if tensor is None else (tensor.data_ptr(), tensor.stride())


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _float(sink: Tensor | None) -> Tensor | None:
    return None if sink is None else sink.detach().float().resolve_neg().contiguous()


def like(tensor: Tensor) -> Tensor:
    """Memory for a result of this shape, in the same order of axes, but dense and with the last one contiguous."""
    made = torch.empty_like(tensor)
    return made if made.stride()[3] == 1 or made.shape[3] == 1 else made.new_empty(made.shape)


def output_for(query: Tensor, width: int) -> Tensor:
    """(B, Hq, Lq, width). In memory (B, Lq, Hq, width) where the query is: merging the heads then copies nothing."""
    if query.shape[3] == width:
        return like(query)
    batch, heads, rows, _ = query.shape
    if query.stride(1) < query.stride(2):
        return query.new_empty(batch, rows, heads, width).transpose(1, 2)
    return query.new_empty(batch, heads, rows, width)


def problem(
    query: torch.Size,
    key: torch.Size,
    value: torch.Size,
    dtype: int,
    scale: float,
    lowered: Any,
    softcap: float = 0.0,
    bias: tuple[Any, ...] | None = None,
    dropout: tuple[Any, ...] | None = None,
    sink: int = 0,
) -> tuple[Any, ...]:
    """The arguments of one kernel call as the tuple that struct `Shared` (native/bindings.cpp) reads. `dtype` is a
    number of `TYPES`, `lowered` is the lowered mask, and `sink` is an address (0 if there is no sink).

    Not a NamedTuple, because creating a NamedTuple takes 1 us, and a short call takes 12 us.
    """
    return query, key, value, dtype, scale, softcap, lowered, bias, dropout, sink, torch.get_num_threads()


def _shared(
    settings: KernelSettings, query: Tensor, key: Tensor, value: Tensor, bias: _Scores | None, sink: Tensor | None
) -> tuple[Any, ...]:
    shared = problem(
        query.shape,
        key.shape,
        value.shape,
        TYPES[query.dtype],
        settings.scale,
        settings.lowered,
        settings.softcap or 0.0,
        None if bias is None else bias.fields(),
        _dropped(settings),
        _address(sink),
    )
    counts = settings.counts
    if counts is None:
        return shared
    steps = (0 if counts.shape[axis] == 1 else counts.stride(axis) for axis in (0, 1))
    return (*shared, (counts.data_ptr(), *steps))


def _dropped(settings: KernelSettings) -> tuple[Any, ...] | None:
    dropout = settings.dropout
    if dropout is None:
        return None
    low, high = dropout.seed & _WORD, (dropout.seed >> 32) & _WORD
    return math.floor(dropout.p * 2**32), low, high, 1.0 / (1.0 - dropout.p), *settings.origin


# --- biases -------------------------------------------------------------------------------------------------------


class _Scores:
    """A bias in the kernels' form. Abstract; it keeps the memory alive that they read."""

    @staticmethod
    def of(settings: KernelSettings, query: Tensor, key: Tensor, parameter: Tensor | None) -> _Scores | None:
        if settings.bias is None or parameter is None or not (query.shape[0] and query.shape[2] and key.shape[2]):
            return None
        made: type[_Scores] = _DistanceScores if isinstance(settings.bias, RelativeScores) else _DenseScores
        if isinstance(settings.bias, ProgramBias):
            made = _ProgramScores
        with without_autocast(query.device):
            return made(settings, query, key, parameter.detach())

    def __init__(self, settings: KernelSettings, query: Tensor, key: Tensor, parameter: Tensor) -> None:
        raise NotImplementedError

    def fields(self) -> tuple[Any, ...]:
        """The fields from which native/bindings.cpp makes a Bias."""
        raise NotImplementedError

    def gradient(self, query: Tensor, key: Tensor) -> Tensor:
        """Zeros that the kernels add the scores' gradient to, float32."""
        raise NotImplementedError

    def gradient_strides(self, gradient: Tensor) -> tuple[int, ...]:
        """The gradient's four strides, 0 along axes that are summed over."""
        raise NotImplementedError

    def gradient_fields(self, gradient: Tensor) -> tuple[Any, ...]:
        """The fields from which native/bindings.cpp takes the gradient."""
        return gradient.data_ptr(), self.gradient_strides(gradient)

    def backward(self) -> _Scores:
        """These scores in the form that the backward kernels read."""
        return self

    def pull(self, gradient: Tensor) -> Tensor:
        """The gradient of the parameter, from that of the scores."""
        raise NotImplementedError


class _DenseScores(_Scores):
    """A tensor that broadcasts to (B, Hq, Lq, Lk)."""

    def __init__(self, settings: KernelSettings, query: Tensor, key: Tensor, parameter: Tensor) -> None:
        self.parameter = parameter.resolve_neg()

    def fields(self) -> tuple[Any, ...]:
        strides = zip(self.parameter.stride(), self.parameter.shape, strict=True)
        steps = tuple(0 if size == 1 else stride for stride, size in strides)
        return _TENSOR, self.parameter.data_ptr(), TYPES[self.parameter.dtype], steps

    def gradient(self, query: Tensor, key: Tensor) -> Tensor:
        batch, heads, rows, keys = self.parameter.shape
        if (rows, keys) != (query.shape[2], key.shape[2]):
            # Sums over rows or keys are the kernels'; those over items and heads would then meet in one place.
            batch, heads = query.shape[:2]
        return torch.zeros(batch, heads, rows, keys, dtype=torch.float32, device=query.device)

    def gradient_strides(self, gradient: Tensor) -> tuple[int, ...]:
        return tuple(0 if size == 1 else step for step, size in zip(gradient.stride(), gradient.shape, strict=True))

    def pull(self, gradient: Tensor) -> Tensor:
        for axis in (0, 1):
            if gradient.shape[axis] != self.parameter.shape[axis]:
                gradient = total(gradient, axis)
        return gradient.to(self.parameter.dtype)


class _DistanceScores(_Scores):
    """One score for each head and distance `j - i - placement`, (Hq, n): O(Lq + Lk) memory."""

    def __init__(self, settings: KernelSettings, query: Tensor, key: Tensor, parameter: Tensor) -> None:
        assert isinstance(settings.bias, RelativeScores)
        self.bias, self.parameter, placement = settings.bias, parameter, settings.placement
        self.placements = None
        if not isinstance(placement, int):
            self.placements = placement.to(torch.int64).expand(query.shape[0]).contiguous()
        self.placement = placement if isinstance(placement, int) else 0
        low, high = (placement, placement) if isinstance(placement, int) else extent(placement)
        self.least, last = 1 - query.shape[2] - high, key.shape[2] - 1 - low
        self.distances = torch.arange(self.least, last + 1, device=query.device)
        self.lines = self.bias._score(parameter.float(), self.distances).contiguous()

    def fields(self) -> tuple[Any, ...]:
        placed = (0, 0) if self.placements is None else (self.placements.data_ptr(), len(self.placements))
        return _LINE, self.lines.data_ptr(), len(self.distances), self.least, self.placement, *placed

    def gradient(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.zeros(query.shape[0], *self.lines.shape, dtype=torch.float32, device=query.device)

    def gradient_strides(self, gradient: Tensor) -> tuple[int, ...]:
        return (*gradient.stride(), 0)

    def pull(self, gradient: Tensor) -> Tensor:
        lines, parameter = total(gradient, 0)[0], self.parameter.float()
        # A line's gradient is as long as the line: in parts it would take memory by the square.
        width = lines.shape[1] if isinstance(self.bias, RelativeLine) else _PULLED
        with without_autocast(lines.device):
            parts = [
                self.bias._pull_score(part, parameter, distances)
                for part, distances in zip(lines.split(width, 1), self.distances.split(width), strict=True)
            ]
        return total(torch.stack(parts), 0)[0].to(self.parameter.dtype)


class _ProgramScores(_Scores):
    """A program of the score, and the tables that it reads: floats one after another, ints in 32 bits."""

    def __init__(self, settings: KernelSettings, query: Tensor, key: Tensor, parameter: Tensor) -> None:
        assert isinstance(settings.bias, ProgramBias)
        self.bias, self.parameter, placement = settings.bias, parameter, settings.placement
        self.floats = parameter.float().contiguous()
        self.origin = 0 if settings.mask is None else settings.mask._origin()[1]
        self.placements = None
        if not isinstance(placement, int):
            self.placements = placement.to(torch.int64).expand(query.shape[0]).contiguous()
        self.placement = placement if isinstance(placement, int) else 0
        self.given = forms_of(self.bias, (*query.shape[:3], key.shape[2]), placement, self.origin)
        self.ints = [narrow(table.tensor) for table in self.bias.tables if table.tensor is not None]
        self.program = compiled(self.bias.program, *self.given, False)

    def backward(self) -> _Scores:
        self.program = compiled(self.bias.program, *self.given, True)
        return self

    def fields(self) -> tuple[Any, ...]:
        ints, tables = iter(self.ints), []
        for table in self.bias.tables:
            if table.tensor is None:
                tables.append((self.floats.data_ptr() + 4 * table.start, 0, math.prod(table.shape)))
            else:
                held = next(ints)
                tables.append((held.data_ptr(), 2 if held.dtype == torch.bool else 1, held.numel()))
        placed = (0, 0) if self.placements is None else (self.placements.data_ptr(), len(self.placements))
        return _PROGRAM, self.program.module_program, tuple(tables), self.origin, self.placement, *placed

    def gradient(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.zeros_like(self.floats)

    def gradient_fields(self, gradient: Tensor) -> tuple[Any, ...]:
        known = compiled(self.bias.program, *self.given, True)
        return gradient.data_ptr(), gradient.numel(), int(known.by_item), int(known.by_head)

    def pull(self, gradient: Tensor) -> Tensor:
        return gradient.to(self.parameter.dtype)


def extent(placement: Tensor) -> tuple[int, int]:
    """The least and the greatest of the items' placements."""
    low, high = placement.aminmax()
    return int(low), int(high)


def _sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """-sum_i exp(sink - lse_i) delta_i; a row that sees nothing has lse = sink and delta = -dlse."""
    whole = sink_lse(lse, sink)
    logit = sink.detach().to(whole.dtype)[None, :, None]
    # Not exp(sink - sink) on empty rows, which is NaN for an infinite sink.
    share = torch.where(lse == float("-inf"), 1.0, torch.exp(logit - whole))
    return -total(total(share * delta, 2), 0).flatten().to(sink.dtype)


def total(tensor: Tensor, axis: int) -> Tensor:
    """The sum over an axis, which is kept, with the same bits for every number of threads."""
    if tensor.numel() < _SERIAL:
        return tensor.sum(axis, keepdim=True)
    while (size := tensor.shape[axis]) > 1:
        low, high, odd = tensor.split((size // 2, size // 2, size % 2), axis)
        tensor = low + high if not size % 2 else torch.cat((low + high, odd), axis)
    return tensor

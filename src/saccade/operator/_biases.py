"""Additive scores as values: a tensor, `ALiBi`, `RelativeBias`. Only the tensor ever takes Lq x Lk memory.

A bias is linear in its parameter (the tensor, the slopes, the table), so each class states two things: the tile of
scores made from the parameter, and its transpose, which takes a tile of cotangents back to the parameter.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ._masks._data import bounded, bounded_table, dense, whole


@dataclass(frozen=True)
class Span:
    """A block of rows or keys: tensors of the problem are cut at `start ... stop - 1`, and `index` (n,) are the
    positions.

    The two differ only when a problem covers chosen rows of a larger one; `unbroken` says that `index` counts by one.
    """

    start: int
    stop: int
    index: Tensor
    unbroken: bool = True

    def __len__(self) -> int:
        return self.stop - self.start

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """The block of `tensor` along `dim`; an axis of size 1 is broadcast."""
        return tensor if tensor.shape[dim] == 1 else tensor.narrow(dim, self.start, self.stop - self.start)


Parts = list[list["Tensor | None"]]  # [row block][key block]
P = TypeVar("P", bound="PlacedBias")
Placement = int | Tensor  # (B,) int64: query row i stands at key index i + placement


class Bias:
    """A value added to the logits after scale and softcap. Abstract; see `ALiBi`, `RelativeBias` and `Score`.

    It holds the caller's parameter itself, not a copy: what an optimizer does to it is seen by the next call.
    """

    parameter: Tensor
    offset: Placement | None = None
    _head_axis: ClassVar[int | None] = None  # of the parameter; None: it holds nothing by head

    @property
    def heads(self) -> int | None:
        """The number of heads of the parameter; None if the parameter has no axis of heads."""
        return None if self._head_axis is None else self.parameter.shape[self._head_axis]

    def _of_heads(self, numbers: Sequence[int]) -> Bias:
        """The bias of these heads; gradients reach the whole parameter."""
        chosen = copy.copy(self)
        chosen.parameter = self._part(self.parameter, None, None, torch.tensor(numbers, device=self.parameter.device))
        return chosen

    def _moved(self, device: torch.device | str) -> Bias:
        """The same on a device."""
        moved = copy.copy(self)
        moved.parameter = self.parameter.to(device)
        if isinstance(self.offset, Tensor):
            moved.offset = self.offset.to(device)
        return moved

    def _copied(self) -> Bias:
        """The same with copies of its tensors, which the caller may change."""
        own = copy.copy(self)
        own.parameter = self.parameter.detach().clone(memory_format=torch.contiguous_format)
        return own

    def _form(self) -> Bias:
        """This bias without its parameter, which a graph may keep without keeping the parameter alive."""
        bare = copy.copy(self)
        bare.__dict__.pop("parameter", None)
        return bare

    def _tile(self, parameter: Tensor, rows: Span, keys: Span, placement: Placement, dtype: torch.dtype) -> Tensor:
        """Scores (B|1, H|1, r, c) of one tile in `dtype`."""
        raise NotImplementedError

    def _pull(self, cotangent: Tensor, parameter: Tensor, rows: Span, keys: Span, placement: Placement) -> Tensor:
        """The transpose of `tile`: (B, H, r, c) to this tile's part of the parameter's gradient."""
        raise NotImplementedError

    def _gather(self, parts: Parts, parameter: Tensor, widths: tuple[list[int], list[int]]) -> Tensor:
        """The parameter's gradient from the parts of all tiles, `parts[row block][key block]`."""
        present = [part for line in parts for part in line if part is not None]
        return torch.stack(present).sum(0) if present else torch.zeros_like(parameter)

    def _check(self, batch: int, heads: int, length_q: int, length_k: int) -> None:
        """Raise ValueError if the parameter does not fit the call."""
        raise NotImplementedError

    def _part(self, parameter: Tensor, rows: Tensor | None, keys: Tensor | None, heads: Tensor | None) -> Tensor:
        """The parameter of the sub-problem of these rows, keys and heads (None: all)."""
        raise NotImplementedError


class TensorBias(Bias):
    """A dense tensor, (Lq, Lk) or 4-D broadcastable to (B, Hq, Lq, Lk); -inf counts as masked."""

    _head_axis = 1

    def __init__(self, tensor: Tensor) -> None:
        if tensor.dim() not in (2, 4):
            raise ValueError(
                f"bias: a tensor must be (Lq, Lk) or 4-D broadcastable to (B, Hq, Lq, Lk), got shape "
                f"{tuple(tensor.shape)} ((B, L) and (H, L, L) cannot be told apart)"
            )
        self.given = tuple(tensor.shape)
        self.parameter = tensor[None, None] if tensor.dim() == 2 else tensor

    def _tile(self, parameter: Tensor, rows: Span, keys: Span, placement: Placement, dtype: torch.dtype) -> Tensor:
        return keys.of(rows.of(parameter, 2), 3).to(dtype)

    def _pull(self, cotangent: Tensor, parameter: Tensor, rows: Span, keys: Span, placement: Placement) -> Tensor:
        dims = [d for d in range(4) if parameter.shape[d] == 1 and cotangent.shape[d] != 1]
        return cotangent.sum(dims, keepdim=True) if dims else cotangent

    def _gather(self, parts: Parts, parameter: Tensor, widths: tuple[list[int], list[int]]) -> Tensor:
        shape = parameter.shape
        if not parts or not parts[0]:
            return torch.zeros_like(parameter)
        lines = []
        for line, rows in zip(parts, widths[0], strict=True):
            cells = [
                part if part is not None else parameter.new_zeros(*shape[:2], min(rows, shape[2]), min(keys, shape[3]))
                for part, keys in zip(line, widths[1], strict=True)
            ]
            lines.append(_join(cells, 3, shape[3]))
        return _join(lines, 2, shape[2])

    def _check(self, batch: int, heads: int, length_q: int, length_k: int) -> None:
        target = (batch, heads, length_q, length_k)
        if any(size not in (1, full) for size, full in zip(self.parameter.shape, target, strict=True)):
            raise ValueError(f"bias: shape {self.given} does not broadcast to (B, Hq, Lq, Lk) = {target}")

    def _part(self, parameter: Tensor, rows: Tensor | None, keys: Tensor | None, heads: Tensor | None) -> Tensor:
        for dim, chosen in ((1, heads), (2, rows), (3, keys)):
            if chosen is not None and parameter.shape[dim] > 1:
                parameter = parameter.index_select(dim, chosen)
        return parameter

    def __repr__(self) -> str:
        return f"TensorBias{self.given}"


def _join(cells: list[Tensor], dim: int, size: int) -> Tensor:
    """Concatenate along `dim`, or add where that axis is broadcast (size 1)."""
    return torch.stack(cells).sum(0) if size == 1 else torch.cat(cells, dim)


class PlacedBias(Bias):
    """A bias that depends on the positions of queries among the keys. Abstract."""

    def at(self: P, offset: int | Sequence[int] | Tensor) -> P:
        """The same bias with query row i at key index `i + offset`; an int, or one per batch item (B,).

        Without it a bias follows the mask's placement, or bottom-right (`Lk - Lq`) where there is none.

        Raises:
            TypeError: not ints. ValueError: a second `.at`, or, at the call, not one offset per batch item.
        """
        if self.offset is not None:
            raise ValueError(f"bias.at: {self!r} is already placed")
        placed = copy.copy(self)
        if hasattr(offset, "__index__") and not (isinstance(offset, Tensor) and offset.dim() > 0):
            placed.offset = bounded(offset, "bias.at: offset")
            return placed
        table = bounded_table(offset, "bias.at: offset", "an int or ints (B,)")
        if len(table.shape) != 1 or table.shape[0] == 0:
            raise ValueError(f"bias.at: offset must be an int or ints (B,), got shape {table.shape}")
        placed.offset = int(table.host[0]) if table.shape == (1,) else table.values
        return placed

    def _check(self, batch: int, heads: int, length_q: int, length_k: int) -> None:
        if isinstance(self.offset, Tensor) and self.offset.shape[0] != batch:
            raise ValueError(f"bias: placed by {self.offset.shape[0]} offsets, expected one per batch item ({batch})")


class RelativeScores(PlacedBias):
    """A bias that depends only on `j - position(i)`. Abstract: a subclass defines the score of a distance.

    A tile of r x c pairs has only r + c - 1 distances: they are scored once and laid out along the diagonals.
    """

    def _score(self, parameter: Tensor, distance: Tensor) -> Tensor:
        """(H, n) from distances `j - position(i)` (n,)."""
        raise NotImplementedError

    def _value(self, parameter: Tensor, head: Tensor, distance: Tensor) -> Tensor:
        """The score of one head at one distance, elementwise, float32 at least."""
        raise NotImplementedError

    def _pull_score(self, cotangent: Tensor, parameter: Tensor, distance: Tensor) -> Tensor:
        """The transpose of `score`: (H, n) to the parameter's gradient."""
        raise NotImplementedError

    def _tile(self, parameter: Tensor, rows: Span, keys: Span, placement: Placement, dtype: torch.dtype) -> Tensor:
        parameter = parameter.to(dtype)
        if _neighbours(rows, keys):
            line = self._lines(parameter, _diagonals(rows, keys, placement))
            return line.unfold(-1, len(keys), 1).flip(2)
        distance = _distance(rows, keys, placement)
        return self._lines(parameter, distance.flatten(1)).unflatten(-1, distance.shape[1:])

    def _lines(self, parameter: Tensor, distance: Tensor) -> Tensor:
        """(P, H, n) from distances (P, n)."""
        line = self._score(parameter, distance.flatten())
        return line.view(line.shape[0], *distance.shape).transpose(0, 1)

    def _pull(self, cotangent: Tensor, parameter: Tensor, rows: Span, keys: Span, placement: Placement) -> Tensor:
        if _neighbours(rows, keys):
            distance, cotangent = _diagonals(rows, keys, placement), _diagonal_sums(cotangent)
        else:
            distance, cotangent = _distance(rows, keys, placement).flatten(1), cotangent.flatten(2)
        if distance.shape[0] == 1:
            cotangent = cotangent.sum(0, keepdim=True)
        return self._pull_score(cotangent.transpose(0, 1).flatten(1), parameter, distance.flatten())


def _neighbours(rows: Span, keys: Span) -> bool:
    """Whether the pairs of a tile have the same distance along its diagonals."""
    return rows.unbroken and keys.unbroken and len(rows) > 0 and len(keys) > 0


def _distance(rows: Span, keys: Span, placement: Placement) -> Tensor:
    """Key index minus query position, int64 (B|1, r, c)."""
    return keys.index[None, None, :] - rows.index[None, :, None] - _column(placement, rows.index.device)[:, :, None]


def _diagonals(rows: Span, keys: Span, placement: Placement) -> Tensor:
    """The r + c - 1 distances of a tile of neighbours, from the last row's first key on: int64 (B|1, r + c - 1)."""
    steps = torch.arange(len(rows) + len(keys) - 1, device=rows.index.device)
    return steps[None] + (keys.index[0] - rows.index[-1]) - _column(placement, rows.index.device)


def _column(placement: Placement, device: torch.device) -> Tensor:
    """(B|1, 1)."""
    if isinstance(placement, int):
        return torch.full((1, 1), placement, device=device)
    return placement.to(device)[:, None]


def _diagonal_sums(tile: Tensor) -> Tensor:
    """Sums along the diagonals of (B, H, r, c), from the last row's first entry on: (B, H, r + c - 1)."""
    rows, keys = tile.shape[2:]
    # Each row one step further right than the one below it: fill up by r, read in rows one entry shorter.
    flat = F.pad(tile.flip(2), (0, rows)).flatten(2)[..., : rows * (rows + keys - 1)]
    return flat.reshape(*tile.shape[:2], rows, rows + keys - 1).sum(2)


def paper_slopes(heads: int) -> list[float]:
    """As `ALiBi.slopes`."""
    if heads < 1:
        raise ValueError(f"ALiBi.slopes: heads must be at least 1, got {heads}")
    whole = 2 ** math.floor(math.log2(heads))
    base = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    return base + [2 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]


class ALiBi(RelativeScores):
    """Attention with linear biases: `-slope_h * |position(i) - j|` (Press et al. 2022, "Train Short, Test Long").

    Args:
        slopes: (Hq,) floating point, one per query head; gradients reach it.

    Raises:
        TypeError: slopes that are not a floating-point tensor.
        ValueError: slopes that are not 1-D, or, at the call, not one per query head.

    Example:
        >>> import torch, saccade
        >>> saccade.ALiBi.slopes(8)[:3]
        tensor([0.5000, 0.2500, 0.1250])
        >>> zeros = torch.zeros(1, 1, 3, 4)
        >>> saccade.attention_weights(zeros, zeros, bias=saccade.ALiBi(torch.tensor([1.0])), rows=-1)
        tensor([[[[0.0900, 0.2447, 0.6652]]]])
    """

    _head_axis = 0

    def __init__(self, slopes: Tensor) -> None:
        self.parameter = _parameter(slopes, "ALiBi: slopes", 1, "(Hq,)")

    @staticmethod
    def slopes(heads: int) -> Tensor:
        """The paper's slopes, float32 (heads,): powers of 2^(-8/n), interleaved where heads is no power of two."""
        return torch.tensor(paper_slopes(heads))

    def _value(self, parameter: Tensor, head: Tensor, distance: Tensor) -> Tensor:
        slope = parameter[head]
        return -slope * distance.abs().to(torch.promote_types(slope.dtype, torch.float32))

    def _score(self, parameter: Tensor, distance: Tensor) -> Tensor:
        return -parameter[:, None] * distance.abs().to(parameter.dtype)

    def _pull_score(self, cotangent: Tensor, parameter: Tensor, distance: Tensor) -> Tensor:
        return -(cotangent * distance.abs().to(cotangent.dtype)).sum(1)

    def _part(self, parameter: Tensor, rows: Tensor | None, keys: Tensor | None, heads: Tensor | None) -> Tensor:
        return parameter if heads is None else parameter.index_select(0, heads)

    def _check(self, batch: int, heads: int, length_q: int, length_k: int) -> None:
        super()._check(batch, heads, length_q, length_k)
        if self.parameter.shape[0] != heads:
            raise ValueError(f"bias: ALiBi has {self.parameter.shape[0]} slopes, expected one per query head ({heads})")

    def __repr__(self) -> str:
        return f"ALiBi({self.parameter.shape[0]} heads)"


class RelativeBias(RelativeScores):
    """T5's bucketed relative bias: `table[bucket(j - position(i)), h]` (Raffel et al. 2020, section 2.1).

    Args:
        table: (buckets, Hq) floating point; gradients reach it.
        bidirectional: half of the buckets for keys after the query (encoders); False: later keys share bucket 0.
        max_distance: distances from here on share the last bucket.

    Raises:
        TypeError: a table that is not a floating-point tensor.
        ValueError: a table that is not 2-D, has too few buckets, or, at the call, not one column per query head.

    Example:
        >>> import torch, saccade
        >>> bias = saccade.RelativeBias(torch.randn(8, 2), bidirectional=False)
        >>> bias.buckets(torch.tensor([0, -1, -2, -3, -5, -50, -500]))
        tensor([0, 1, 2, 3, 4, 6, 7])
        >>> query, key, value = torch.randn(3, 1, 2, 5, 16)
        >>> saccade.attention(query, key, value, saccade.Causal(), bias=bias).shape
        torch.Size([1, 2, 5, 16])
    """

    _head_axis = 1

    def __init__(self, table: Tensor, bidirectional: bool = True, max_distance: int = 128) -> None:
        self.parameter = _parameter(table, "RelativeBias: table", 2, "(buckets, Hq)")
        self.bidirectional = bool(bidirectional)
        self.max_distance = whole(max_distance, "RelativeBias: max_distance")
        self.count = table.shape[0]
        exact = self.count // 4 if bidirectional else self.count // 2
        if exact < 1 or (bidirectional and self.count % 2):
            need = "an even number of at least 4" if bidirectional else "at least 2"
            raise ValueError(f"RelativeBias: table needs {need} buckets, got {self.count}")
        if self.max_distance <= exact:
            raise ValueError(f"RelativeBias: max_distance must exceed {exact}, got {max_distance}")

    def buckets(self, distance: Tensor) -> Tensor:
        """Bucket of each `j - position(i)`, int64: exact up to a half of them, then logarithmic up to max_distance."""
        count = self.count
        if self.bidirectional:
            count //= 2
            first = (distance > 0).to(torch.int64) * count
            distance = distance.abs()
        else:
            first = torch.zeros_like(distance)
            distance = (-distance).clamp(min=0)
        exact = count // 2
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (ratio * (count - exact)).to(torch.int64)).clamp(max=count - 1)
        return first + torch.where(distance < exact, distance, far)

    def _value(self, parameter: Tensor, head: Tensor, distance: Tensor) -> Tensor:
        return parameter[self.buckets(distance), head]

    def _score(self, parameter: Tensor, distance: Tensor) -> Tensor:
        return parameter[self.buckets(distance)].transpose(0, 1)

    def _pull_score(self, cotangent: Tensor, parameter: Tensor, distance: Tensor) -> Tensor:
        # One product with a 0/1 matrix instead of index_add: repeatable on a GPU, and vmap knows it.
        one_hot = F.one_hot(self.buckets(distance), self.count).to(cotangent.dtype)
        return torch.matmul(cotangent, one_hot).transpose(0, 1)

    def _part(self, parameter: Tensor, rows: Tensor | None, keys: Tensor | None, heads: Tensor | None) -> Tensor:
        return parameter if heads is None else parameter.index_select(1, heads)

    def _check(self, batch: int, heads: int, length_q: int, length_k: int) -> None:
        super()._check(batch, heads, length_q, length_k)
        if self.parameter.shape[1] != heads:
            raise ValueError(
                f"bias: RelativeBias has {self.parameter.shape[1]} columns, expected one per query head ({heads})"
            )

    def __repr__(self) -> str:
        way = "bidirectional" if self.bidirectional else "causal"
        return f"RelativeBias({self.count} buckets, {way}, max_distance={self.max_distance})"


def _parameter(tensor: Tensor, name: str, rank: int, shape: str) -> Tensor:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        came = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be a floating-point tensor, got {came}")
    dense(tensor, name)
    if tensor.dim() != rank:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    return tensor


def as_bias(bias: Tensor | Bias | None) -> Bias | None:
    """The argument `bias` of `attention` as a Bias; None is returned unchanged."""
    if bias is None or isinstance(bias, Bias):
        return bias
    if not isinstance(bias, Tensor):
        raise TypeError(f"bias must be a tensor, ALiBi, RelativeBias or Score, got {type(bias).__name__}")
    if bias.dtype == torch.bool:
        raise TypeError("bias holds additive scores; a boolean tensor (True = attend) goes into mask=")
    if not bias.is_floating_point():
        raise TypeError(f"bias must be floating point, got {bias.dtype}")
    return TensorBias(dense(bias, "bias"))

"""Additive scores as values: a tensor, `ALiBi`, `RelativeBias`. Only the tensor ever takes Lq x Lk memory.

A bias is linear in its parameter (the tensor, the slopes, the table), so each class states two things: the tile of
scores made from the parameter, and its transpose, which takes a tile of cotangents back to the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """A block of rows or keys: `start ... stop - 1` where tensors of the problem are cut, `index` (n,) where it stands.

    The two differ only when a problem covers chosen rows of a larger one.
    """

    start: int
    stop: int
    index: Tensor

    def __len__(self) -> int:
        return self.stop - self.start

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """That block of `tensor` along `dim`; an axis of size 1 is broadcast."""
        return tensor if tensor.shape[dim] == 1 else tensor.narrow(dim, self.start, self.stop - self.start)


Parts = list[list["Tensor | None"]]  # [row block][key block]
Placement = int | Tensor  # (B,) int64: query row i stands at key index i + placement


class Bias:
    """A value added to the logits after scale and softcap. Abstract; see `ALiBi` and `RelativeBias`."""

    parameter: Tensor
    offset: Placement | None = None

    def at(self, offset: int | Sequence[int] | Tensor) -> Bias:
        """The same bias with query row i standing at key index `i + offset`; an int, or one per batch item.

        Without it a bias follows the mask's placement, or bottom-right (`Lk - Lq`) where there is none.
        """
        if self.offset is not None:
            raise ValueError(f"bias.at: {self!r} is already placed")
        placed = object.__new__(type(self))
        placed.__dict__.update(self.__dict__)
        placed.offset = offset if isinstance(offset, int) else torch.as_tensor(offset, dtype=torch.int64).clone()
        return placed

    def tile(self, parameter: Tensor, rows: Span, keys: Span, placement: Placement) -> Tensor:
        """Scores (B|1, H|1, r, c) of one tile."""
        raise NotImplementedError

    def value(self, parameter: Tensor, head: Tensor, distance: Tensor) -> Tensor:
        """The score of one head at one `j - position(i)`, elementwise; a tensor bias has none."""
        raise NotImplementedError

    def pull(self, cotangent: Tensor, parameter: Tensor, rows: Span, keys: Span, placement: Placement) -> Tensor:
        """The transpose of `tile`: (B, H, r, c) to this tile's part of the parameter's gradient."""
        raise NotImplementedError

    def gather(self, parts: Parts, parameter: Tensor, widths: tuple[list[int], list[int]]) -> Tensor:
        """The parameter's gradient from the parts of all tiles, `parts[row block][key block]`."""
        present = [part for line in parts for part in line if part is not None]
        return torch.stack(present).sum(0) if present else torch.zeros_like(parameter)

    def check(self, batch: int, heads: int, length_q: int, length_k: int) -> None:
        """Raise ValueError where the parameter does not fit the call."""
        raise NotImplementedError

    def part(self, parameter: Tensor, rows: Tensor | None, keys: Tensor | None, heads: Tensor | None) -> Tensor:
        """The parameter of the sub-problem of these rows, keys and heads (None: all)."""
        raise NotImplementedError

    def _distance(self, rows: Span, keys: Span, placement: Placement) -> Tensor:
        """Key index minus query position, int64 (B|1, r, c)."""
        if isinstance(placement, int):
            return (keys.index[None, :] - rows.index[:, None] - placement)[None]
        offset = placement.to(rows.index.device)
        return keys.index[None, None, :] - rows.index[None, :, None] - offset[:, None, None]


class TensorBias(Bias):
    """A dense tensor, (Lq, Lk) or 4-D broadcastable to (B, Hq, Lq, Lk); -inf counts as masked."""

    def __init__(self, tensor: Tensor) -> None:
        if tensor.dim() not in (2, 4):
            raise ValueError(
                f"bias: a tensor must be (Lq, Lk) or 4-D broadcastable to (B, Hq, Lq, Lk), got shape "
                f"{tuple(tensor.shape)} ((B, L) and (H, L, L) cannot be told apart)"
            )
        self.given = tuple(tensor.shape)
        self.parameter = tensor[None, None] if tensor.dim() == 2 else tensor

    def at(self, offset: int | Sequence[int] | Tensor) -> Bias:
        raise ValueError("bias.at: a tensor is given row by row and cannot be placed")

    def tile(self, parameter: Tensor, rows: Span, keys: Span, placement: Placement) -> Tensor:
        return keys.of(rows.of(parameter, 2), 3)

    def pull(self, cotangent: Tensor, parameter: Tensor, rows: Span, keys: Span, placement: Placement) -> Tensor:
        dims = [d for d in range(4) if parameter.shape[d] == 1 and cotangent.shape[d] != 1]
        return cotangent.sum(dims, keepdim=True) if dims else cotangent

    def gather(self, parts: Parts, parameter: Tensor, widths: tuple[list[int], list[int]]) -> Tensor:
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

    def check(self, batch: int, heads: int, length_q: int, length_k: int) -> None:
        target = (batch, heads, length_q, length_k)
        if any(size not in (1, full) for size, full in zip(self.parameter.shape, target, strict=True)):
            raise ValueError(f"bias: shape {self.given} does not broadcast to (B, Hq, Lq, Lk) = {target}")

    def part(self, parameter: Tensor, rows: Tensor | None, keys: Tensor | None, heads: Tensor | None) -> Tensor:
        for dim, chosen in ((1, heads), (2, rows), (3, keys)):
            if chosen is not None and parameter.shape[dim] > 1:
                parameter = parameter.index_select(dim, chosen)
        return parameter

    def __repr__(self) -> str:
        return f"TensorBias{self.given}"


def _join(cells: list[Tensor], dim: int, size: int) -> Tensor:
    """Concatenate along `dim`, or add where that axis is broadcast (size 1)."""
    return torch.stack(cells).sum(0) if size == 1 else torch.cat(cells, dim)


class ALiBi(Bias):
    """Attention with linear biases: `-slope_h * |position(i) - j|` (Press et al. 2022, "Train Short, Test Long").

    Args:
        slopes: (Hq,) floating point, one per query head; gradients reach it.

    Raises:
        TypeError: slopes is not a floating-point tensor.
        ValueError: slopes is not 1-D, or, at the call, not one per query head.
    """

    def __init__(self, slopes: Tensor) -> None:
        self.parameter = _parameter(slopes, "ALiBi: slopes", 1, "(Hq,)")

    @staticmethod
    def slopes(heads: int) -> Tensor:
        """The paper's slopes, float32 (heads,): powers of 2^(-8/n), interleaved where heads is no power of two."""
        if heads < 1:
            raise ValueError(f"ALiBi.slopes: heads must be at least 1, got {heads}")
        whole = 2 ** math.floor(math.log2(heads))
        base = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
        more = [2 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]
        return torch.tensor(base + more)

    def value(self, parameter: Tensor, head: Tensor, distance: Tensor) -> Tensor:
        return -parameter[head] * distance.abs().to(parameter.dtype)

    def tile(self, parameter: Tensor, rows: Span, keys: Span, placement: Placement) -> Tensor:
        distance = self._distance(rows, keys, placement).abs().to(parameter.dtype)
        return -parameter[None, :, None, None] * distance[:, None]

    def pull(self, cotangent: Tensor, parameter: Tensor, rows: Span, keys: Span, placement: Placement) -> Tensor:
        distance = self._distance(rows, keys, placement).abs().to(cotangent.dtype)
        return -(cotangent * distance[:, None]).sum((0, 2, 3))

    def check(self, batch: int, heads: int, length_q: int, length_k: int) -> None:
        if self.parameter.shape[0] != heads:
            raise ValueError(f"bias: ALiBi has {self.parameter.shape[0]} slopes, expected one per query head ({heads})")

    def part(self, parameter: Tensor, rows: Tensor | None, keys: Tensor | None, heads: Tensor | None) -> Tensor:
        return parameter if heads is None else parameter.index_select(0, heads)

    def __repr__(self) -> str:
        return f"ALiBi({self.parameter.shape[0]} heads)"


class RelativeBias(Bias):
    """T5's bucketed relative bias: `table[bucket(j - position(i)), h]` (Raffel et al. 2020, section 2.1).

    Args:
        table: (buckets, Hq) floating point; gradients reach it.
        bidirectional: half of the buckets for keys after the query (encoders); False: later keys share bucket 0.
        max_distance: distances from here on share the last bucket.

    Raises:
        TypeError: table is not a floating-point tensor.
        ValueError: table is not 2-D, has too few buckets, or, at the call, not one column per query head.
    """

    def __init__(self, table: Tensor, bidirectional: bool = True, max_distance: int = 128) -> None:
        self.parameter = _parameter(table, "RelativeBias: table", 2, "(buckets, Hq)")
        self.bidirectional, self.max_distance = bool(bidirectional), int(max_distance)
        buckets = table.shape[0]
        exact = buckets // 4 if bidirectional else buckets // 2
        if exact < 1 or (bidirectional and buckets % 2):
            need = "an even number of at least 4" if bidirectional else "at least 2"
            raise ValueError(f"RelativeBias: table needs {need} buckets, got {buckets}")
        if self.max_distance <= exact:
            raise ValueError(f"RelativeBias: max_distance must exceed {exact}, got {max_distance}")

    def buckets(self, distance: Tensor) -> Tensor:
        """Bucket of each `j - position(i)`, int64: exact up to a half of them, then logarithmic up to max_distance."""
        count = self.parameter.shape[0]
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

    def value(self, parameter: Tensor, head: Tensor, distance: Tensor) -> Tensor:
        return parameter[self.buckets(distance), head]

    def tile(self, parameter: Tensor, rows: Span, keys: Span, placement: Placement) -> Tensor:
        return parameter[self.buckets(self._distance(rows, keys, placement))].permute(0, 3, 1, 2)

    def pull(self, cotangent: Tensor, parameter: Tensor, rows: Span, keys: Span, placement: Placement) -> Tensor:
        # One product with a 0/1 matrix instead of index_add: repeatable on a GPU, and vmap knows it.
        bucket = self.buckets(self._distance(rows, keys, placement))
        if bucket.shape[0] == 1:
            cotangent = cotangent.sum(0, keepdim=True)
        one_hot = torch.nn.functional.one_hot(bucket.flatten(1), parameter.shape[0]).to(cotangent.dtype)
        return torch.matmul(cotangent.flatten(2), one_hot).sum(0).transpose(0, 1)

    def check(self, batch: int, heads: int, length_q: int, length_k: int) -> None:
        if self.parameter.shape[1] != heads:
            raise ValueError(
                f"bias: RelativeBias has {self.parameter.shape[1]} columns, expected one per query head ({heads})"
            )

    def part(self, parameter: Tensor, rows: Tensor | None, keys: Tensor | None, heads: Tensor | None) -> Tensor:
        return parameter if heads is None else parameter.index_select(1, heads)

    def __repr__(self) -> str:
        way = "bidirectional" if self.bidirectional else "causal"
        return f"RelativeBias({self.parameter.shape[0]} buckets, {way}, max_distance={self.max_distance})"


def _parameter(tensor: Tensor, name: str, rank: int, shape: str) -> Tensor:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        came = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be a floating-point tensor, got {came}")
    if tensor.dim() != rank:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    return tensor


def as_bias(bias: Tensor | Bias | None) -> Bias | None:
    """A Bias from what the caller gave."""
    if bias is None or isinstance(bias, Bias):
        return bias
    if not isinstance(bias, Tensor):
        raise TypeError(f"bias must be a tensor, ALiBi or RelativeBias, got {type(bias).__name__}")
    if bias.dtype == torch.bool:
        raise TypeError("bias holds additive scores; a boolean tensor (True = attend) goes into mask=")
    if not bias.is_floating_point():
        raise TypeError(f"bias must be floating point, got {bias.dtype}")
    return TensorBias(bias)

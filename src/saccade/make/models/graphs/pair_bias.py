"""A sparse bias, stored for listed query-key pairs only.

Shape legend: P pairs, H heads, B batch, r x c a tile of rows and keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....operator._biases import Bias, Parts, Placement, Span

_FAR = 1 << 31  # larger than any row or key


class PairBias(Bias):
    """A bias of `scores[p, h]` at the pair (rows[p], keys[p]) of a query and a key, and 0 elsewhere.

    A dense bias of T tokens takes T x T memory even if a mask hides most of it. The backends in plain PyTorch compute
    this one tile by tile.

    Args:
        scores: (P, H) floating point, differentiable.
        rows, keys: int64 (P,), unique pairs sorted by row, then by key.
    """

    _head_axis = 1

    def __init__(self, scores: Tensor, rows: Tensor, keys: Tensor):
        shapes = [tuple(tensor.shape) for tensor in (scores, rows, keys)]
        if scores.ndim != 2 or not shapes[0][:1] == shapes[1] == shapes[2]:
            given = ", ".join(map(str, shapes))
            raise ValueError(f"scores, rows, keys: expected shapes (P, H), (P,) and (P,), got {given}")
        codes = rows * _FAR + keys
        if bool((codes.diff() <= 0).any()):
            n = int((codes.diff() <= 0).int().argmax()) + 1
            given = f"({int(rows[n])}, {int(keys[n])}) after ({int(rows[n - 1])}, {int(keys[n - 1])})"
            raise ValueError(f"rows, keys: expected pairs sorted by row, then by key, each once, got {given}")
        self.parameter, self.codes = scores, codes

    def _tile(self, parameter: Tensor, rows: Span, keys: Span, placement: Placement, dtype: torch.dtype) -> Tensor:
        at, there = self._found(rows, keys)
        if not len(parameter):
            return torch.zeros(1, 1, *there.shape, dtype=dtype, device=parameter.device)
        return torch.where(there, parameter[at].to(dtype).movedim(-1, 0), 0.0)[None]

    def _pull(self, cotangent: Tensor, parameter: Tensor, rows: Span, keys: Span, placement: Placement) -> Tensor:
        at, there = self._found(rows, keys)
        values = cotangent.sum(0)[:, there].t()
        # Sparse gradients: a tile has few pairs, and the parts of all tiles are kept until the end.
        return torch.sparse_coo_tensor(at[there][None], values, tuple(parameter.shape), check_invariants=False)

    def _gather(self, parts: Parts, parameter: Tensor, widths: tuple[list[int], list[int]]) -> Tensor:
        total = torch.zeros_like(parameter)
        for part in (part for line in parts for part in line if part is not None):
            total = total.index_add(0, part._indices()[0], part._values().to(total.dtype))
        return total

    def _check(self, batch: int, heads: int, length_q: int, length_k: int) -> None:
        if self.parameter.shape[1] != heads:
            raise ValueError(f"bias: PairBias has {self.parameter.shape[1]} columns, expected one per head ({heads})")

    def _part(self, parameter: Tensor, rows: Tensor | None, keys: Tensor | None, heads: Tensor | None) -> Tensor:
        return parameter if heads is None else parameter.index_select(1, heads)

    def _found(self, rows: Span, keys: Span) -> tuple[Tensor, Tensor]:
        """For a tile (r, c): the index of each pair in the list (arbitrary if missing), and whether it is listed."""
        wanted = rows.index[:, None] * _FAR + keys.index
        at = torch.searchsorted(self.codes, wanted).clamp(max=max(0, len(self.codes) - 1))
        return at, (self.codes[at] == wanted) if len(self.codes) else torch.zeros_like(wanted, dtype=torch.bool)

    def __repr__(self) -> str:
        return f"PairBias({len(self.codes)} pairs, {self.parameter.shape[1]} heads)"

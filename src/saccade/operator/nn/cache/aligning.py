"""Aligns new rows and the tokens of a cache for mechanisms that do not support placed masks.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq new rows, T tokens of the longest item, n width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..._masks import Causal, Mask, Padding
from .growing import GrowingLayer
from .layer import LayerCache
from .new_rows import NewRows


@dataclass(frozen=True, eq=False)
class AlignedItems:
    """Items of unequal length, each moved so that its last new token is in the last row, at the last key.

    There `Causal()` means the same for all of them. A step copies the keys and values it reads.

        keys in a cache   a b c .      moved   . a b c      new rows   c .      moved   . c
                          d e f g              d e f g                 f g              f g
    """

    causal: bool
    rows: int
    before: np.ndarray  # tokens of each item before the call: int64 (1,) or (B,)
    arriving: NewRows

    @classmethod
    def of(
        cls, cache: LayerCache, mask: Mask | None, padding: Padding | None, rows: int, name: str
    ) -> AlignedItems | None:
        """The alignment of items for the mechanism called `name`; None if all items are aligned already.

        Raises:
            ValueError: a cache that does not keep all tokens in order, a mask of another kind.
        """
        if not isinstance(cache, GrowingLayer):
            raise ValueError(
                f"cache: the mechanism {name!r} decodes with the cache that its module makes (cache()), "
                f"got a {type(cache).__name__}"
            )
        if not (mask is None or isinstance(mask, Causal)):
            raise ValueError(f"mask: with a cache the mechanism {name!r} takes Causal() or None, got {mask!r}")
        before, arriving = cache.lengths(), NewRows.of(padding, rows)
        if before.size == 1 and arriving.whole:
            return None
        return cls(mask is not None, rows, before, arriving)

    def at_the_end(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Mask]:
        """Query (B, Hq, Lq, D), key and value (B, Hkv, T, n), moved to the end, and the mask of visible pairs."""
        batch, length = query.shape[0], key.shape[2]
        held, count = self._of(batch, self.before + self.arriving.count), self._of(batch, self.arriving.count)
        query = self.rows_at_the_end(query)
        key, value = (_moved(tensor, held - length) for tensor in (key, value))
        real = Padding(_last_tokens(held, length), queries=_last_tokens(count, self.rows))
        return query, key, value, Causal() & real if self.causal else real

    def rows_at_the_end(self, tensor: Tensor) -> Tensor:
        """New rows (B, H, Lq, n), moved as the queries are."""
        return _moved(tensor, self._of(tensor.shape[0], self.arriving.left + self.arriving.count - self.rows))

    def back(self, out: Tensor) -> Tensor:
        """(B, heads, Lq, Dv), each row where its token came; rows of padding hold nothing."""
        return _moved(out, self._of(out.shape[0], self.rows - self.arriving.left - self.arriving.count))

    def _of(self, batch: int, counts: np.ndarray) -> np.ndarray:
        return np.broadcast_to(counts, (batch,))


def _moved(tensor: Tensor, by: np.ndarray) -> Tensor:
    """(B, H, L, n): row i of item b is the former row `i + by[b]`, modulo the length."""
    batch, _, length, _ = tensor.shape
    if not by.any() or not length:
        return tensor
    place = (np.arange(length) + by[:, None]) % length
    index = torch.from_numpy(place).to(tensor.device)
    return tensor[torch.arange(batch, device=tensor.device)[:, None], :, index].transpose(1, 2)


def _last_tokens(count: np.ndarray, length: int) -> Tensor:
    """Bool (B, L): the last `count[b]` of each."""
    return torch.from_numpy(np.arange(length) >= length - count[:, None])

"""A growing cache that keeps the sums of its keys, block by block.

Shape legend: B batch, Hkv key/value heads, T tokens of the longest item, n blocks, D key width.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..._int8_rows import Int8Rows
from .growing import GrowingLayer


class BlockSumsLayer(GrowingLayer):
    """For a mechanism that chooses blocks of keys by their means: a step sums only the keys of the last block.

    Beside keys and values it takes `8 Hkv D` bytes a block and item.

    Args:
        block: tokens in a block; an item's first token begins its first block.

    Example:
        >>> import torch, saccade
        >>> cache = saccade.nn.BlockSumsLayer(block=2)
        >>> with torch.no_grad():
        ...     inputs = cache.append(torch.ones(1, 1, 5, 3), torch.ones(1, 1, 5, 3), saccade.Causal())
        >>> cache.sums()[0, 0, :, 0]
        tensor([2., 2., 1.], dtype=torch.float64)
    """

    def __init__(self, block: int):
        super().__init__()
        self.block = block
        self._sums: Tensor | None = None  # (B, Hkv, n, D)
        self._whole = 0  # blocks whose sums stand in it for good: every item has all of their tokens

    def sums(self) -> Tensor:
        """Sums of keys by block, (B, Hkv, n, D) in float64; 0 after the last token of an item. Without a graph."""
        assert self._key is not None
        lengths = self.lengths()
        longest, first = int(lengths.max()), self._whole * self.block
        key = self._key[:, :, first:longest].detach()
        key = Int8Rows(key).floats(torch.float32) if self._rounds else key
        if lengths.size > 1:
            behind = torch.from_numpy(np.arange(first, longest) >= lengths[:, None]).to(key.device)
            key = key.masked_fill(behind[:, None, :, None], 0.0)
        wide = key.dtype if key.device.type == "mps" else torch.float64
        sums = F.pad(key, (0, 0, 0, -longest % self.block)).unflatten(2, (-1, self.block)).sum(3, dtype=wide)
        if self._sums is not None:
            sums = torch.cat((self._sums[:, :, : self._whole], sums), 2)
        self._sums, self._whole = sums, int(lengths.min()) // self.block
        return sums

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and sums, unused slots included."""
        return super().nbytes + (0 if self._sums is None else self._sums.nbytes)

    def reorder(self, items: Tensor) -> None:
        """As `LayerCache.reorder`."""
        super().reorder(items)
        if self._sums is not None:
            self._sums = self._sums.index_select(0, items.to(self._sums.device, torch.int64))

    def rollback(self, count: int | Tensor) -> None:
        """As `LayerCache.rollback`."""
        super().rollback(count)
        self._whole = min(self._whole, int(self.lengths().min()) // self.block)

    def reset(self) -> None:
        """Forget everything; another batch may come."""
        super().reset()
        self._sums, self._whole = None, 0

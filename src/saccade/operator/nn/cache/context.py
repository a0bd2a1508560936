"""Keys and values of a context, projected once.

Shape legend: B batch, Hkv key/value heads, Lc context tokens, D key width, Dv value width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .layer import checked_items

Pair = tuple[Tensor, Tensor]


class ContextLayer:
    """Cross-attention's cache: key (B, Hkv, Lc, D) and value (B, Hkv, Lc, Dv) of a context that does not change.

    Example:
        >>> import torch, saccade
        >>> layer = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4))
        >>> cache, context = saccade.nn.ContextLayer(), torch.randn(1, 7, 16)
        >>> for _ in range(3):  # keys and values of the context are projected once
        ...     out = layer(torch.randn(1, 1, 16), context=context, cache=cache)
        >>> cache.nbytes  # 2 tensors of 4 heads x 7 tokens x 4 numbers of 4 bytes
        896
    """

    def __init__(self) -> None:
        self._kept: Pair | None = None

    def get(self, project: Callable[[], Pair], batch: int | None = None) -> Pair:
        """Keys and values, projected at the first call and reused from then on.

        Args:
            project: makes them from the context.
            batch: of the queries, if it is to be checked.

        Raises:
            ValueError: the batch is another than that of the context.
        """
        kept = project() if self._kept is None else self._kept
        if batch is not None and kept[0].shape[0] != batch:
            raise ValueError(
                f"cache: it holds a context for a batch of {kept[0].shape[0]}, but queries for {batch} came: "
                "a cache serves one batch (reorder changes it)"
            )
        self._kept = kept
        return kept

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held."""
        return 0 if self._kept is None else sum(tensor.nbytes for tensor in self._kept)

    def reorder(self, items: Tensor) -> None:
        """Item b becomes a copy of item `items[b]`, integers (n,); errors as in `LayerCache.reorder`."""
        if self._kept is None:
            return
        items = checked_items(items, self._kept[0].shape[0])
        if not torch.equal(items, torch.arange(self._kept[0].shape[0])):
            key, value = (tensor.index_select(0, items.to(tensor.device)) for tensor in self._kept)
            self._kept = key, value

    def reset(self) -> None:
        """Forget the context; the next call projects another."""
        self._kept = None

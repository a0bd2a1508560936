"""The layout of a padded batch: computed with its padding, or packed, with the real tokens of all items in one row.

Shape legend: B batch, L length, T real tokens, E width; ... any further axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...operator._masks import Documents, Padding
from ...operator._observers import wants_padding_in_place
from ...operator.batching.packing import has_holes, real_row
from ...operator.nn import KVCache
from ...operator.positions import Offset


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """How the tokens of a batch (B, L) are arranged for a model's layers.

    If packed, the T real tokens of all items are in one row (1, T, ...), and `mask` separates the items: padding costs
    nothing in any layer (Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021). Otherwise the
    batch stays padded.

    Attributes:
        batch, length: B, L.
        real: bool (B, L); None if every token is real.
        places: int64 (T,), b * L + l of each real token, if packed; else None.
        padding: of padded batches; for `padding=` of modules.
        mask: of packed batches; for `mask=` of modules.
    """

    batch: int
    length: int
    real: Tensor | None = None
    places: Tensor | None = None
    padding: Padding | None = None
    mask: Documents | None = None

    def take(self, x: Tensor) -> Tensor:
        """Arrange (B, L, ...) for the layers: (1, T, ...) if packed."""
        return x if self.places is None else x.flatten(0, 1)[self.places][None]

    def packed(self, device: torch.device) -> TokenLayout:
        """The layout of the same batch in packed form, even without padding.

        For tensors computed elsewhere; models use the layout from `token_layout`.
        """
        if self.places is not None:
            return self
        if self.real is not None:
            return _packed(self.real) if bool(self.real.any()) else self
        real = torch.ones(self.batch, self.length, dtype=torch.bool, device=device)
        return _packed(real)

    def across(self, keys: TokenLayout) -> Documents:
        """The mask that lets tokens attend to the same item in another packed row, for cross-attention."""
        assert self.mask is not None and keys.mask is not None
        return Documents(self.mask.query_ids, keys.mask.query_ids)

    def put(self, x: Tensor, fill: float = 0) -> Tensor:
        """Undo `take`: the computed values as (B, L, ...), with `fill` at padding."""
        if self.places is None:
            if self.real is None:
                return x
            return torch.where(self.real.view(*self.real.shape, *(1,) * (x.ndim - 2)), x, fill)
        whole = x.new_full((self.batch * self.length, *x.shape[2:]), fill)
        return whole.index_copy(0, self.places, x[0]).view(self.batch, self.length, *x.shape[2:])

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor]:
        """The columns (B,) of the first and the last real token of each item."""
        if self.real is None:
            first = torch.zeros(self.batch, dtype=torch.int64)
            return first, first + self.length - 1
        real = self.real.int()
        return real.argmax(1), self.length - 1 - real.flip(1).argmax(1)

    @cached_property
    def items(self) -> Tensor:
        """int64 (T,), the item of each token in a packed batch."""
        assert self.places is not None
        return self.places.div(self.length, rounding_mode="floor")

    def counted(self, flags: Tensor) -> Tensor:
        """int64: number of flagged tokens of an item up to each token, inclusive; `flags` arranged as by `take`."""
        if self.places is None:
            if self.real is not None:
                first = self.ends[0][:, None]
                flags = flags & (torch.arange(self.length, device=first.device) >= first)
            return flags.long().cumsum(1)
        total = flags.long().cumsum(1)
        items = self.items
        starts = torch.searchsorted(items, torch.arange(self.batch, device=items.device))
        return total - (total - flags.long())[:, starts][:, items]

    def positions(self) -> Tensor:
        """int64, arranged as by `take`: columns counted from each item's first real token."""
        columns = torch.arange(self.length)
        if self.real is None:
            return columns.expand(self.batch, -1)
        first = self.ends[0]
        return self.take((columns.to(first.device) - first[:, None]).clamp(min=0))

    def offset(self, cache: KVCache | None) -> Offset:
        """Positions of the tokens: after those in a cache, else counted from each item's first real token."""
        if cache is None:
            return 0 if self.real is None else self.positions()
        offset = cache[0].offset(self.length, self.padding)
        if not isinstance(offset, Tensor):
            return offset
        # Left padding would have negative positions, which tables lack; its outputs are not used.
        return (offset[:, None] + torch.arange(self.length, device=offset.device)).clamp(min=0)

    def first(self, x: Tensor) -> Tensor:
        """The states (B, E) of each item's first real token."""
        return self.at(x, self.ends[0])

    def last(self, x: Tensor) -> Tensor:
        """The states (B, E) of each item's last real token."""
        return self.at(x, self.ends[1])

    def mean(self, x: Tensor) -> Tensor:
        """The mean (B, E) over each item's real tokens; 0 for an item without any."""
        if self.real is None:
            return x.mean(1)
        counts = self.real.sum(1, dtype=x.dtype).clamp(min=1)[:, None]
        if self.places is None:
            return self.put(x).sum(1) / counts
        return x.new_zeros(self.batch, x.shape[-1]).index_add(0, self.items, x[0]) / counts

    def place(self, item: int) -> tuple[int, slice]:
        """Row and columns of an item's tokens in computed tensors; only its real ones if packed."""
        if self.places is None or self.real is None:
            return item, slice(0, self.length)
        counts = self.real.sum(1)
        end = int(counts[: item + 1].sum())
        return 0, slice(end - int(counts[item]), end)

    def at(self, x: Tensor, columns: Tensor) -> Tensor:
        """The states (B, E) of the real tokens in these columns (B,); 0 for an item without tokens."""
        rows = torch.arange(self.batch, device=columns.device)
        if self.places is None:
            rows_at = x[rows, columns]
        else:
            places = (rows * self.length + columns).to(self.places)
            rows_at = x[0, torch.searchsorted(self.places, places).clamp(max=x.shape[1] - 1)]
        return rows_at if self.real is None else torch.where(self.real.any(1)[:, None], rows_at, 0)


def token_layout(batch: int, length: int, attention_mask: Any, *, packed: bool = True) -> TokenLayout:
    """The layout of a batch (B, L), whose real tokens have 1 or True in `attention_mask`; if it is None, all tokens are
    real.

    Args:
        packed: whether padding may be removed. It never is when compiling, since graphs may not depend on values, if an
            item has padding between real tokens, or while attention calls are edited or recorded.

    Raises:
        TypeError: not a tensor. ValueError: another shape, other values than 0 and 1.
    """
    if attention_mask is None:
        return TokenLayout(batch, length)
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask: expected a tensor (batch, length), got {type(attention_mask).__name__}")
    if attention_mask.shape != (batch, length):
        raise ValueError(f"attention_mask: expected shape {(batch, length)}, got {tuple(attention_mask.shape)}")
    real = attention_mask != 0
    if torch.compiler.is_compiling():
        return TokenLayout(batch, length, real, padding=Padding(real, queries=real))
    if attention_mask.dtype != torch.bool and bool((attention_mask != real).any()):
        raise ValueError("attention_mask: expected 1 for real tokens and 0 for padding, got other values")
    if bool(real.all()):
        return TokenLayout(batch, length)
    counts = real.sum(1).tolist()
    # Packing would close gaps between real tokens and so change distances (windows, rotary, T5's bias). Edits and
    # recorded # calls refer to items and positions, which a packed row does not have.
    if not packed or wants_padding_in_place() or not any(counts) or has_holes(real):
        return TokenLayout(batch, length, real, padding=Padding(real, queries=real))
    return _packed(real)


def _packed(real: Tensor) -> TokenLayout:
    batch, length = real.shape
    places, documents = real_row(real)
    return TokenLayout(batch, length, real, places, mask=documents)


@dataclass(frozen=True, eq=False)
class Memory:
    """The output of an encoder for a batch of sources, for any number of decoder calls.

    Attributes:
        x: the output, (1, T, E) if packed.
        layout: of the sources.
        hidden_states: each (B, Ls, E), if requested.
    """

    x: Tensor
    layout: TokenLayout
    hidden_states: tuple[Tensor, ...] | None = None

    @property
    def last_hidden_state(self) -> Tensor:
        """(B, Ls, E), 0 at padding."""
        return self.layout.put(self.x)

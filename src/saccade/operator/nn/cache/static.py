"""A cache of one fixed buffer.

Shape legend: B batch, Hkv key/value heads, Hq query heads, L new rows, C capacity, D key width, Dv value width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..._masks import FromTensor, Mask, Padding
from ..._masks._data import bounded
from ...positions import Offset
from .fitting import InOrder, bias_at, bias_in_order
from .key_positions import check_reach, standing
from .layer import CachedInputs, LayerCache, NewTokens, check_new, fits, lasting, refuse_gradients, slots
from .new_rows import alike


class StaticLayer(LayerCache):
    """Up to `capacity` tokens an item, in one buffer that is allocated at the first use and never moves.

    Memory is `(C + 1) Hkv (D + Dv)` numbers an item from the start. On a CPU, views of the part in use are returned.
    Under torch.compile and on CUDA all shapes stay the same from step to step: the whole buffer is returned, with a
    boolean tensor that hides the unused part, and lengths are tensors, so that a decoding step is compiled once. There
    the capacity cannot be checked: beyond it outputs become NaN, and the next call outside of the compiled function
    raises. Eager and compiled steps may take turns. In a compiled step a tensor as mask or bias must cover the
    capacity, relative biases become a dense row (Hq, 1, C), and holes in padding are not checked.

    Views handed out before see later writes into their slots (after a rollback or a reset). Keeps no gradients.

    Args:
        capacity: C, tokens of an item, at least 1.

    Example:
        >>> import torch, saccade
        >>> layer = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4))
        >>> cache = saccade.nn.StaticLayer(capacity=64)
        >>> with torch.no_grad():
        ...     out = layer(torch.randn(1, 5, 16), saccade.Causal(), cache=cache)
        >>> cache.length, cache.nbytes  # 64 slots and a spare one, each of 2 x 16 numbers of 4 bytes
        (5, 8320)
    """

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = bounded(capacity, "capacity", least=1)
        self._counts: Tensor | None = None  # int64 (B,), the lengths where the buffer is
        self._stale = False  # whether a compiled step has changed the lengths without telling the host
        self._empty = True  # since the start, or a reset: tensors of another shape may come

    def _append(self, new: NewTokens) -> CachedInputs:
        key, value, mask, bias, _ = new
        refuse_gradients("StaticLayer", key, value)
        if self._empty:
            self._allocate(key, value)
        if torch.compiler.is_compiling():
            check_new(key, value, self._key, self._value)
            self._empty, self._stale = False, True
            return self._append_tensors(new, self.capacity)
        arriving = self._arriving(new)
        before = self.lengths()
        after = before + arriving.count
        self._check_room(before, after)
        if self._keeps_shapes(key):
            seen = self._append_tensors(new, int(after.max(initial=0)))
            self._host, self._empty = alike(after)[0], False
            return seen
        question = ("in order", mask, key.shape[0], before.tobytes(), *arriving.summary)
        fit = self._latest.of(question, lambda: InOrder(mask, before, arriving, key.shape[0]))
        bias = None if bias is None else bias_in_order(bias, before, arriving, fit.held)
        assert self._key is not None and self._value is not None
        fit.put(self._key, key)
        fit.put(self._value, value)
        self._set_lengths(after)
        self._empty = False
        return CachedInputs(self._key[:, :, : fit.held], self._value[:, :, : fit.held], fit.mask, bias)

    def offset(self, length: int, padding: Padding | None = None) -> Offset:
        """As `LayerCache.offset`; under torch.compile always int64 (B,)."""
        if not torch.compiler.is_compiling() or self._counts is None:
            return super().offset(length, padding)
        return self._counts.clone() if padding is None else self._counts - _tokens(padding, length, self._counts)[0]

    @property
    def length(self) -> int | Tensor:
        """Tokens seen: an int where all items have as many, otherwise int64 (B,); under torch.compile always (B,)."""
        if torch.compiler.is_compiling() and self._counts is not None:
            return self._counts.clone()
        return super().length

    def reset(self) -> None:
        """Forget everything; the buffer is kept for the next sequences, unless those are of another batch or module."""
        self._empty = True
        self._set_lengths(np.zeros(1, np.int64))

    def _append_tensors(self, new: NewTokens, reach: int) -> CachedInputs:
        """`append` with tensor operations only; no shape depends on the number of cached tokens."""
        key, value, mask, bias, padding = new
        held_key, held_value, counts = self._key, self._value, self._counts
        assert held_key is not None and held_value is not None and counts is not None
        place, real, after = _places(counts, padding, key.shape[2])
        mask = standing(mask, reach)
        if mask is not None:
            check_reach(mask, reach, key.shape[0])
        fitted = _seen_slots(mask, place.clamp(0, self.capacity - 1), real, after, self.capacity)
        every = torch.arange(self.capacity, device=key.device)[None]
        bias = bias_at(bias, place.clamp(0, self.capacity - 1), every, reach, key.dtype)
        lost = (place >= self.capacity)[:, None, :, None]
        slot = place.clamp(max=self.capacity - 1)
        if real is not None:  # padding goes into the slot that nobody sees, as zeros
            slot = torch.where(real, slot, self.capacity)
            shown = real[:, None, :, None]
            lost, key, value = lost & shown, torch.where(shown, key, 0), torch.where(shown, value, 0)
        item = torch.arange(key.shape[0], device=key.device)[:, None]
        held_key[item, :, slot] = key.transpose(1, 2)
        nothing = -1 if self._rounds else float("nan")  # a scale of four bytes -1 is NaN
        held_value[item, :, slot] = torch.where(lost, nothing, value).transpose(1, 2)
        counts.copy_(after)
        return CachedInputs(held_key[:, :, : self.capacity], held_value[:, :, : self.capacity], fitted, bias)

    @staticmethod
    def _keeps_shapes(key: Tensor) -> bool:
        """Whether an eager step is to look the same whatever the length, so that graphs of kernels can be recorded."""
        return key.is_cuda

    def _allocate(self, key: Tensor, value: Tensor) -> None:
        """Make buffers that fit these tokens, with one more slot for padding. Existing buffers are kept if they fit."""
        if self._key is not None and self._value is not None and fits(key, self._key) and fits(value, self._value):
            return
        self._key, self._value = slots(key, self.capacity + 1), slots(value, self.capacity + 1)
        with lasting():
            self._counts = torch.zeros(key.shape[0], dtype=torch.int64, device=key.device)

    def _check_room(self, before: np.ndarray, after: np.ndarray) -> None:
        if after.max(initial=0) > self.capacity:
            item = int(after.argmax())
            old = int(np.broadcast_to(before, after.shape)[item])
            raise ValueError(
                f"cache: {old} tokens and {int(after[item]) - old} new ones do not fit its capacity of {self.capacity}"
            )

    def lengths(self) -> np.ndarray:
        if self._stale and self._counts is not None:
            super()._set_lengths(self._counts.cpu().numpy())
            self._stale = False
        return self._host

    def _set_lengths(self, lengths: np.ndarray) -> None:
        super()._set_lengths(lengths)
        self._stale = False
        if self._counts is not None and self._key is not None:
            with lasting():
                known = torch.from_numpy(np.broadcast_to(self._host, self._key.shape[:1]).copy())
            if self._counts.shape == known.shape:
                self._counts.copy_(known)
            else:
                with lasting():
                    self._counts = known.to(self._counts.device)

    def _choose_lengths(self, items: np.ndarray) -> None:
        lengths = self.lengths()
        self._set_lengths(lengths if lengths.size == 1 else lengths[items])

    def _chosen(self, tensor: Tensor, items: Tensor) -> Tensor:
        chosen = super()._chosen(tensor, items)
        # In its place where it can be: a recorded graph of kernels knows the buffer by its address.
        return tensor.copy_(chosen) if chosen.shape == tensor.shape else chosen


def _tokens(padding: Padding, rows: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(left (B,), count (B,), real (B, rows)) as `NewRows` has them on the host."""
    values = padding.keys.table.values.to(like.device)
    if values.dtype == torch.bool:
        return values.to(torch.int64).argmax(1), values.sum(1), values
    return torch.zeros_like(values), values, torch.arange(rows, device=like.device) < values[:, None]


def _places(counts: Tensor, padding: Padding | None, rows: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """(position of each row (B, rows), which rows are tokens or None, the new lengths (B,))."""
    row = torch.arange(rows, device=counts.device)
    if padding is None:
        return counts[:, None] + row, None, counts + rows
    left, count, real = _tokens(padding, rows, counts)
    return (counts - left)[:, None] + row, real, counts + count


def _seen_slots(mask: Mask | None, place: Tensor, real: Tensor | None, after: Tensor, capacity: int) -> Mask:
    """Which slots each row sees, bool (B, 1 or Hq, L, C)."""
    device = place.device
    slot = torch.arange(capacity, device=device)[None, None, None]
    seen = slot < after[:, None, None, None]
    if real is not None:
        seen = seen & real[:, None, :, None]
    if mask is not None:
        item = torch.arange(place.shape[0], device=device)[:, None, None, None]
        head = torch.arange(mask._batch_and_heads()[1], device=device)[None, :, None, None]
        where = place[:, None, :, None]
        seen = seen & mask.allows(item, head, where, where, slot)
    return FromTensor(seen.expand(-1, -1, place.shape[1], -1))

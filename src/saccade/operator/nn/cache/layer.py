"""The interface of every cache of one layer.

Shape legend: B batch, Hkv key/value heads, L new rows, D key width, Dv value width, S slots.
Arrays of one entry speak for all items, those of B entries for each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._backends import native
from ..._biases import Bias
from ..._int8_rows import SCALE_BYTES, Int8Rows, as_floats
from ..._masks import Mask, Padding
from ...positions import Offset
from .fitting import LastAnswers
from .new_rows import NewRows, alike, per_item


class CachedInputs(NamedTuple):
    """The tensors that an attention call reads after its new tokens joined the cache; `LayerCache.append` returns it.

    Attributes:
        key: (B, Hkv, S, D); `Int8Rows` where the cache keeps 8 bits.
        value: (B, Hkv, S, Dv), likewise.
        mask: who sees whom, fitted to these keys; None shows everything.
        bias: added to the logits, fitted to these keys; None adds nothing.

    Example:
        >>> import torch, saccade
        >>> cache = saccade.nn.GrowingLayer()
        >>> with torch.no_grad():
        ...     for length in (3, 1):
        ...         inputs = cache.append(*torch.randn(2, 1, 2, length, 8), saccade.Causal())
        >>> inputs.key.shape, inputs.mask
        (torch.Size([1, 2, 4, 8]), Causal())
    """

    key: Tensor | Int8Rows
    value: Tensor | Int8Rows
    mask: Mask | None
    bias: Tensor | Bias | None

    def in_floats(self, dtype: torch.dtype) -> CachedInputs:
        """The same with tensors as key and value; `dtype` is that of what was rounded to 8 bits."""
        return self._replace(key=as_floats(self.key, dtype), value=as_floats(self.value, dtype))


class NewTokens(NamedTuple):
    """The arguments of `LayerCache.append`."""

    key: Tensor
    value: Tensor
    mask: Mask | None
    bias: Tensor | Bias | None
    padding: Padding | None


class LayerCache(ABC):
    """The keys and values of the tokens one layer has seen; keys are already turned by their positions. Abstract.

    Each item of the batch has a length of its own, and its tokens stand at positions 0, 1, ..., whatever side its rows
    were padded on. Queries stay in the rows they came in; `offset` says where row 0 of each item stands.

    Lengths are kept on the host, so that no call waits for a device.

    Example:
        >>> import torch, saccade
        >>> layer = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4))
        >>> cache = layer.cache()
        >>> isinstance(cache, saccade.nn.LayerCache)
        True
        >>> with torch.no_grad():
        ...     out = layer(torch.randn(2, 5, 16), saccade.Causal(), cache=cache, padding=saccade.Padding([5, 3]))
        >>> cache.length
        tensor([5, 3])
    """

    _rounds = False  # whether keys and values are kept in 8 bits, as `Int8Rows.data`

    def __init__(self) -> None:
        self._key: Tensor | None = None  # (B, Hkv, S, D)
        self._value: Tensor | None = None  # (B, Hkv, S, Dv)
        self._host = np.zeros(1, np.int64)
        self._latest = LastAnswers()

    def append(
        self,
        key: Tensor,
        value: Tensor,
        mask: Mask | None,
        bias: Tensor | Bias | None = None,
        padding: Padding | None = None,
    ) -> CachedInputs:
        """Add new tokens, and return the keys and values that their queries attend to.

        Args:
            key, value: (B, Hkv, L, D) and (B, Hkv, L, Dv) of the new rows.
            mask, bias: those of the whole sequence, in positions, as the parallel forward over all tokens gets them.
                They may reach further than the tokens so far. None: everything seen so far, no bias.
            padding: which of the new rows are tokens, `Padding(lengths (B,))` or `Padding(booleans (B, L))`; those of
                an item stand side by side. The others are not read, and their rows attend to nothing.

        Returns:
            Keys and values of all that may be attended to, with mask and bias fitted to them.

        Raises:
            TypeError: a `RecurrentLayer`, which holds neither keys nor values.
            ValueError: tensors of another batch, number of heads, width, dtype or device than those held, padding that
                does not fit, a mask or bias that is placed already or too short; gradients that would be recorded, in
                any layer but a `GrowingLayer`; no room in a `StaticLayer`; in a `StreamingLayer` a bias given as a
                tensor, which depends on absolute positions. Nothing is added then.
        """
        seen = self._append(self._kept_as(NewTokens(key, value, mask, bias, padding)))
        return self._rows_of(seen) if self._rounds else seen

    def round_to(self, dtype: str) -> None:
        """Keep keys and values in 8 bits from now on; `KVCache(layers, dtype="int8")` calls it.

        Raises:
            ValueError: another dtype, or a cache that has tokens already.
        """
        self._check_dtype(dtype)
        self.reset()
        self._rounds = True

    def _check_dtype(self, dtype: str) -> None:
        """The errors of `round_to`."""
        if dtype != "int8":
            raise ValueError(f"dtype: expected 'int8', or None for that of the keys, got {dtype!r}")
        if self.lengths().any():
            raise ValueError(f"dtype: this {type(self).__name__} has tokens already; reset() it first")

    def _kept_as(self, new: NewTokens) -> NewTokens:
        """New tokens with keys and values as this cache keeps them."""
        if not self._rounds:
            return new
        if not new.key.dim() == new.value.dim() == 4:
            check_new(new.key, new.value, None, None)
        if torch.is_grad_enabled() and (new.key.requires_grad or new.value.requires_grad):
            raise ValueError(
                "cache: keys and values in 8 bits keep no gradients; decode under torch.no_grad(), or train through a "
                "GrowingLayer without dtype='int8'"
            )
        return new._replace(key=native.rounded_rows(new.key).data, value=native.rounded_rows(new.value).data)

    @staticmethod
    def _rows_of(read: CachedInputs) -> CachedInputs:
        """The bytes of a cache in 8 bits as rows; keys that a `StreamingLayer` has turned are floats already."""
        key, value = (Int8Rows(x) if isinstance(x, Tensor) and x.dtype == torch.int8 else x for x in read[:2])
        return CachedInputs(key, value, read.mask, read.bias)

    @abstractmethod
    def _append(self, new: NewTokens) -> CachedInputs: ...

    def offset(self, length: int, padding: Padding | None = None) -> Offset:
        """Position of row 0 of `length` new rows: an int, or int64 (B,) where items differ; negative if left-padded."""
        arriving, lengths = NewRows.of(padding, length), self.lengths()
        if arriving.left.size > 1 or lengths.size > 1:  # one tensor for all layers
            question = "offset", lengths.tobytes(), *arriving.summary, self._place(padding)
            return self._latest.of(question, lambda: self._offset(arriving, padding))
        return self._offset(arriving, padding)

    def _offset(self, arriving: NewRows, padding: Padding | None) -> Offset:
        start = self.lengths() - arriving.left
        if start.size == 1 and start[0] >= 0:
            return int(start[0])
        if padding is not None and start.size == 1:
            start = start.repeat(padding.keys.batch)  # an int that is a position is never negative
        return torch.from_numpy(start).to(self._place(padding))

    def reach(self, rows: int) -> int:
        """One past the furthest position that any of `rows` more rows gets."""
        return int(self.lengths().max(initial=0)) + rows

    @property
    def length(self) -> int | Tensor:
        """Tokens seen: an int where all items have as many, otherwise int64 (B,)."""
        lengths = self.lengths()
        return int(lengths[0]) if lengths.size == 1 else torch.from_numpy(lengths.copy()).to(self._place(None))

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held, unused slots included."""
        return sum(tensor.nbytes for tensor in (self._key, self._value) if tensor is not None)

    @property
    def mask(self) -> Mask | None:
        """The mask of the pairs that this cache hides although the parallel forward pass shows them; None if there are
        none."""
        return None

    def reorder(self, items: Tensor) -> None:
        """Beam search: item b becomes a copy of item `items[b]`. The batch may grow or shrink.

        Args:
            items: integers (n,).

        Raises:
            TypeError: not integers. ValueError: another rank, or an item that does not exist.
        """
        if self._key is None or self._value is None:
            return
        items = checked_items(items, self._key.shape[0])
        self._key, self._value = self._chosen(self._key, items), self._chosen(self._value, items)
        self._choose_lengths(items.numpy())

    def rollback(self, count: int | Tensor) -> None:
        """Forget the last `count` tokens of each item; int64 (B,) where it differs.

        Raises:
            TypeError: not integers.
            ValueError: negative, another shape, more than there are, or more than this cache can take back.
        """
        self._set_lengths(self._rolled_back(count))

    def reset(self) -> None:
        """Forget everything; another batch may come."""
        self._key = self._value = None
        self._set_lengths(np.zeros(1, np.int64))

    def lengths(self) -> np.ndarray:
        """Tokens seen, on the host: int64 (1,) where all items have as many, otherwise (B,). Not to be written to."""
        return self._host

    def _set_lengths(self, lengths: np.ndarray) -> None:
        (self._host,) = alike(lengths)

    def _choose_lengths(self, items: np.ndarray) -> None:
        if self._host.size > 1:
            self._set_lengths(self._host[items])

    def _chosen(self, tensor: Tensor, items: Tensor) -> Tensor:
        with lasting():
            return tensor.index_select(0, items.to(tensor.device))

    def _rolled_back(self, count: int | Tensor) -> np.ndarray:
        """The lengths without the last `count` tokens."""
        lengths = self.lengths()
        counts = per_item(count, self._batch(), "rollback")
        after: np.ndarray = lengths - counts
        if (after < 0).any():
            worst = int(after.argmin())
            lengths, counts = np.broadcast_arrays(lengths, counts)
            raise ValueError(f"rollback: expected at most the {lengths[worst]} tokens there are, got {counts[worst]}")
        return after

    def _batch(self) -> int | None:
        """The number of items; None before the first tokens."""
        return None if self._key is None else self._key.shape[0]

    def _place(self, padding: Padding | None) -> torch.device:
        if self._key is not None:
            return self._key.device
        return torch.device("cpu") if padding is None else padding.keys.table.values.device

    def _arriving(self, new: NewTokens) -> NewRows:
        """Check the new tokens, and return which of their rows are tokens."""
        check_new(new.key, new.value, self._key, self._value)
        arriving = NewRows.of(new.padding, new.key.shape[2])
        arriving.check_batch(new.key.shape[0], new.padding)
        return arriving


def check_new(key: Tensor, value: Tensor, held_key: Tensor | None, held_value: Tensor | None) -> None:
    """ValueError unless new keys and values fit each other and those in the cache."""
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"{name}: expected shape (batch, heads, length, width), got {tuple(tensor.shape)}")
    several = key.shape[1] % max(value.shape[1], 1) == 0  # differential attention has two keys for each value
    if key.shape[0] != value.shape[0] or key.shape[2] != value.shape[2] or not several:
        raise ValueError(
            f"value: has (batch, heads, length) {tuple(value.shape[:3])}, expected the key's {tuple(key.shape[:3])}"
        )
    for name, new, held in (("key", key, held_key), ("value", value, held_value)):
        if held is not None and not fits(new, held):
            raise ValueError(
                f"cache: it holds {name}s of (batch, heads, width) {_described(held)}, but new ones of "
                f"{_described(new)} came: a cache serves one batch and one module"
            )


def checked_items(items: Tensor, batch: int) -> Tensor:
    """int64 (n,) on the host, each an item of the batch."""
    if not isinstance(items, Tensor) or items.dtype not in (torch.int64, torch.int32):
        got = items.dtype if isinstance(items, Tensor) else type(items).__name__
        raise TypeError(f"items: expected int64 (n,), the item each new one is a copy of, got {got}")
    if items.dim() != 1:
        raise ValueError(f"items: expected int64 (n,), got shape {tuple(items.shape)}")
    items = items.to("cpu", torch.int64)
    wrong = items[(items < 0) | (items >= batch)]
    if wrong.numel():
        raise ValueError(f"items: there is no item {int(wrong[0])}, the cache holds {batch} (0 to {batch - 1})")
    return items


def joined(held: Tensor | None, new: Tensor, before: np.ndarray, arriving: NewRows) -> Tensor:
    """Cached tokens followed by the new tokens, item by item: a new tensor (B, H, S, n), differentiable."""
    used = int(before.max(initial=0))
    if before.size == 1 and arriving.count.size == 1:
        tokens = new.narrow(2, int(arriving.left[0]), int(arriving.count[0]))
        return tokens if held is None or not used else torch.cat((held[:, :, :used], tokens), 2)
    if not used and not arriving.left.any():
        return new
    rows = new if held is None else torch.cat((held[:, :, :used], new), 2)
    slot = np.arange(int((before + arriving.count).max(initial=0)))
    first = (used if held is not None else 0) + arriving.left - before
    place = np.where(slot < before[:, None], slot, first[:, None] + slot).clip(0, rows.shape[2] - 1)
    index = torch.from_numpy(np.broadcast_to(place, (new.shape[0], slot.size)).copy()).to(new.device)
    return rows.gather(2, index[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3]))


def scatter(buffer: Tensor, new: Tensor, item: np.ndarray, row: np.ndarray, slot: np.ndarray) -> None:
    """`buffer[item, :, slot] = new[item, :, row]`, pair by pair."""
    items, rows, slots = (torch.from_numpy(index).to(buffer.device) for index in (item, row, slot))
    buffer[items, :, slots] = new[items, :, rows]


def slots(like: Tensor, count: int, held: Tensor | None = None) -> Tensor:
    """Zeros (B, H, count, n) that begin with the cached tokens. Uninitialised memory may hold NaN, and a non-finite
    entry anywhere would make attention take its slower, guarded way."""
    batch, heads, _, width = like.shape
    with lasting():
        buffer = torch.zeros(batch, heads, count, width, dtype=like.dtype, device=like.device)
    if held is not None:
        buffer[:, :, : held.shape[2]] = held
    return buffer


def lasting() -> AbstractContextManager[object]:
    """Tensors made here can be written to outside of inference mode, too."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():  # the second cannot be traced
        return nullcontext()
    return torch.inference_mode(False)


def refuse_gradients(name: str, *tensors: Tensor) -> None:
    """ValueError if a graph would be recorded through a cache that writes in place."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            f"{name}: writes in place and keeps no gradients; decode under torch.no_grad(), or train through a "
            "GrowingLayer"
        )


def fits(new: Tensor, held: Tensor) -> bool:
    """Whether new and held tokens agree in shape (except the length), dtype and device."""
    (batch, heads, _, width), (held_batch, held_heads, _, held_width) = new.shape, held.shape
    same = batch == held_batch and heads == held_heads and width == held_width
    return same and new.dtype == held.dtype and new.device == held.device


def _described(tensor: Tensor) -> str:
    batch, heads, _, width = tensor.shape
    width -= SCALE_BYTES if tensor.dtype == torch.int8 else 0
    return f"{(batch, heads, width)} in {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"

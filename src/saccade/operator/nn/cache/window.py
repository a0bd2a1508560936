"""A cache of the last tokens, and of the first.

Shape legend: B batch, Hkv key/value heads, L new rows, D key width, Dv value width, T tokens so far, R = window +
slack, S = sinks + R slots.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..._biases import Bias, RelativeScores
from ..._masks import FromTensor, Global, Mask, Padding, Window
from ..._masks._data import bounded
from ..._scores._score import Score
from .fitting import bias_at, bias_in_order, checked_bias, in_order, placed
from .key_positions import KeysAtPositions, both, refuse_placed, standing
from .layer import CachedInputs, LayerCache, NewTokens, joined, refuse_gradients, scatter, slots
from .new_rows import NewRows, alike

_DIRECT = 1 << 16  # pairs whose mask is looked at at once, not tile by tile


class WindowLayer(LayerCache):
    """The last `window` tokens and the first `sinks`, in memory that does not grow.

    A ring: position p is kept in slot p while `p < sinks`, else in slot `sinks + (p - sinks) % R`, R = window + slack.
    Memory is `(sinks + R) Hkv (D + Dv)` numbers an item. Decoding equals the parallel forward under `.mask`,
    `Window(window - 1, 0) | Global(range(sinks))`, joined to the mask of the call. Keeping the first tokens: Xiao et
    al., "Efficient Streaming Language Models with Attention Sinks" (2023), but with positions as they were.

    Chunks of at most `slack + 1` rows, and all while nothing has been overwritten, are answered from the ring itself;
    longer ones from what it holds and the chunk, before the chunk is written. Masks stay values in that, of memory
    linear in the chunk. ALiBi, relative and dense biases become a tensor (Hq, L, S + L) once tokens have been
    overwritten and there are sinks, or where lengths differ between items.

    Views handed out before see later writes into their slots. Keeps no gradients.

    Args:
        window: keys that a query sees, its own among them; at least 1.
        sinks: first tokens that stay visible.
        slack: tokens that can be rolled back once the ring is full.

    Example:
        >>> import torch, saccade
        >>> layer = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4)).eval()
        >>> cache, x = saccade.nn.WindowLayer(window=3, sinks=1), torch.randn(1, 9, 16)
        >>> with torch.no_grad():
        ...     steps = [layer(x[:, i : i + 1], saccade.Causal(), cache=cache) for i in range(9)]
        >>> torch.allclose(torch.cat(steps, dim=1), layer(x, saccade.Causal() & cache.mask), atol=1e-5)
        True
    """

    def __init__(self, window: int, sinks: int = 0, slack: int = 0):
        super().__init__()
        self.window = bounded(window, "window", least=1)
        self.sinks = bounded(sinks, "sinks", least=0)
        self.slack = bounded(slack, "slack", least=0)
        self._top = np.zeros(1, np.int64)  # the longest each item has been: what lies before top - R is overwritten
        own: Mask = Window(self.window - 1, 0)
        self._own = own | Global(range(self.sinks)) if self.sinks else own

    @property
    def mask(self) -> Mask:
        """The visible part of the sequence: the window and the sinks."""
        return self._own

    @property
    def ring(self) -> int:
        """R, slots that are used in turn."""
        return self.window + self.slack

    def _append(self, new: NewTokens) -> CachedInputs:
        refuse_gradients("WindowLayer", new.key, new.value)
        refuse_placed(new.mask)
        arriving = self._arriving(new)
        before, (top, _) = self._host, np.broadcast_arrays(self._top, arriving.count)
        top = np.maximum(top, before + arriving.count)
        if (top <= self.sinks + self.ring).all():
            return self._append_in_order(new, arriving, top)
        if arriving.rows <= self.slack + 1:
            return self._turning(new, arriving, top)
        return self._long(new, arriving, top)

    def reset(self) -> None:
        """Forget everything; another batch may come."""
        super().reset()
        self._top = np.zeros(1, np.int64)

    def _append_in_order(self, new: NewTokens, arriving: NewRows, top: np.ndarray) -> CachedInputs:
        """Slots are positions: nothing has been or will be overwritten."""
        key, value, mask, bias, _ = new
        before, batch = self._host, key.shape[0]
        held = int((before + arriving.count).max(initial=0))
        question = ("in order", self._own, mask, batch, before.tobytes(), *arriving.summary)
        fitted = self._latest.of(question, lambda: in_order(both(mask, self._own), before, arriving, held, batch))
        bias = bias_in_order(bias, before, arriving, held)
        held_key, held_value = self._write(key, value, arriving, top)
        return CachedInputs(held_key[:, :, :held], held_value[:, :, :held], fitted, bias)

    def _turning(self, new: NewTokens, arriving: NewRows, top: np.ndarray) -> CachedInputs:
        """The ring once the new tokens are in it, in the order of its slots."""
        key, value, mask, bias, _ = new
        before, batch = self._host, key.shape[0]
        question = ("ring", self._own, self.slack, mask, batch, before.tobytes(), *arriving.summary, top.tobytes())

        def fit() -> tuple[Mask | None, np.ndarray]:
            places = self._places(before + arriving.count, top)
            fitted = _stored(both(mask, self._own), places, before, arriving, batch)
            return looked_at(fitted, arriving.rows, places.shape[1], key), places

        fitted, places = self._latest.of(question, fit)
        bias = _dense(bias, before, arriving, places, key)
        held_key, held_value = self._write(key, value, arriving, top)
        return CachedInputs(held_key, held_value, fitted, bias)

    def _long(self, new: NewTokens, arriving: NewRows, top: np.ndarray) -> CachedInputs:
        """A chunk that would overwrite keys that its own first rows see: it is answered first, then written."""
        key, value, mask, bias, _ = new
        before, batch, rows = self._host, key.shape[0], arriving.rows
        whole = both(mask, self._own)
        old = self._kept()
        first = int(before[0]) - old.shape[1]
        if not before.any():  # an empty ring: the chunk alone, in order
            keys, values = (joined(None, tensor, before, arriving) for tensor in (key, value))
            fitted: Mask | None = in_order(whole, before, arriving, keys.shape[2], batch)
            bias = bias_in_order(bias, before, arriving, keys.shape[2])
        elif arriving.whole and before.size == 1 and (old[0] == np.arange(first, before[0])).all():  # no gap
            keys, values = self._appended(old, key, value)
            reach = int(before[0]) + rows
            placed_whole = standing(whole, reach)
            assert placed_whole is not None
            fitted = _checked(
                placed_whole.at(0).slice((reach - rows, reach), (first, reach)), batch, rows, reach - first
            )
            bias = bias if _follows(bias) else _dense(bias, before, arriving, np.arange(first, reach)[None], key)
        else:
            keys, values = self._appended(old, key, value)
            added = np.where(arriving.real(), (before - arriving.left)[:, None] + np.arange(rows), -1)
            places = side_by_side(old, added)
            fitted = _stored(whole, places, before, arriving, batch)
            bias = _dense(bias, before, arriving, places, key)
        self._write(key, value, arriving, top)
        return CachedInputs(keys, values, fitted, bias)

    def _appended(self, old: np.ndarray, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values that are cached at the positions `old` (1 or B, n), followed by the new keys and
        values."""
        assert self._key is not None and self._value is not None
        index = torch.from_numpy(self._slot(old.clip(min=0))).to(key.device)
        pairs = []
        for held, new in ((self._key, key), (self._value, value)):
            if index.shape[0] == 1:
                kept = held.index_select(2, index[0])
            else:
                kept = held.gather(2, index[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[3]))
            pairs.append(torch.cat((kept, new), 2))
        return pairs[0], pairs[1]

    def _kept(self) -> np.ndarray:
        """Positions (1 or B, n) that the next token may see; -1 where an item has fewer."""
        before = self._host[:, None]
        recent = before - (self.window - 1) + np.arange(self.window - 1)
        recent = np.where(recent >= self.sinks, recent, -1)
        first = np.where(np.arange(self.sinks) < before, np.arange(self.sinks), -1)
        places = np.concatenate((first, recent), 1)
        return places[:, (places >= 0).any(0)]

    def _places(self, lengths: np.ndarray, top: np.ndarray) -> np.ndarray:
        """The position (1 or B, S) of the token in each slot; -1 where there is none."""
        lengths, slot = lengths[:, None], np.arange(self.ring)
        last = self.sinks + (lengths - self.sinks - 1 - slot) // self.ring * self.ring + slot
        held = np.where((last >= self.sinks) & (last >= top[:, None] - self.ring), last, -1)
        first = np.where(np.arange(self.sinks) < lengths, np.arange(self.sinks), -1)
        return side_by_side(first, held)

    def _slot(self, place: np.ndarray) -> np.ndarray:
        return np.where(place < self.sinks, place, self.sinks + (place - self.sinks) % self.ring)

    def _write(self, key: Tensor, value: Tensor, arriving: NewRows, top: np.ndarray) -> tuple[Tensor, Tensor]:
        """Write the new tokens that stay in the cache. Each overwrites the token that is one ring length before it."""
        if self._key is None or self._value is None:
            self._key, self._value = (slots(new, self.sinks + self.ring) for new in (key, value))
        before = self._host
        place = (before - arriving.left)[:, None] + np.arange(arriving.rows)
        after = before + arriving.count
        lasting = arriving.real() & ((place < self.sinks) | (place >= after[:, None] - self.ring))
        slot = np.broadcast_to(self._slot(place), lasting.shape)
        for held, new in ((self._key, key), (self._value, value)):
            if len(lasting) == 1:
                _write_slots(held, new, np.flatnonzero(lasting[0]), slot[0])
            else:
                item, row = np.nonzero(lasting)
                scatter(held, new, item, row, slot[item, row])
        self._set_lengths(after)
        (self._top,) = alike(top)
        return self._key, self._value

    def _rolled_back(self, count: int | Tensor) -> np.ndarray:
        after = super()._rolled_back(count)
        after, lengths, top = np.broadcast_arrays(after, self._host, self._top)
        lost = (top > self.sinks + self.ring) & (after < lengths) & (after < top - self.slack)
        if lost.any():
            worst = int(np.flatnonzero(lost)[0])
            left = max(0, int(lengths[worst] - top[worst]) + self.slack)
            raise ValueError(
                f"rollback: {lengths[worst] - after[worst]} tokens, but a ring of slack {self.slack} that has "
                f"overwritten older ones can take back at most {left} now"
            )
        return after

    def _choose_lengths(self, items: np.ndarray) -> None:
        super()._choose_lengths(items)
        if self._top.size > 1:
            (self._top,) = alike(self._top[items])


def side_by_side(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Arrays (1 or B, n) and (1 or B, k) as one (1 or B, n + k)."""
    items = max(len(left), len(right))
    return np.concatenate([np.broadcast_to(side, (items, side.shape[1])) for side in (left, right)], 1)


def _write_slots(held: Tensor, new: Tensor, row: np.ndarray, slot: np.ndarray) -> None:
    """`held[:, :, slot[row]] = new[:, :, row]`."""
    if row.size == 1:
        held[:, :, int(slot[row[0]])] = new[:, :, int(row[0])]
    elif row.size:
        where, rows = (torch.from_numpy(index).to(held.device) for index in (slot[row], row))
        held.index_copy_(2, where, new.index_select(2, rows))


def _stored(mask: Mask | None, places: np.ndarray, before: np.ndarray, arriving: NewRows, batch: int) -> Mask:
    """The mask of new rows over keys at any positions (1 or B, Lk)."""
    standing_mask = standing(mask, int((before + arriving.count).max(initial=0)))
    assert standing_mask is not None
    shown: Mask = KeysAtPositions(standing_mask, places)
    if not arriving.whole:
        shown = shown & Padding([places.shape[1]] * arriving.count.size, queries=arriving.queries())
    fitted = placed(shown, before - arriving.left, places.shape[1] - arriving.rows)
    assert fitted is not None
    return _checked(fitted, batch, arriving.rows, places.shape[1])


def _checked(mask: Mask, batch: int, rows: int, keys: int) -> Mask:
    mask.check(batch, None, rows, keys, None)
    return mask


def looked_at(mask: Mask, rows: int, keys: int, key: Tensor) -> Mask | None:
    """The mask as a boolean tensor for PyTorch's fused kernels if it is small; otherwise the mask itself. None if the
    tensor, on a CPU, hides nothing."""
    batch, heads = mask._batch_and_heads()
    if batch * heads * rows * keys > _DIRECT:
        return mask
    bits = mask.dense(rows, keys, device=key.device)
    return None if key.device.type == "cpu" and bool(bits.all()) else FromTensor(bits)


def _dense(
    bias: Tensor | Bias | None, before: np.ndarray, arriving: NewRows, places: np.ndarray, key: Tensor
) -> Tensor | Score | None:
    rows = (before - arriving.left)[:, None] + np.arange(arriving.rows)
    at, keys = (torch.from_numpy(np.ascontiguousarray(x)).to(key.device) for x in (rows, places.clip(min=0)))
    return bias_at(bias, at, keys, int((before + arriving.count).max(initial=0)), key.dtype)


def _follows(bias: Tensor | Bias | None) -> bool:
    """Whether the bias follows a mask that is placed."""
    return bias is None or isinstance(checked_bias(bias), (RelativeScores, Score))

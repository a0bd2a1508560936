"""A cache for endless streams: the first and the last tokens, with positions counted within the cache.

Shape legend: B batch, Hq / Hkv query and key-value heads, L new rows, D key width, Dv value width, S sinks, W window,
n keys that are no sinks, N = L S + n.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._biases import Bias, RelativeScores
from ..._int8_rows import Int8Rows
from ..._masks import Mask, Padding
from ..._masks._intervals import Kind, Region
from ..._scores._score import Score
from ...positions import Offset
from ...variants.patterns import streaming
from .fitting import bias_at, checked_bias, placed
from .key_positions import KeysAtPositions, both, refuse_placed, standing
from .layer import CachedInputs, NewTokens, refuse_gradients
from .new_rows import NewRows
from .window import WindowLayer, looked_at, side_by_side

Turn = Callable[[Tensor, Offset], Tensor]


class StreamingLayer(WindowLayer):
    """The first `sinks` tokens and the last `window`, where positions are places in the cache, not in the text.

    Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023), section 3.2. A query sees the list
    [sinks, last tokens, itself], and positions are 0, 1, ... along that list, at every step anew. With the sinks at
    0 1 2 3, the tokens 6 7 8 of a text stand at 4 5 6: however long the stream, no distance is larger than the cache,
    and none need be larger than those a model was trained with. So keys are kept as they were before rotary positions
    turned them, and turned when they are read. ALiBi and relative biases use the same places. Positions that are added
    to tokens before attention are in the keys and stay as they were.

        sinks=2, window=3      tokens of the text      where they stand
        step 4                 0 1   2 3 4             0 1   2 3 4
        step 5                 0 1     3 4 5           0 1   2 3 4
        step 6                 0 1       4 5 6         0 1   2 3 4

    Each row of a chunk sees what it would see alone. A row's distances to the recent tokens are those in the text, so
    these keys are turned once for all rows; each row gets sinks of its own, `L S` keys more.

    Without positions it is a `WindowLayer` in which nothing sees ahead; memory and `slack` are as there. Once tokens
    have been dropped it equals no parallel forward: in none does a token stand at several positions.

    Args:
        window: W, keys that a query sees besides the sinks, its own among them; at least 1.
        sinks: S, first tokens that stay visible; the paper takes 4.
        slack: tokens that can be rolled back once the ring is full.

    Example:
        >>> import torch, saccade
        >>> config = saccade.nn.AttentionConfig(16, heads=4, positions=saccade.positions.RotaryConfig())
        >>> layer, cache = saccade.nn.MultiHeadAttention(config), saccade.nn.StreamingLayer(window=8, sinks=4)
        >>> with torch.no_grad():
        ...     for length in (10, 10, 10):
        ...         out = layer(torch.randn(1, length, 16), saccade.Causal(), cache=cache)
        >>> cache.length, cache.reach(rows=1)  # 30 tokens seen, no position beyond 12
        (30, 12)
    """

    def __init__(self, window: int, sinks: int = 4, slack: int = 0):
        super().__init__(window, sinks, slack)
        self._own = streaming(self.window, self.sinks)

    def reach(self, rows: int) -> int:
        """One past the furthest position that any of `rows` more rows gets: never more than S + W."""
        return min(super().reach(rows), self.sinks + self.window)

    def _append(self, new: NewTokens) -> CachedInputs:
        if checked_bias(new.bias) is None:
            return super()._append(new)
        return self._turned(None, new, lambda tensor, places: tensor)[1]

    def turned(
        self,
        query: Tensor | None,
        key: Tensor,
        value: Tensor,
        mask: Mask | None,
        bias: Tensor | Bias | None,
        padding: Padding | None,
        turn: Turn,
    ) -> tuple[Tensor, CachedInputs]:
        """Add new tokens, and rotate queries and visible keys by their places in the cache.

        Args:
            query: (B, Hq, L, D), not turned; None if only biases go by places.
            key, value: (B, Hkv, L, D), not turned, and (B, Hkv, L, Dv).
            mask, bias, padding: as in `append`.
            turn: rotary positions, `turn(x (B, H, L, D), offset)`.

        Returns:
            (query, turned; keys, turned, with values, mask and bias).

        Raises:
            ValueError: as in `append`.
        """
        new = self._kept_as(NewTokens(key, value, mask, bias, padding))
        if not self._rounds:
            return self._turned(query, new, turn)

        def read(tensor: Tensor, places: Offset) -> Tensor:
            return turn(Int8Rows(tensor).floats(key.dtype) if tensor.dtype == torch.int8 else tensor, places)

        query, seen = self._turned(query, new, read)
        return query, self._rows_of(seen)

    def _turned(self, query: Tensor | None, new: NewTokens, turn: Turn) -> tuple[Tensor, CachedInputs]:
        key, value, mask, bias, padding = new
        refuse_gradients("StreamingLayer", key, value)
        refuse_placed(mask)
        known = checked_bias(bias)
        if not (known is None or isinstance(known, RelativeScores)):
            what = "a Score" if isinstance(known, Score) else "a tensor"
            raise ValueError(f"bias: {what} depends on absolute positions, which change in a StreamingLayer")
        arriving = self._arriving(new)
        before, (top, _) = self._host, np.broadcast_arrays(self._top, arriving.count)
        after = before + arriving.count
        top = np.maximum(top, after)
        if (after <= self.sinks + self.window).all() and (top <= self.sinks + self.ring).all():
            at = self.offset(arriving.rows, padding)
            seen = self._append_in_order(new, arriving, top)
            assert isinstance(seen.key, Tensor)
            return key if query is None else turn(query, at), seen._replace(key=turn(seen.key, 0))
        whose = "stream", self._own, self.slack, mask, key.shape[0], key.device
        question = (*whose, before.tobytes(), *arriving.summary)
        fit = self._latest.of(question, lambda: self._fitted(mask, arriving, key))
        old, bounds = self._kept(), int(after.max(initial=0))
        keys, values = self._appended(old, key, value) if old.size else (key, value)
        keys, values = fit.chosen(keys), fit.chosen(values)
        scores = bias_at(bias, fit.rows, fit.keys, bounds, key.dtype)
        self._write(key, value, arriving, top)
        query = key if query is None else turn(query, fit.row_offset)
        return query, CachedInputs(turn(keys, fit.key_offset), values, fit.mask, scores)

    def _fitted(self, mask: Mask | None, arriving: NewRows, key: Tensor) -> _KeyPlacement:
        """The keys to read, in order, their positions for these rows, and their mask."""
        before, rows, batch = self._host, arriving.rows, key.shape[0]
        at = (before - arriving.left)[:, None] + np.arange(rows)  # places in the text
        new = np.where(arriving.real(), at, -1)
        old = self._kept()
        held = side_by_side(old, new)
        size = len(held)
        at = np.broadcast_to(at, (size, rows))
        dropped = np.maximum(at - (self.sinks + self.window - 1), 0)  # by each row
        base = np.maximum(before - (self.sinks + self.window - 1), 0)[:, None]  # by the first that is a token
        first = np.arange(self.sinks)
        matches = held[:, None, :] == first[:, None]
        recent = np.flatnonzero((held >= self.sinks).any(0))
        # The sinks of one row behind those of another, then the tokens that are none.
        found = (matches * np.arange(held.shape[1])).sum(2)
        index = np.concatenate((np.tile(found, rows), np.broadcast_to(recent, (size, recent.size))), 1)
        there = np.tile(np.where(matches.any(2), first, -1), rows)
        later = np.where(held[:, recent] >= self.sinks, held[:, recent], -1)
        places = np.concatenate((there, later), 1)
        shifted = (first + (dropped - base)[:, :, None]).reshape(size, -1)
        stand = np.concatenate((shifted, np.maximum(later - base, 0)), 1)
        shown = self._shown(mask, places, before, arriving, batch)
        return _KeyPlacement.of(looked_at(shown, rows, places.shape[1], key), index, at - base, stand, key)

    def _shown(self, mask: Mask | None, places: np.ndarray, before: np.ndarray, arriving: NewRows, batch: int) -> Mask:
        rows, keys = arriving.rows, places.shape[1]
        whole = standing(both(mask, self._own), int((before + arriving.count).max(initial=0)))
        assert whole is not None
        shown = KeysAtPositions(whole, places) & SinksByRow(rows, self.sinks)
        if not arriving.whole:
            shown = shown & Padding([keys] * arriving.count.size, queries=arriving.queries())
        fitted = placed(shown, before - arriving.left, keys - rows)
        assert fitted is not None
        fitted.check(batch, None, rows, keys, None)
        return fitted


class _KeyPlacement(NamedTuple):
    """Slots and positions of the keys of a call; all of shape (1 or B, ...), tensors on the keys' device."""

    mask: Mask | None
    which: Tensor  # (1 or B, N) among the keys kept and the new ones
    rows: Tensor  # (1 or B, L) positions of the rows
    keys: Tensor  # (1 or B, N) positions of the keys
    row_offset: Offset
    key_offset: Offset

    @classmethod
    def of(cls, mask: Mask | None, index: np.ndarray, rows: np.ndarray, keys: np.ndarray, key: Tensor) -> _KeyPlacement:
        tensors = [torch.from_numpy(np.ascontiguousarray(array)).to(key.device) for array in (index, rows, keys)]
        offsets = [_offset(array, key.shape[0], key.device) for array in (rows, keys)]
        return cls(mask, tensors[0], tensors[1], tensors[2], offsets[0], offsets[1])

    def chosen(self, tensor: Tensor) -> Tensor:
        if self.which.shape[0] == 1:
            return tensor.index_select(2, self.which[0])
        return tensor.gather(2, self.which[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3]))


def _offset(places: np.ndarray, batch: int, device: torch.device) -> Offset:
    """An int where all items count on from one place."""
    if places.size and places[0, 0] >= 0 and (places == places[0, 0] + np.arange(places.shape[1])).all():
        return int(places[0, 0])
    return torch.from_numpy(np.broadcast_to(places, (batch, places.shape[1])).copy()).to(device)


class SinksByRow(Mask):
    """Keys `[0, rows S)` are sinks, S for each row, seen by that row only; all others are seen by all rows."""

    rows: int
    sinks: int
    positional = False

    def __init__(self, rows: int, sinks: int):
        self._set(rows=rows, sinks=sinks)

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        return (key >= self.rows * self.sinks) | (key // max(self.sinks, 1) == row)

    def region_kind(self, region: Region) -> Kind:
        (top, bottom), (start, stop) = region.rows, region.keys
        if start >= self.rows * self.sinks or (self.rows == 1 and (top, bottom) == (0, 1)):
            return "full"
        if stop <= self.rows * self.sinks and (stop <= top * self.sinks or start >= bottom * self.sinks):
            return "empty"
        return "partial"

    def _value(self) -> tuple[Hashable, ...]:
        return self.rows, self.sinks

    def __repr__(self) -> str:
        return f"OwnSinks({self.rows}, {self.sinks})"

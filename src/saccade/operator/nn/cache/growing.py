"""A cache that grows with the sequence.

Shape legend: B batch, Hkv key/value heads, L new rows, D key width, Dv value width, T tokens so far.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .fitting import InOrder, bias_in_order
from .layer import CachedInputs, LayerCache, NewTokens, joined, slots

_FEWEST = 16  # slots of a first buffer


class GrowingLayer(LayerCache):
    """All tokens, in as much memory as they need: between T and 2 T slots of `Hkv (D + Dv)` numbers an item.

    Without gradients, tokens are written into a buffer that doubles when it is full, and views of it are returned, so a
    step costs only its own tokens. A view stays as it was unless its tokens are rolled back and others come.
    Where gradients are recorded (`torch.is_grad_enabled()`), each step makes new tensors instead and can be
    differentiated: an earlier step's graph may hold the old ones.

    Example:
        >>> import torch, saccade
        >>> layer = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4))
        >>> cache = saccade.nn.GrowingLayer()
        >>> with torch.no_grad():
        ...     for length in (5, 1, 1):
        ...         out = layer(torch.randn(2, length, 16), saccade.Causal(), cache=cache)
        >>> cache.length
        7
        >>> cache.rollback(2)
        >>> cache.length
        5
    """

    def __init__(self) -> None:
        super().__init__()
        self._owned = False  # whether the tensors are buffers of our own, which nobody's graph holds

    def _append(self, new: NewTokens) -> CachedInputs:
        key, value, mask, _, _ = new
        arriving = self._arriving(new)
        before, batch = self._host, key.shape[0]
        question = ("in order", mask, batch, before.tobytes(), *arriving.summary)
        fit = self._latest.of(question, lambda: InOrder(mask, before, arriving, batch))
        bias = None if new.bias is None else bias_in_order(new.bias, before, arriving, fit.held)
        if torch.is_grad_enabled():
            self._key = joined(self._key, key, before, arriving)
            self._value = joined(self._value, value, before, arriving)
            self._owned = False
        else:
            self._make_room(key, value, fit.used, fit.held)
            assert self._key is not None and self._value is not None
            fit.put(self._key, key)
            fit.put(self._value, value)
        self._host = fit.after
        return CachedInputs(self._key[:, :, : fit.held], self._value[:, :, : fit.held], fit.mask, bias)

    def room(self, needed: int) -> tuple[Tensor, Tensor]:
        """The buffers of keys and values, with room for `needed` tokens.

        A native step writes the next token itself, and `grow` counts it: without gradients, after other tokens.
        """
        assert self._key is not None and self._value is not None
        self._make_room(self._key, self._value, int(self._host.max()), needed)
        return self._key, self._value

    def grow(self) -> None:
        """One more token of each item has been written."""
        self._host = self._host + 1

    def _make_room(self, key: Tensor, value: Tensor, used: int, needed: int) -> None:
        held_key, held_value = self._key, self._value
        if held_key is None or held_value is None:
            room = max(needed, _FEWEST)
            self._key, self._value = slots(key, room), slots(value, room)
        elif not self._owned or needed > held_key.shape[2]:
            room = max(needed, 2 * used, _FEWEST)
            self._key = slots(key, room, held_key[:, :, :used])
            self._value = slots(value, room, held_value[:, :, :used])
        self._owned = True

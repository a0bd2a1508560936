"""A cache that is a state of fixed size, of a mechanism that has one.

Shape legend: B batch, Hq / Hkv query and key-value heads, L new rows, D key width, Dv value width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._masks import Causal, Mask, Padding
from ...variants import Recurrent
from .layer import CachedInputs, LayerCache, NewTokens, checked_items
from .new_rows import NewRows


class RecurrentLayer(LayerCache):
    """The state of a recurrent mechanism: memory that does not grow with the tokens.

    A step costs the same however long the past is. Decoding equals the parallel forward. Prompts of unequal length and
    gradients over all steps work.

    Args:
        mechanism: whose state it is.

    Raises:
        TypeError: a mechanism that is not recurrent.

    Example:
        >>> import torch, saccade
        >>> config = saccade.nn.AttentionConfig(16, heads=4, mechanism=saccade.variants.LinearConfig())
        >>> layer = saccade.nn.MultiHeadAttention(config)
        >>> cache = layer.cache()  # a RecurrentLayer(layer.mechanism)
        >>> with torch.no_grad():
        ...     for length in (5, 1, 1):
        ...         out = layer(torch.randn(1, length, 16), saccade.Causal(), cache=cache)
        >>> type(cache).__name__, cache.length
        ('RecurrentLayer', 7)
    """

    def __init__(self, mechanism: Recurrent):
        super().__init__()
        if not isinstance(mechanism, Recurrent):
            raise TypeError(f"mechanism: expected a recurrent one, got {type(mechanism).__name__}")
        self.mechanism = mechanism
        self._state: Any = None
        self._before: tuple[Any, np.ndarray] | None = None  # state and lengths before the last call

    def advance(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | None,
        padding: Padding | None,
        **options: Any,
    ) -> Tensor:
        """Read new tokens after those so far: (B, Hq, L, D), (B, Hkv, L, D), (B, Hkv, L, Dv) -> (B, heads, L, Dv).

        `options` are the mechanism's own: `tokens` (B, L, E) where it reads them.

        Raises:
            ValueError: a mask other than `Causal()`, tensors that do not fit the state, padding that does not fit.
                Nothing is added then.
        """
        if not isinstance(mask, Causal):
            raise ValueError(f"mask: a state is read causally, expected Causal(), got {mask!r}")
        arriving = NewRows.of(padding, key.shape[2])
        arriving.check_batch(key.shape[0], padding)
        batch = self._batch()
        if batch not in (None, key.shape[0]):
            raise ValueError(
                f"cache: it holds the state of a batch of {batch}, but tokens for {key.shape[0]} came: a cache serves "
                "one batch (reorder changes it)"
            )
        before = self._outside_inference()
        out, state = self.mechanism.step(query, key, value, before, padding, **options)
        self._before = before, self._host
        self._state = state
        self._set_lengths(self._host + arriving.count)
        return out

    def _outside_inference(self) -> Any:
        """The state, copied if it was made in inference mode, since autograd takes no such tensors."""
        state = self._state
        compiling = torch.compiler.is_compiling()
        if state is None or compiling or torch.is_inference_mode_enabled() or not any(p.is_inference() for p in state):
            return state
        return type(state)(*(part.clone() for part in state))

    def _check_dtype(self, dtype: str) -> None:
        """ValueError: a state is a sum, whose rounding errors would add up."""
        raise ValueError(f"dtype: a RecurrentLayer holds a state, which has no 8-bit form, got {dtype!r}")

    def _append(self, new: NewTokens) -> CachedInputs:
        raise TypeError("cache: a RecurrentLayer holds a state, not keys and values, so there is nothing to attend to")

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return 0 if self._state is None else sum(part.nbytes for part in self._state)

    def reorder(self, items: Tensor) -> None:
        """As `LayerCache.reorder`; after it nothing can be taken back."""
        if self._state is None:
            return
        items = checked_items(items, self._state[0].shape[0])
        self._state = type(self._state)(*(part.index_select(0, items.to(part.device)) for part in self._state))
        self._before = None
        self._choose_lengths(items.numpy())

    def rollback(self, count: int | Tensor) -> None:
        """Undo exactly the last call's tokens. ValueError for any other number: older states are not kept."""
        after = self._rolled_back(count)
        if (after == self._host).all():
            return
        assert self._before is not None
        self._state, self._before = self._before[0], None
        self._set_lengths(after)

    def _batch(self) -> int | None:
        return None if self._state is None else int(self._state[0].shape[0])

    def _place(self, padding: Padding | None) -> torch.device:
        return super()._place(padding) if self._state is None else self._state[0].device

    def _rolled_back(self, count: int | Tensor) -> np.ndarray:
        after = super()._rolled_back(count)
        if (after == self._host).all():
            return after
        if self._before is None or (after != self._before[1]).any():
            raise ValueError("rollback: a state can take back the tokens of the last call, all of them or none")
        return after

    def reset(self) -> None:
        """Forget everything; another batch may come."""
        super().reset()
        self._state = self._before = None

"""Caches of models on shards: each layer's `ShardedCache`, in the form that models expect.

Shape legend: B batch, Hkv key-value heads, n rows of this rank, L new tokens, D and Dv widths.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..operator.nn.cache import CachedInputs, LayerCache
from ..operator.nn.cache.fitting import bias_in_order
from ..operator.nn.cache.key_positions import standing
from ..operator.nn.cache.layer import NewTokens
from ..operator.nn.cache.new_rows import NewRows, alike
from ._decoding import ShardedCache
from ._plan import SequencePlan

_FEW = 16  # entries of a tensor that a message shows


class Prompt:
    """The plan and the model's call that the layers of one cache share.

    Attributes:
        plan: of the prompt.
        running: whether a model on shards runs with this cache.
        before: number of tokens in the cache when that call began.
    """

    def __init__(self, plan: SequencePlan) -> None:
        self.plan, self.running, self.before = plan, False, 0
        self._facts: dict[str, Any] = {}
        self._new: tuple[ShardedLayer, Tensor] | None = None

    @property
    def continues(self) -> bool:
        """Whether the call has new tokens behind the prompt, the same on every rank."""
        return self.before > 0

    def begin(self, before: int, given: Mapping[str, Any]) -> None:
        """A call of a model with these arguments begins, with so many tokens in the cache."""
        self.running, self.before, self._new = True, before, None
        integers = {
            name: x
            for name, x in given.items()
            if self.continues and isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex())
        }
        self._facts = {f"argument {name}": _contents(x) for name, x in integers.items()}

    def facts_once(self) -> dict[str, Any]:
        """The arguments that ranks compare, for the first layer; nothing for the others."""
        facts, self._facts = self._facts, {}
        return facts

    def layer_of(self, key: Tensor, where: str) -> ShardedLayer:
        """The layer that has just taken this key."""
        new, self._new = self._new, None
        if new is None or new[1] is not key:
            raise ValueError(f"{where}: expected each call of attention to use the keys just given to the cache")
        return new[0]


class ShardedLayer(LayerCache):
    """A `ShardedCache` in place of a layer's cache in one process. `append` hands new rows through: the call of
    attention that follows keeps them, or decodes.

    Attributes:
        held: None before the prompt.
    """

    def __init__(self, prompt: Prompt) -> None:
        super().__init__()
        self.prompt = prompt
        self.held: ShardedCache | None = None

    def _append(self, new: NewTokens) -> CachedInputs:
        """Keys and values of the new rows, with mask and bias of the whole sequence."""
        if not self.prompt.running:
            where = "call the model in saccade.distributed.context_parallel, with the plan of the prompt"
            if self.held is None:
                raise ValueError(f"cache: it was put on shards and is empty: {where}, or make a new cache")
            raise ValueError(f"cache: its keys are on shards; {where}")
        if new.padding is not None:
            raise ValueError("padding: on shards it belongs into the plan's mask")
        self.prompt._new = self, new.key
        if self.held is not None:
            return CachedInputs(*new[:4])
        length = self.prompt.plan.length
        mask, bias = standing(new.mask, length), new.bias
        if bias is not None:
            bias = bias_in_order(bias, np.zeros(1, np.int64), NewRows.of(None, length), length)
        return CachedInputs(new.key, new.value, mask, bias)

    def keep(self, key: Tensor, value: Tensor) -> None:
        """Take the prompt's rows (B, Hkv, n, D) and (B, Hkv, n, Dv) of this rank."""
        self.held = ShardedCache(key, value, plan=self.prompt.plan)

    def lengths(self) -> np.ndarray:
        return np.full(1, 0 if self.held is None else self.held.length)

    @property
    def nbytes(self) -> int:
        return 0 if self.held is None else self.held.nbytes

    def reorder(self, items: Tensor) -> None:
        if self.held is not None:
            self.held.reorder(items)

    def _rolled_back(self, count: int | Tensor) -> np.ndarray:
        (after,) = alike(super()._rolled_back(count))
        if after.size > 1:
            raise ValueError("rollback: expected one count, since on shards all items have as many tokens")
        return after

    def _set_lengths(self, lengths: np.ndarray) -> None:
        if self.held is not None:
            self.held.rollback(self.held.length - int(lengths[0]))
            self.held = self.held if lengths[0] else None  # what comes next is a prompt

    def _check_dtype(self, dtype: str) -> None:
        raise ValueError(f"dtype: on shards keys and values keep their dtype, got {dtype!r}")


def _contents(x: Tensor) -> Any:
    if x.numel() <= _FEW:
        return x.tolist()
    return tuple(x.shape), hashlib.sha256(x.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]

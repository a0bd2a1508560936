"""Steps of decoder layers ahead of their calls: layers that follow each other are computed in one native call.

Which layers follow each other the step before tells. What was computed ahead is a layer's output only if the layer is
then called with the very input and arguments that it was computed for.

Shape legend: R items, E width.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..operator import _observers
from ..operator._native_step import Place
from ._decoder_caches import Buffer


class LayerStep(NamedTuple):
    """A step of one layer: of the cache its layer, the buffer with the new token, what was read, the output."""

    layer: Any
    buffer: Buffer
    place: Place
    out: Tensor  # (R, 1, E)


class _Computed(NamedTuple):
    step: LayerStep
    x: Tensor  # the input that it was computed for
    copy: Tensor  # which tells of writes that nobody counts
    named: dict[str, Any]


class _Call(NamedTuple):
    place: int
    named: dict[str, Any]
    out: Tensor


class StepsAhead:
    """Shared by the layers of a stack: the last call, and what was computed ahead of calls."""

    def __init__(self) -> None:
        self._computed: dict[int, _Computed] = {}
        self._last: _Call | None = None
        self._follows: dict[int, bool] = {}

    def follows(self, place: int) -> bool:
        """Whether the layer at this place got the output and the arguments of the layer before it, in its last step."""
        return self._follows.get(place, False)

    def begin(self) -> None:
        """Steps are about to be computed: those that nobody has called for were computed in vain."""
        self.stop(list(self._computed))
        self._computed.clear()

    def stop(self, places: Iterable[int]) -> None:
        """The layers at these places follow no layer until they have done so again."""
        self._follows.update(dict.fromkeys(places, False))

    def add(self, place: int, x: Tensor, named: dict[str, Any], step: LayerStep) -> None:
        """Keep a step of the layer at `place` for its call with x."""
        self._computed[place] = _Computed(step, x, x.clone(), named)

    def take(self, place: int, x: Tensor, named: dict[str, Any]) -> LayerStep | None:
        """The step that was computed ahead for this call; None if there is none."""
        computed = self._computed.pop(place, None) if self._computed else None
        if computed is None or computed.x is not x or not _alike(computed.named, named):
            return None
        layer, buffer, _, _ = computed.step
        kept = buffer.keys is layer.keys and buffer.values is layer.values and torch.equal(computed.copy, x)
        return computed.step if kept else None

    def called(self, place: int, last: bool, module: nn.Module, x: Tensor, named: dict[str, Any], out: Tensor) -> None:
        """Note a step of a layer; `last` of its stack."""
        before, bare = self._last, _observers.passive(module._forward_pre_hooks, module._forward_hooks)
        after = before is not None and before.place == place - 1 and before.out is x and _alike(before.named, named)
        self._follows[place] = after and bare
        self._last = _Call(place, named, out) if bare and not last else None  # it holds the cache

    def forget(self) -> None:
        self._computed.clear()
        self._last = None


def _alike(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return len(a) == len(b) and all(map(is_, a.values(), b.values())) and (*a,) == (*b,)

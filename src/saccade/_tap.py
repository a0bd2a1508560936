"""Where attention calls can be seen: observers of this thread are told of each call, with what it was and gave.

The operator tells them of its own calls; `_hooks` tells them of those that others compute. A call made inside of
another one (Saccade's operator below a replaced F.scaled_dot_product_attention, say) is the same call and told once.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D / Dv key and value width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ._biases import Bias
from ._dropout import Dropout
from ._masks import Mask


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call in Saccade's terms, whoever computed it. Nothing in it may be changed."""

    query: Tensor  # (B, Hq, Lq, D)
    key: Tensor  # (B, Hkv, Lk, D)
    value: Tensor  # (B, Hkv, Lk, Dv)
    mask: Mask | Tensor | None
    bias: Tensor | Bias | None
    scale: float | None
    softcap: float | None
    sink: Tensor | None  # (Hq,)
    dropout: float | Dropout
    out: Tensor  # (B, Hq, Lq, Dv), as the model received it
    source: str  # what was called: "saccade.attention", "F.scaled_dot_product_attention", ...
    module: Any = None  # the nn.Module that called, where the source says so


Observer = Callable[[AttentionCall], None]


class PassiveMode:
    """A `TorchFunctionMode` that changes nothing: a call may be answered past it, if the observers are told of it."""


class _Thread(threading.local):
    observers: tuple[Observer, ...] = ()


THREAD = _Thread()


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Tell `observer` of every attention call of this thread meanwhile."""
    before = THREAD.observers
    THREAD.observers = (*before, observer)
    try:
        yield
    finally:
        THREAD.observers = before


@contextmanager
def aside() -> Iterator[tuple[Observer, ...]]:
    """Nobody is told of calls meanwhile: they belong to one that is told as a whole. Gives those to tell then."""
    before = THREAD.observers
    THREAD.observers = ()
    try:
        yield before
    finally:
        THREAD.observers = before

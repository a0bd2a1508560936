"""Counter-based dropout of weights: (seed, b, h, query, key) decides each bit, on any tile and thread."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Dropout:
    """Dropout with a fixed seed: each weight is dropped with probability `p`, the rest scaled by `1 / (1 - p)`.

    A plain float as `dropout=` draws one seed per call from PyTorch's generator instead.

    Args:
        p: probability in [0, 1).
        seed: any integer; its low 64 bits count.

    Raises:
        ValueError: p is outside [0, 1).
        TypeError: p is not a number or seed not an int.

    Example:
        >>> import torch, saccade
        >>> query, key, value = torch.randn(3, 1, 2, 5, 16)
        >>> once, again = (saccade.attention(query, key, value, dropout=saccade.Dropout(0.5, seed=7)) for _ in range(2))
        >>> torch.equal(once, again)
        True
    """

    p: float
    seed: int
    _first_head = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", check_probability(self.p, "Dropout: p"))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"Dropout: seed must be an int, got {type(self.seed).__name__}")

    def factor(self, batch: Tensor, heads: Tensor, rows: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """The factor of each weight, 0 or 1 / (1 - p), shape (B, H, r, c), from 1-D absolute indices."""
        low, high = self.seed & _WORD, (self.seed >> 32) & _WORD
        head = _mix(_mix(batch[:, None] ^ low) + heads[None, :]) ^ high
        row = _mix(_mix(head)[:, :, None] + rows)
        again = _mix(row ^ 0x9E3779B9)
        word = _mix(_mix(keys ^ row[..., None]) + again[..., None])
        kept = word >= math.floor(self.p * 2**32)
        return kept.to(dtype) * (1.0 / (1.0 - self.p))


@dataclass(frozen=True)
class HeadsDropout(Dropout):
    """The dropout of a call with some heads of a larger one, of which its head 0 is `_first_head`."""

    _first_head: int = 0

    def factor(self, batch: Tensor, heads: Tensor, rows: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
        return super().factor(batch, heads + self._first_head, rows, keys, dtype)


class GraphDropout(Dropout):
    """Dropout in a compiled graph: the seed is a tensor (1,), which the graph draws anew on each run."""

    def __init__(self, p: float, seed: Tensor) -> None:
        self.__dict__.update(p=p, seed=seed)


def _mix(word: Tensor) -> Tensor:
    """A bijection of 32-bit words with low bias (Wellons, "lowbias32"); in int64, as torch lacks uint32."""
    word = word & _WORD
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & _WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & _WORD
    return word ^ (word >> 16)


def check_probability(p: object, name: str) -> float:
    if isinstance(p, bool) or not isinstance(p, Real):
        raise TypeError(f"{name} must be a float in [0, 1), got {type(p).__name__}")
    if not 0.0 <= float(p) < 1.0:
        raise ValueError(f"{name} must lie in [0, 1), got {p}")
    return float(p)


def another(dropout: float | Dropout) -> float | Dropout:
    """Dropout with another seed, for a second call that must draw different numbers."""
    return Dropout(dropout.p, dropout.seed ^ 0x5DEECE66D) if isinstance(dropout, Dropout) else dropout


def as_dropout(dropout: float | Dropout) -> Dropout | None:
    """The dropout of a call, or None if nothing is dropped. For a float the seed is drawn here, so `torch.manual_seed`
    and checkpointing work."""
    if isinstance(dropout, Dropout):
        return dropout if dropout.p > 0.0 else None
    p = check_probability(dropout, "dropout")
    if p == 0.0:
        return None
    seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64)
    return GraphDropout(p, seed) if torch.compiler.is_compiling() else Dropout(p, int(seed.item()))

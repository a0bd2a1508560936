"""Masks and biases of a whole sequence, fitted to new rows and to the keys a cache holds.

Shape legend: B batch, Hq query heads, Lq / Lk rows and keys of the call, T tokens of the sequence.
Arrays of one entry speak for all items, those of B entries for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._biases import Bias, RelativeScores, TensorBias, as_bias
from ..._masks import Mask, Padding
from ..._scores._score import Score
from .key_positions import both, standing
from .new_rows import NewRows, alike


class LastAnswers:
    """A cache of the latest results: the layers of a model need the same few values, one after another."""

    _KEPT = 4  # kinds of layers that take turns, and what each asks

    def __init__(self) -> None:
        self._known: list[tuple[tuple[Any, ...], Any]] = []

    def of(self, question: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        for asked, answer in self._known:
            if asked == question:
                return answer
        made = make()
        self._known = [(question, made), *self._known[: self._KEPT - 1]]
        return made


class InOrder:
    """Placement of new rows after the tokens in a buffer that stores each item from slot 0 on: their slots, and the
    mask.

    Args:
        mask: of the whole sequence; None shows everything so far.
        before: how many tokens each item had.
        batch: B.
    """

    def __init__(self, mask: Mask | None, before: np.ndarray, arriving: NewRows, batch: int):
        self._before, self._arriving, self._batch = before, arriving, batch
        after = before + arriving.count
        self.used, self.held = int(before.max(initial=0)), int(after.max(initial=0))
        self.mask = in_order(mask, before, arriving, self.held, batch)
        (self.after,) = alike(after)  # the new lengths
        self._run: tuple[int, int, int] | None = None
        if before.size == 1 and arriving.count.size == 1:
            self._run = int(before[0]), int(arriving.left[0]), int(arriving.count[0])
        self._places: tuple[Tensor, ...] | None = None

    def put(self, buffer: Tensor, new: Tensor) -> None:
        """Write the tokens among the new rows (B, H, L, n) after those that are in the buffer (B, H, S, n)."""
        if self._run is not None:
            slot, left, count = self._run
            buffer.narrow(2, slot, count).copy_(new.narrow(2, left, count))
            return
        if self._places is None or self._places[0].device != buffer.device:
            first = np.broadcast_to(self._before - self._arriving.left, self._batch)
            item, row = np.nonzero(self._arriving.real() & np.ones((self._batch, 1), bool))
            self._places = tuple(torch.from_numpy(n).to(buffer.device) for n in (item, row, first[item] + row))
        items, rows, slots = self._places
        buffer[items, :, slots] = new[items, :, rows]


def in_order(mask: Mask | None, before: np.ndarray, arriving: NewRows, keys: int, batch: int) -> Mask | None:
    """The mask of new rows over `keys` slots that hold each item's tokens in order, from slot 0 on.

    Args:
        before: how many tokens each item had.
    """
    after = before + arriving.count
    mask = standing(mask, int(after.max(initial=0)))
    if not (after.size == 1 and arriving.whole and after[0] == keys):
        mask = both(mask, Padding(after.tolist(), queries=arriving.queries()))
        mask = placed(mask, before - arriving.left, keys - arriving.rows)
    if mask is not None:
        mask.check(batch, None, arriving.rows, keys, None)
    return mask


def placed(mask: Mask | None, start: np.ndarray, usual: int) -> Mask | None:
    """The mask with row 0 of each item at `start`; unchanged if that is `usual`, Lk - Lq."""
    if mask is None or (start == usual).all():
        return mask
    return mask.at(int(start[0]) if start.size == 1 else start.tolist())


def bias_in_order(bias: Tensor | Bias | None, before: np.ndarray, arriving: NewRows, keys: int) -> Tensor | Bias | None:
    """The bias of new rows over keys in order. One that depends on positions follows the mask's placement."""
    known = checked_bias(bias)
    if known is None or isinstance(known, (RelativeScores, Score)):
        return bias
    rows = (before - arriving.left)[:, None] + np.arange(arriving.rows)
    return _picked(known.parameter, rows, keys, int((before + arriving.count).max(initial=0)))


def bias_at(
    bias: Tensor | Bias | None, rows: Tensor, keys: Tensor, reach: int, dtype: torch.dtype
) -> Tensor | Score | None:
    """The bias as a tensor (1 or B, 1 or Hq, Lq, Lk), with row i at position `rows[b, i]` and key j at `keys[b, j]`.

    A `Score` stays a function, of these positions.

    Args:
        rows, keys: int64 (1 or B, Lq) and (1 or B, Lk).
        reach: no token stands there or beyond.
        dtype: of the keys; distances are scored in float32 at least.
    """
    known = checked_bias(bias)
    if known is None:
        return None
    if isinstance(known, TensorBias):
        _check_reach(known.parameter, reach)
        return _gathered(known.parameter, rows, keys)
    if isinstance(known, Score):
        return known._standing(rows, keys)
    assert isinstance(known, RelativeScores)
    parameter = known.parameter
    wide = torch.promote_types(torch.promote_types(parameter.dtype, dtype), torch.float32)
    distance = keys[:, None, :] - rows[:, :, None]
    scores = known._score(parameter.to(wide), distance.flatten())
    return scores.unflatten(1, distance.shape).transpose(0, 1)


def checked_bias(bias: Tensor | Bias | None) -> Bias | None:
    known = as_bias(bias)
    if known is not None and known.offset is not None:
        raise ValueError(f"bias: with a cache it must not be placed by .at, the cache does that: {known!r}")
    if not (known is None or isinstance(known, RelativeScores | TensorBias | Score)):
        raise TypeError(f"bias: a cache takes a tensor, ALiBi, RelativeBias or Score, got {type(known).__name__}")
    return known


def _picked(parameter: Tensor, rows: np.ndarray, keys: int, reach: int) -> Tensor:
    """A dense bias (1 or B, 1 or Hq, T, T) at these positions (1 or B, Lq), for the first `keys` keys."""
    _check_reach(parameter, reach)
    first, size = int(rows[0, 0]) if rows.size else 0, parameter.shape[2]
    if rows.shape[0] == 1 and first >= 0 and (size == 1 or first + rows.shape[1] <= size):  # one run: no copy
        parameter = parameter if size == 1 else parameter.narrow(2, first, rows.shape[1])
        return parameter if parameter.shape[3] == 1 else parameter[..., :keys]
    device = parameter.device
    return _gathered(parameter, torch.from_numpy(rows).to(device), torch.arange(keys, device=device)[None])


def _check_reach(parameter: Tensor, reach: int) -> None:
    for axis, name in ((2, "queries"), (3, "keys")):
        if parameter.shape[axis] != 1 and parameter.shape[axis] < reach:
            raise ValueError(
                f"bias: a tensor for {parameter.shape[axis]} {name}, but with the cache they reach position {reach - 1}"
            )


def _gathered(parameter: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """parameter[b, h, rows[b, i], keys[b, j]]; places outside, which no token has, read the nearest."""
    batch = torch.arange(max(parameter.shape[0], rows.shape[0], keys.shape[0]), device=rows.device)
    item = batch[:, None, None] if parameter.shape[0] > 1 else torch.zeros_like(batch)[:, None, None]
    row, key = (places.clamp(0, size - 1) for places, size in zip((rows, keys), parameter.shape[2:], strict=True))
    return parameter.transpose(0, 1)[:, item, row[:, :, None], key[:, None, :]].transpose(0, 1)

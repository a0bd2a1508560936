"""Pooled attention weights of one head in the compiled kernels.

Shape legend: B batch, Hq query heads, Lq / Lk lengths, n / m bins of rows and keys.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..._call import CheckedCall
from . import _kernels, _run
from ._kernels import KernelSettings, _address, _at, _float, _Scores, _shared, readable

ALIGNED = 16  # keys: a range begins at a multiple, so that it begins with a vector of every instruction set


def refuses(call: CheckedCall, keys: range, bins: tuple[int, int]) -> str | None:
    """Why the kernels cannot do this, or None."""
    if (reason := _run.refuses(call)) is not None:
        return reason
    if _run.watched():
        return "a compiler or a dispatch mode is watching, and cannot see pooling, which is not an operator of PyTorch"
    if keys.start % ALIGNED or (keys.stop % ALIGNED and keys.stop != call.length_k):
        return f"keys {keys.start} to {keys.stop} do not begin and end at multiples of {ALIGNED}"
    if bins[1] & (bins[1] - 1) or keys.start % bins[1]:
        return f"bins of {bins[1]} keys: the kernels take powers of two, and ranges that begin at a multiple"
    return None


def run(
    call: CheckedCall,
    place: tuple[int, int],
    rows: range | Tensor,
    keys: range,
    bins: tuple[int, int],
    lse: Tensor | None,
    *,
    logits: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums, largest and counts (n, m) float32; arguments as in `saccade.operator._pooled.pooled`."""
    shape = 3, -(-len(rows) // bins[0]), -(-len(keys) // bins[1])
    found = torch.empty(shape, dtype=torch.float32, device=call.device)
    lse = None if lse is None else lse.detach().double().contiguous()
    _launch(call, place, rows, keys, bins, logits, (lse, found, None))
    sums, largest, counts = found.unbind(0)
    return sums, largest, counts


def row_lse(call: CheckedCall, place: tuple[int, int], rows: range | Tensor) -> Tensor:
    """(r,) float64; arguments as in `saccade.operator._pooled.row_lse`."""
    found = torch.empty(len(rows), dtype=torch.float64, device=call.device)
    _launch(call, place, rows, range(call.length_k), (1, 1), False, (None, None, found))
    return found


def _launch(
    call: CheckedCall,
    place: tuple[int, int],
    rows: range | Tensor,
    keys: range,
    bins: tuple[int, int],
    logits: bool,
    memory: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """``memory``: the lse that is known, the pools and the lse that are written."""
    query, key = readable(call.query.detach()), readable(call.key.detach())
    settings = KernelSettings.of(replace(call, dropout=None), _run.lowered(call.mask, query, key))
    parameter = None if call.bias is None else call.bias.parameter
    scores, sink = _Scores.of(settings, query, key, parameter), _float(call.sink)
    listed = None if isinstance(rows, range) else rows.to(torch.int64).contiguous()
    count, start = (len(rows), rows.start if isinstance(rows, range) else 0)
    _kernels.module.pooled(
        _shared(settings, query, key, key, scores, sink),
        _at(query),
        _at(key),
        (*place, start, count, keys.start, keys.stop, *bins, int(logits)),
        _address(listed),
        *map(_address, memory),
    )

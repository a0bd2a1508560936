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
    if _run._watched():
        return "a compiler or a dispatch mode is watching, and pooling is no operator that it could see"
    if not hasattr(_kernels.module, "pooled"):
        return "this native build is older than its pooling"
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
    """Sums, largest and counts (n, m) float32; arguments as in `saccade._pooled.pooled`."""
    query, key = readable(call.query.detach()), readable(call.key.detach())
    settings = KernelSettings.of(replace(call, dropout=None), _run.lowered(call.mask, query, key))
    parameter = None if call.bias is None else call.bias.parameter
    scores, sink = _Scores.of(settings, query, key, parameter), _float(call.sink)
    listed = None if isinstance(rows, range) else rows.to(torch.int64).contiguous()
    count, start = (len(rows), rows.start if isinstance(rows, range) else 0)
    lse = None if lse is None else lse.detach().float().contiguous()
    found = query.new_empty((3, -(-count // bins[0]), -(-len(keys) // bins[1])), dtype=torch.float32)
    _kernels.module.pooled(
        _shared(settings, query, key, key, scores, sink),
        _at(query),
        _at(key),
        (*place, start, count, keys.start, keys.stop, *bins, int(logits)),
        _address(listed),
        _address(lse),
        found.data_ptr(),
    )
    sums, largest, counts = found.unbind(0)
    return sums, largest, counts

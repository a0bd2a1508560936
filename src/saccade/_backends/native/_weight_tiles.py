"""Rows of the weights of some heads in the compiled kernels, for functions of them.

Shape legend: B batch, n chosen heads, Hkv key-value heads, Lk keys, r rows of a tile, D / Dv widths.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..._call import CheckedCall
from . import _kernels, _run
from ._kernels import KernelSettings, _address, _at, _float, _Scores, _shared, readable

_GRAIN = 48  # keys are kept in memory of whole blocks of so many (native/pack.h)
_LANES = 16  # the widest vector of the instruction sets


def refuses(call: CheckedCall) -> str | None:
    """Why the kernels cannot do this, or None."""
    if (reason := _run.refuses(call)) is not None:
        return reason
    if _run._watched():
        return "a compiler or a dispatch mode is watching, and a tile of weights is no operator that it could see"
    if not hasattr(_kernels.module, "weight_tile"):
        return "this native build is older than its tiles of weights"
    return None


class NativeTiles:
    """Tiles of weights of one call. A tile lies in the memory of the one before."""

    def __init__(self, call: CheckedCall, heads: list[int], most_rows: int) -> None:
        call = replace(call, dropout=None)
        self._query, self._key = readable(call.query.detach()), readable(call.key.detach())
        settings = KernelSettings.of(call, _run.lowered(call.mask, self._query, self._key))
        parameter = None if call.bias is None else call.bias.parameter
        self._scores, self._sink = _Scores.of(settings, self._query, self._key, parameter), _float(call.sink)
        self._shared = _shared(settings, self._query, self._key, self._key, self._scores, self._sink)
        self._heads = torch.tensor(heads, dtype=torch.int64)
        keys = -(-call.length_k // _GRAIN) * _GRAIN
        self._packed = torch.empty(call.batch, call.kv_heads, keys, self._query.shape[3], dtype=torch.float32)
        self._memory = torch.empty(call.batch * len(heads) * most_rows * call.length_k, dtype=torch.float32)
        self._begun = False
        self._shape: tuple[int, ...] = ()
        self._dirty = 0, call.length_k  # keys at which the memory may hold something

    def rows(self, first: int, last: int) -> Tensor:
        """(B, n, r, Lk) float32 of rows first to last - 1, to be written into."""
        shape = self._query.shape[0], len(self._heads), last - first, self._key.shape[2]
        if shape != self._shape:  # other rows lie elsewhere
            self._shape, self._dirty = shape, (0, shape[3])
        tile = self._memory[: math.prod(shape)].view(shape)
        asked = (len(self._heads), first, last - first, *self._dirty, int(self._begun))
        _kernels.module.weight_tile(
            self._shared,
            _at(self._query),
            _at(self._key),
            _address(self._heads),
            asked,
            _address(self._packed),
            _address(tile),
        )
        self._begun, self._dirty = True, (0, shape[3])
        return tile

    def weighted(self, weights: Tensor, value: Tensor, out: Tensor) -> None:
        """Weights (B, n, r, Lk) times values (B, n, Lk, Dv) into `out` (B, n, r, Dv). All float32; see `padded`."""
        weights = weights.contiguous()
        sizes = (*weights.shape, value.shape[3], torch.get_num_threads())
        used = _kernels.module.weighted_values(sizes, _address(weights), _at(value), _at(out))
        if weights.data_ptr() == self._memory.data_ptr():  # the function wrote into the tile, or left it as it was
            self._dirty = used


def padded(value: Tensor) -> Tensor:
    """(B, n, Lk, Dv) float32 as the kernels take it: Dv a multiple of 16, zeros behind what was there."""
    return readable(torch.nn.functional.pad(value.float(), (0, -value.shape[3] % _LANES)))

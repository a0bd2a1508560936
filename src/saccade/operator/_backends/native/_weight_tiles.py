"""Rows of weights of chosen heads from the compiled kernels, for functions that reduce them.

Shape legend: B batch, n chosen heads, Hkv key-value heads, Lk keys, r rows of a tile, D / Dv widths.
"""

from __future__ import annotations

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
    if _run.watched():
        return "a compiler or a dispatch mode is watching, and cannot see a tile of weights, which is not an operator"
    return None


class NativeTiles:
    """Tiles of weights of one call; keys are packed once."""

    def __init__(self, call: CheckedCall, heads: list[int]) -> None:
        call = replace(call, dropout=None)
        self._query, self._key = readable(call.query.detach()), readable(call.key.detach())
        settings = KernelSettings.of(call, _run.lowered(call.mask, self._query, self._key))
        parameter = None if call.bias is None else call.bias.parameter
        self._scores, self._sink = _Scores.of(settings, self._query, self._key, parameter), _float(call.sink)
        self._shared = _shared(settings, self._query, self._key, self._key, self._scores, self._sink)
        self._heads = torch.tensor(heads, dtype=torch.int64)
        keys = -(-call.length_k // _GRAIN) * _GRAIN
        self._packed = torch.empty(call.batch, call.kv_heads, keys, self._query.shape[3], dtype=torch.float32)
        self._begun = False

    def rows(self, first: int, last: int) -> Tensor:
        """(B, n, r, Lk) float32 of rows first to last - 1."""
        heads = len(self._heads)
        tile = torch.empty(self._query.shape[0], heads, last - first, self._key.shape[2], dtype=torch.float32)
        _kernels.module.weight_tile(
            self._shared,
            _at(self._query),
            _at(self._key),
            _address(self._heads),
            (heads, first, last - first, int(self._begun)),
            _address(self._packed),
            _address(tile),
        )
        self._begun = True
        return tile


def padded(value: Tensor) -> Tensor:
    """(B, n, Lk, Dv) float32 for `times`: Dv is padded with zeros to a multiple of 16."""
    return readable(torch.nn.functional.pad(value.float(), (0, -value.shape[3] % _LANES)))


def times(weights: Tensor, value: Tensor) -> Tensor:
    """(B, n, r, Dv) from float32 weights (B, n, r, Lk) and padded values (B, n, Lk, Dv)."""
    weights = weights.resolve_neg().contiguous()
    out = weights.new_empty(*weights.shape[:3], value.shape[3])
    sizes = (*weights.shape, value.shape[3], torch.get_num_threads())
    _kernels.module.weighted_values(sizes, _address(weights), _at(value), _at(out))
    return out

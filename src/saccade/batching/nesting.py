"""PyTorch's jagged nested tensors as one row, and back.

Shapes: B batch, j the ragged axis, T tokens in all; ... any further axes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._masks._data import describe
from .packing import Packed, check_row, packed_row


def packed_nested(nested: Tensor) -> Packed:
    """A jagged nested tensor (B, j, ...) as a row (1, T, ...); differentiable, and no copy where it has no holes.

    Reads the lengths once, which waits for a device.

    Raises:
        TypeError: not a nested tensor.
        ValueError: the strided layout, or a ragged axis that is not the second.
    """
    _check_nested(nested)
    lengths = _host(nested.offsets().diff() if nested.lengths() is None else nested.lengths())
    values = nested.values()
    if nested.lengths() is not None:
        values = values[_places(nested)]
    return packed_row(values.unsqueeze(0), tuple(lengths.tolist()))


def nested_like(row: Tensor, nested: Tensor) -> Tensor:
    """A row (1, T, ...) as a nested tensor (B, j, ...) with the offsets of `nested`; differentiable.

    It has the ragged size of `nested`, so the two can be added. Further axes may be others.

    Raises:
        TypeError: `row` is not a tensor, `nested` not a nested one.
        ValueError: as in `packed_nested`, or a row of another number of tokens.
    """
    _check_nested(nested)
    places = None if nested.lengths() is None else _places(nested)
    check_row(row, nested.values().shape[0] if places is None else len(places), "the tokens of nested")
    values = row.squeeze(0)
    if places is not None:
        values = values.new_zeros(nested.values().shape[0], *values.shape[1:]).index_copy(0, places, values)
    return torch.nested.nested_tensor_from_jagged(values, nested.offsets(), nested.lengths())


def _check_nested(nested: Any) -> None:
    if not isinstance(nested, Tensor) or not nested.is_nested:
        raise TypeError(f"nested: must be a nested tensor (B, j, ...), got {describe(nested)}")
    if nested.layout != torch.jagged:
        raise ValueError(
            "nested: must have layout=torch.jagged, got torch.strided; convert it with "
            "torch.nested.as_nested_tensor(list(nested.unbind()), layout=torch.jagged)"
        )
    if isinstance(nested.shape[1], int):
        raise ValueError(f"nested: the ragged axis must be the second, (B, j, ...), got shape {tuple(nested.shape)}")


def _places(nested: Tensor) -> Tensor:
    """Indices into `nested.values()` of its tokens, where some of the values belong to none (torch.nested.narrow)."""
    lengths, starts = _host(nested.lengths()), _host(nested.offsets())
    ends = np.cumsum(lengths)
    shifts = np.repeat(starts[: len(lengths)] - (ends - lengths), lengths)
    return torch.from_numpy(np.arange(ends[-1] if len(ends) else 0) + shifts).to(nested.device)


def _host(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()

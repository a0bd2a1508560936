"""PyTorch's jagged nested tensors as one row, and back.

Shape legend: B batch, j the ragged axis, T tokens in all; ... any further axes.
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

    The lengths are read once, which waits for a device.

    Raises:
        TypeError: not a nested tensor.
        ValueError: the strided layout, or a ragged axis that is not the second.

    Example:
        >>> import torch, saccade
        >>> sequences = [torch.ones(2, 4), torch.ones(3, 4)]
        >>> nested = torch.nested.nested_tensor(sequences, layout=torch.jagged)
        >>> packed = saccade.batching.packed_nested(nested)
        >>> packed.row.shape, packed.lengths
        (torch.Size([1, 5, 4]), (2, 3))
    """
    offsets, lengths, values = _parts(nested)
    if lengths is not None:
        values = values[_places(offsets, lengths)]
    sizes = offsets.diff() if lengths is None else lengths
    return packed_row(values.unsqueeze(0), tuple(_host(sizes).tolist()))


def nested_like(row: Tensor, nested: Tensor) -> Tensor:
    """A row (1, T, ...) as a nested tensor (B, j, ...) with the offsets of `nested`; differentiable.

    The result has the ragged size of `nested`, so the two can be added. Further axes may be others.

    Raises:
        TypeError: `row` is not a tensor, or `nested` is not a nested one.
        ValueError: as in `packed_nested`, or a row of another number of tokens.

    Example:
        >>> import torch, saccade
        >>> sequences = [torch.ones(2, 4), torch.ones(3, 4)]
        >>> nested = torch.nested.nested_tensor(sequences, layout=torch.jagged)
        >>> again = saccade.batching.nested_like(saccade.batching.packed_nested(nested).row, nested)
        >>> torch.equal((nested + again).values(), 2 * nested.values())
        True
    """
    offsets, lengths, held = _parts(nested)
    places = None if lengths is None else _places(offsets, lengths)
    check_row(row, len(held) if places is None else len(places), "the tokens of nested")
    values = row.squeeze(0)
    if places is not None:
        values = values.new_zeros(len(held), *values.shape[1:]).index_copy(0, places, values)
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths)


def _parts(nested: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    """Offsets (B + 1,), lengths (B,) if there are holes between sequences, and values."""
    if not isinstance(nested, Tensor) or not nested.is_nested:
        raise TypeError(f"nested: must be a nested tensor (B, j, ...), got {describe(nested)}")
    if nested.layout != torch.jagged:
        raise ValueError(
            "nested: must have layout=torch.jagged, got torch.strided; convert it with "
            "torch.nested.as_nested_tensor(list(nested.unbind()), layout=torch.jagged)"
        )
    if isinstance(nested.shape[1], int):
        raise ValueError(f"nested: the ragged axis must be the second, (B, j, ...), got shape {tuple(nested.shape)}")
    return nested.offsets(), nested.lengths(), nested.values()


def _places(offsets: Tensor, lengths: Tensor) -> Tensor:
    """Indices of the values that belong to a sequence, where some belong to none (`torch.nested.narrow`)."""
    sizes, starts = _host(lengths), _host(offsets)[:-1]
    before = np.cumsum(sizes) - sizes
    return torch.from_numpy(np.arange(sizes.sum()) + np.repeat(starts - before, sizes)).to(offsets.device)


def _host(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()

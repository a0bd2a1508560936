"""The positions of the tokens of a call.

Shape legend: B batch, L length.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._masks._data import describe, whole

Offset = int | Tensor
"""Where tokens stand: an int for a call's first token, (B,) int64 for each item's first, (B, L) int64 for every token.

Example:
    >>> import torch, saccade
    >>> saccade.positions.Sinusoidal(8)(torch.zeros(2, 5, 8), offset=torch.tensor([0, 3])).shape
    torch.Size([2, 5, 8])
"""


def places(offset: Offset, length: int, device: torch.device, batch: int) -> Tensor:
    """Positions of `length` tokens of `batch` items on `device`: int64 (L,) for an int, (B, L) for a tensor.

    `position[b, i] = offset + i`, `offset[b] + i` or `offset[b, i]`. Values inside a tensor are not read, so it needs
    no synchronisation and can be traced. Negative ones are valid there (left-padded rows have them); an int must not be
    negative.

    Raises:
        TypeError: offset is neither an int nor an int64 tensor.
        ValueError: a negative int, or a tensor that is neither (B,) nor (B, L).

    Example:
        >>> import torch, saccade
        >>> saccade.positions.places(torch.tensor([0, 5]), length=3, device="cpu", batch=2)
        tensor([[0, 1, 2],
                [5, 6, 7]])
    """
    offset = checked(offset, length, batch)
    if not isinstance(offset, Tensor):
        return torch.arange(offset, offset + length, device=device)
    offset = offset.to(device)
    return offset if offset.ndim == 2 else offset[:, None] + torch.arange(length, device=device)


def checked(offset: Offset, length: int, batch: int) -> Offset:
    """The offset, an int or a tensor (B,) or (B, L); errors as in `places`."""
    if isinstance(offset, Tensor):
        if offset.dtype != torch.int64:
            raise TypeError(f"offset: a tensor must be int64, got {describe(offset)}")
        if tuple(offset.shape) not in ((batch,), (batch, length)):
            raise ValueError(
                f"offset: expected an int, one for each item (B,) = ({batch},) or one for each token (B, L) = "
                f"({batch}, {length}), got shape {tuple(offset.shape)}"
            )
        return offset
    # Not `whole` for an int: operator.index would make torch.compile compile anew for each of its values.
    number = offset if type(offset) is int else whole(offset, "offset")
    if number < 0:
        raise ValueError(f"offset: positions start at 0, got {number}")
    return number


def eager(tensor: Tensor) -> bool:
    """Whether a call on `tensor` runs now and on plain tensors.

    While tracing, or inside torch.func, what is made from tensors must not be kept for a later call.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return type(tensor) in (Tensor, nn.Parameter)


def extremes(positions: Tensor) -> tuple[int, int] | None:
    """The least and the largest position; None if there is none, or if the values cannot be read without waiting."""
    if positions.device.type != "cpu" or positions.numel() == 0 or not eager(positions):
        return None
    least, largest = torch.aminmax(positions)
    return int(least), int(largest)

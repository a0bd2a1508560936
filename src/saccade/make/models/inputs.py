"""Checks of model inputs: token ids, masks and token types.

Shape legend: B batch, L length.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_ids(name: str, ids: object, vocabulary: int, most: int | None = None) -> tuple[int, int]:
    """Check token ids and return B and L.

    Args:
        vocabulary: ids are 0 ... vocabulary - 1.
        most: maximum number of tokens; None if unlimited.

    Raises:
        TypeError: not a tensor of ints. ValueError: another shape, no item or token, too many tokens, an id out of
        range.
    """
    if not isinstance(ids, Tensor):
        raise TypeError(f"{name}: expected a tensor (batch, length) of token ids, got {type(ids).__name__}")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"{name}: expected token ids, int64 or int32, got {ids.dtype}")
    if ids.ndim != 2:
        raise ValueError(f"{name}: expected shape (batch, length), got {tuple(ids.shape)}")
    if not ids.numel():
        raise ValueError(f"{name}: empty, expected at least one item and one token, got shape {tuple(ids.shape)}")
    if most is not None and ids.shape[1] > most:
        raise ValueError(f"{name}: {ids.shape[1]} tokens are more than the model's maximum of {most}; cut the text")
    if ids.device.type == "cpu" and not torch.compiler.is_compiling():  # avoids synchronising with a GPU
        low, high = (int(end) for end in torch.aminmax(ids))
        if low < 0 or high >= vocabulary:
            raise ValueError(f"{name}: ids must be from 0 to {vocabulary - 1}, got {low if low < 0 else high}")
    return ids.shape[0], ids.shape[1]


def check_like(name: str, given: Tensor, shape: tuple[int, ...], below: int) -> Tensor:
    """`given` expanded to (B, L) after a check: ints from 0 to `below` - 1, with shape (B, L) or (1, L)."""
    if not isinstance(given, Tensor):
        raise TypeError(f"{name}: expected a tensor {shape}, got {type(given).__name__}")
    if given.ndim != 2 or given.shape[1] != shape[1] or given.shape[0] not in (1, shape[0]):
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(given.shape)}")
    check_ids(name, given, below)
    return given.expand(shape)


def check_kinds(name: str, given: object, below: int, count: int | None = None) -> None:
    """TypeError or ValueError unless the argument holds (count,) ints from 0 to `below` - 1."""
    if not isinstance(given, Tensor) or given.is_floating_point() or given.dtype == torch.bool:
        came = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise TypeError(f"{name}: expected a tensor of ints, got {came}")
    if given.ndim != 1 or count not in (None, len(given)):
        raise ValueError(f"{name}: expected shape ({'n' if count is None else count},), got {tuple(given.shape)}")
    if given.numel() and (int(given.min()) < 0 or int(given.max()) >= below):
        wrong = int(given.min()) if int(given.min()) < 0 else int(given.max())
        raise ValueError(f"{name}: kinds must be from 0 to {below - 1}, got {wrong}")

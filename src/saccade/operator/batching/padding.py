"""Sequences of unequal length as one padded tensor, and back.

Shape legend: B batch, L the padded length, L_i length of sequence i; ... any further axes, the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .._masks import Padding
from .._masks._data import Subset, describe, whole

Side = Literal["right", "left"]
SIDES = ("right", "left")


def pad(
    sequences: Sequence[Tensor], *, value: float = 0, side: Side = "right", multiple_of: int = 1
) -> tuple[Tensor, Padding]:
    """Sequences (L_i, ...) as rows of one tensor (B, L, ...), and the mask that says which of its tokens are real.

    `L = max(L_i)`, rounded up to a multiple of `multiple_of` (a compiler then meets fewer shapes). Works for token ids
    (L_i,) and for vectors (L_i, E), is differentiable, and takes empty sequences. The mask has `queries` too, so padded
    rows of attention are empty rows: output 0, no gradient. Its values come from the host: nothing waits for a device.

    Args:
        sequences: at least one; the same dtype, device and further axes.
        value: fills the padding; `F.cross_entropy` ignores -100 in targets.
        side: where the padding stands. "right" gives lengths, "left" booleans (B, L) as mask. Left is for decoding,
            where every row ends with its newest token; absolute positions then come from `positions_of`.
        multiple_of: at least 1.

    Raises:
        TypeError: not a list of tensors, or tensors of different dtypes.
        ValueError: no sequences, other shapes, devices, an unknown side, a value that the dtype cannot hold.

    Example:
        >>> import torch, saccade
        >>> x, padding = saccade.batching.pad([torch.tensor([7]), torch.tensor([8, 9])])
        >>> x
        tensor([[7, 0],
                [8, 9]])
        >>> padding
        Padding([1, 2], queries=[1, 2])
        >>> saccade.batching.pad([torch.tensor([7]), torch.tensor([8, 9])], side="left")[0]
        tensor([[0, 7],
                [8, 9]])
    """
    check_sequences(sequences)
    if side not in SIDES:
        raise ValueError(f"side: must be one of {', '.join(map(repr, SIDES))}, got {side!r}")
    _check_value(value, sequences[0].dtype)
    lengths = [len(sequence) for sequence in sequences]
    length = round_up(max(lengths), whole(multiple_of, "multiple_of", least=1))
    rows = [_filled(sequence, length - len(sequence), value, side) for sequence in sequences]
    if side == "right":
        return torch.stack(rows), Padding(lengths, queries=lengths)
    real = _at_the_end(lengths, length)
    return torch.stack(rows), Padding(real, queries=real)


def unpad(x: Tensor, padding: Padding) -> list[Tensor]:
    """The real tokens of each row: (B, L, ...) to sequences (L_i, ...); differentiable.

    `padding.queries` says which tokens are real, or `padding.keys` where it has no queries. Padding is not read, and
    gets a gradient of 0.

    Raises:
        TypeError: not a tensor, or not a `Padding`.
        ValueError: `padding` is for another number of rows or tokens.

    Example:
        >>> import torch, saccade
        >>> saccade.batching.unpad(torch.tensor([[7, 0], [8, 9]]), saccade.Padding([1, 2]))
        [tensor([7]), tensor([8, 9])]
    """
    subset = _checked(x, padding)
    host = subset.table.host
    # unbind, not indexing: the backward of x[b] would be a whole batch of zeros for every row.
    if subset.by_length:
        return [row[:length] for row, length in zip(x.unbind(), host.tolist(), strict=True)]
    return [row[_places(real, x.device)] for row, real in zip(x.unbind(), host, strict=True)]


def positions_of(padding: Padding, length: int) -> Tensor:
    """Position of each token of a padded batch in its own sequence: int64 (B, L), 0 in the padding before it.

    This is the number of real tokens before it: the `offset` that modules with absolute positions take for a batch
    padded on the left. The result is on the CPU, unless `padding` was made from tensors of another device.

    Args:
        padding: of queries, or of keys where it has no queries.
        length: L.

    Example:
        >>> import torch, saccade
        >>> _, padding = saccade.batching.pad([torch.tensor([7]), torch.tensor([8, 9])], side="left")
        >>> saccade.batching.positions_of(padding, length=2)
        tensor([[0, 0],
                [0, 1]])
    """
    subset = _subset(padding)
    _check_length(subset, whole(length, "length", least=0), "length")
    if subset.by_length:
        positions = np.broadcast_to(np.arange(length), (subset.batch, length)).copy()
    else:
        positions = np.maximum(np.cumsum(subset.table.host, axis=1) - 1, 0)
    return torch.from_numpy(positions.astype(np.int64)).to(subset.table.values.device)


def fill_padding(x: Tensor, padding: Padding, value: float = 0) -> Tensor:
    """`x (B, L, ...)` with `value` wherever `padding` marks no real token; differentiable.

    The old content of the padding is not read, and gets a gradient of 0. Attention never reads padding, but a linear
    layer multiplies it by gradients of 0, and 0 * NaN is NaN. So fill padding that may hold anything before it enters a
    layer.

    Args:
        padding: of queries, or of keys where it has no queries.

    Raises:
        TypeError: as in `unpad`.
        ValueError: as in `unpad`.

    Example:
        >>> import torch, saccade
        >>> x = torch.tensor([[7.0, float("nan")], [8.0, 9.0]])
        >>> saccade.batching.fill_padding(x, saccade.Padding([1, 2]))
        tensor([[7., 0.],
                [8., 9.]])
    """
    subset = _checked(x, padding)
    b = torch.arange(subset.batch, device=x.device)[:, None]
    real = subset.contains(b, torch.arange(x.shape[1], device=x.device))
    return torch.where(real.view(*real.shape, *(1,) * (x.ndim - 2)), x, value)


def round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _filled(sequence: Tensor, missing: int, value: float, side: Side) -> Tensor:
    if not missing:
        return sequence
    ends = (0, missing) if side == "right" else (missing, 0)
    return F.pad(sequence, (*(0, 0) * (sequence.ndim - 1), *ends), value=value)


def _at_the_end(lengths: list[int], length: int) -> Any:
    """Booleans (B, L) as an array, which a mask takes like a list: bound to no device."""
    return np.arange(length) >= length - np.array(lengths)[:, None]


def _subset(padding: Any) -> Subset:
    if not isinstance(padding, Padding):
        raise TypeError(f"padding: must be a saccade.Padding, got {describe(padding)}")
    return padding.keys if padding.queries is None else padding.queries


def _checked(x: Any, padding: Any) -> Subset:
    """The real tokens of `x` by `padding`, which must have as many rows and tokens."""
    subset = _subset(padding)
    if not isinstance(x, Tensor) or x.is_nested or x.ndim < 2:
        raise TypeError(f"x: must be a padded tensor (B, L, ...), got {describe(x)}")
    if x.shape[0] != subset.batch:
        raise ValueError(f"x: has {x.shape[0]} rows, but padding is of {subset.batch}; got shape {tuple(x.shape)}")
    _check_length(subset, x.shape[1], "x")
    return subset


def _check_length(subset: Subset, length: int, name: str) -> None:
    if subset.by_length:
        if torch.compiler.is_compiling():  # no graph may depend on values
            return
        longest = int(subset.table.host.max(initial=0))
        if longest > length:
            raise ValueError(f"{name}: rows have {length} tokens, but padding has a length of {longest}")
    elif subset.size != length:
        raise ValueError(f"{name}: rows have {length} tokens, but padding has booleans for {subset.size}")


def _places(real: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.flatnonzero(real)).to(device)


def _check_value(value: Any, dtype: torch.dtype) -> None:
    """PyTorch would cut 0.5 to 0 and wrap numbers that are too large without a word."""
    if isinstance(value, (bool, int, float)) and (dtype.is_floating_point or dtype.is_complex):
        return
    try:
        fits = torch.tensor(value, dtype=dtype).item() == value
    except (TypeError, ValueError, RuntimeError, OverflowError):
        fits = False
    if not fits:
        raise ValueError(f"value: {describe(value)} is not a value of {dtype}, the dtype of the sequences")


def check_sequences(sequences: Any) -> None:
    """TypeError or ValueError unless these are one or more tensors (L_i, ...) that differ only in L_i."""
    if isinstance(sequences, Tensor) or not isinstance(sequences, Sequence):
        raise TypeError(f"sequences: must be a list of tensors (L_i, ...), got {describe(sequences)}")
    if not sequences:
        raise ValueError("sequences: got none, so neither width nor dtype is known; at least one is needed")
    for at, sequence in enumerate(sequences):
        if not isinstance(sequence, Tensor):
            raise TypeError(f"sequences[{at}]: must be a tensor (L_i, ...), got {describe(sequence)}")
        _check_like(sequence, sequences[0], at)


def _check_like(sequence: Tensor, first: Tensor, at: int) -> None:
    if sequence.is_nested or sequence.ndim == 0:
        came = "a nested one" if sequence.is_nested else "a single number"
        raise ValueError(f"sequences[{at}]: must be a tensor (L_i, ...), got {came}")
    if sequence.shape[1:] != first.shape[1:]:
        wanted = ", ".join(map(str, ("length", *first.shape[1:])))
        raise ValueError(
            f"sequences[{at}]: expected shape ({wanted}) as in sequences[0], got shape {tuple(sequence.shape)}"
        )
    if sequence.dtype != first.dtype:
        raise TypeError(f"sequences[{at}]: expected {first.dtype} as in sequences[0], got {sequence.dtype}")
    if sequence.device != first.device:
        raise ValueError(f"sequences[{at}]: expected to be on {first.device} as sequences[0], got {sequence.device}")

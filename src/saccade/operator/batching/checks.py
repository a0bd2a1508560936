"""Checks for sequences that are batched together.

Shape legend: L_i length of sequence i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._masks._data import describe


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

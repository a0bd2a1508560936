"""Packs sequences of unequal length one after another into one row, and unpacks them.

Shape legend: T tokens in all, L_i length of sequence i; ... any further axes, the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._masks import Documents, Mask, Padding, PerHead, mask_classes
from .._masks._data import describe, numbers
from .padding import check_sequences, unpad

# Masks that ask for the distance of query and key only: in a packed row they mean what they mean in each sequence.


@dataclass(frozen=True, eq=False)
class Packed:
    """Sequences in one row. Attention with `mask(...)` and with `positions` treats each as if it were alone.

    Attributes:
        row: (1, T, ...), the sequences one behind the other.
        documents: the mask that keeps each token within its own sequence.
        positions: int64 (1, T), counted from 0 in each sequence: the `offset` of modules with absolute positions.
        lengths: L_i; their sum is T.

    Example:
        >>> import torch, saccade
        >>> packed = saccade.batching.pack([torch.randn(2, 8), torch.randn(3, 8)])
        >>> packed.positions
        tensor([[0, 1, 0, 1, 2]])
        >>> packed.mask(saccade.Causal()).picture(5, 5)
        Causal() & Documents([0, 0, 1, 1, 1])
          0        4
        0 ██········
        1 ████······
        2 ····██····
        3 ····████··
        4 ····██████
        5 queries down, 5 keys across; █ attends, · masked
    """

    row: Tensor
    documents: Documents
    positions: Tensor
    lengths: tuple[int, ...]

    def mask(self, mask: Mask | None = None, *, keys: Packed | None = None) -> Mask:
        """The mask for attention over the row: each sequence is attended with `mask`, and only within itself.

        In a row only distances are unchanged, so `mask` may be made of Causal, Window, Strided, Dilated and PerHead
        with & | ~. Masks that name positions (Prefix, Global, ...) or items would mean other tokens and raise an error.

        Args:
            mask: for one sequence; None lets every token attend to its whole sequence.
            keys: another row with as many sequences, for cross-attention; sequence i attends to sequence i. Then
                `mask` must be None: lengths differ, and with them the meaning of a distance.

        Raises:
            TypeError: `mask` is not a `Mask`, or `keys` is not a `Packed`.
            ValueError: a mask that does not depend on distances only, or another number of sequences.
        """
        if keys is not None:
            return self._across(mask, keys)
        if mask is None:
            return self.documents
        if not isinstance(mask, Mask):
            raise TypeError(f"mask: packed sequences take a Mask or None, got {describe(mask)}")
        if not mask._throughout("by_distance"):
            allowed = ", ".join(
                [*(name for name, kind in mask_classes().items() if kind.by_distance), PerHead.__name__]
            )
            raise ValueError(
                f"mask: {mask!r} depends on more than distances, and packing changes the positions of tokens; use "
                f"{allowed} and their combinations, or pad"
            )
        return mask & self.documents

    def _across(self, mask: Any, keys: Any) -> Documents:
        if not isinstance(keys, Packed):
            raise TypeError(f"keys: must be Packed, got {describe(keys)}")
        if mask is not None:
            raise ValueError(f"mask: must be None with keys=, where each sequence has another length, got {mask!r}")
        if len(keys.lengths) != len(self.lengths):
            raise ValueError(f"keys: holds {len(keys.lengths)} sequences, but the queries' row {len(self.lengths)}")
        return Documents.from_cu_seqlens(_ends(self.lengths), _ends(keys.lengths))


def pack(sequences: Sequence[Tensor]) -> Packed:
    """Sequences (L_i, ...) one after another in one row (1, T, ...), without padding. Differentiable.

    Everything but attention works on T tokens. Attention skips tiles that lie between two sequences; where sequences
    are shorter than a backend's tiles, pairs of two sequences are still computed, and masked. Empty sequences stay in
    `lengths`. Krell et al., "Efficient Sequence Packing without Cross-contamination" (2021).

    Raises:
        TypeError: not a list of tensors, or tensors of different dtypes.
        ValueError: no sequences, or other shapes or devices.

    Example:
        >>> import torch, saccade
        >>> packed = saccade.batching.pack([torch.randn(2, 8), torch.randn(3, 8)])
        >>> layer = saccade.nn.SelfAttention(8)
        >>> layer(packed.row, packed.mask(saccade.Causal())).shape
        torch.Size([1, 5, 8])
    """
    check_sequences(sequences)
    return packed_row(torch.cat(list(sequences)).unsqueeze(0), tuple(len(sequence) for sequence in sequences))


def unpack(row: Tensor, packed: Packed | Sequence[int] | Tensor) -> list[Tensor]:
    """The sequences of a row: (1, T, ...) to tensors (L_i, ...), views of the row; differentiable.

    Args:
        row: what was made of `packed.row`; further axes may be others.
        packed: from `pack`, or the lengths.

    Raises:
        TypeError: not a tensor, or lengths that are not integers.
        ValueError: a row of another shape than (1, T, ...), or lengths whose sum is not T.

    Example:
        >>> import torch, saccade
        >>> packed = saccade.batching.pack([torch.tensor([1, 2]), torch.tensor([3, 4, 5])])
        >>> saccade.batching.unpack(packed.row * 10, packed)
        [tensor([10, 20]), tensor([30, 40, 50])]
    """
    lengths = packed.lengths if isinstance(packed, Packed) else _lengths(packed)
    check_row(row, sum(lengths), "the lengths' sum")
    return list(row.squeeze(0).split(lengths)) if lengths else []


def pack_padded(x: Tensor, padding: Padding) -> Packed:
    """A padded batch (B, L, ...) as a row without padding; differentiable. Errors are those of `unpad`.

    Padding is not read. `pad(unpack(row, packed))` goes back.

    Example:
        >>> import torch, saccade
        >>> x, padding = torch.tensor([[1, 2, 0], [3, 4, 5]]), saccade.Padding([2, 3])
        >>> saccade.batching.pack_padded(x, padding).row
        tensor([[1, 2, 3, 4, 5]])
    """
    return pack(unpad(x, padding))


def packed_row(row: Tensor, lengths: tuple[int, ...]) -> Packed:
    """The description of a row (1, T, ...) of sequences of these lengths."""
    starts = np.cumsum(lengths) - lengths
    positions = torch.from_numpy(np.arange(sum(lengths)) - np.repeat(starts, lengths)).unsqueeze(0).to(row.device)
    documents = Documents.from_cu_seqlens(_ends(lengths)) if lengths else Documents([])
    return Packed(row, documents, positions, lengths)


def real_row(real: Tensor) -> tuple[Tensor, Documents]:
    """The real tokens of a padded batch, true in `real` (B, L), as a row: int64 (T,), b L + l of each, and the mask
    that keeps each within its own item."""
    return real.flatten().nonzero()[:, 0], Documents.from_cu_seqlens(_ends(real.sum(1).tolist()))


def has_holes(real: Tensor) -> bool:
    """Whether an item has padding between real tokens, so that they are in more than one run."""
    starts = real[:, 0] + (real[:, 1:] > real[:, :-1]).sum(1)
    return bool((starts > 1).any())


def check_row(row: Any, tokens: int, of: str) -> None:
    if not isinstance(row, Tensor) or row.is_nested:
        raise TypeError(f"row: must be a tensor (1, T, ...), got {describe(row)}")
    if row.ndim < 2 or row.shape[0] != 1 or row.shape[1] != tokens:
        raise ValueError(f"row: expected shape (1, {tokens}, ...), {tokens} being {of}, got {tuple(row.shape)}")


def _lengths(source: Any) -> tuple[int, ...]:
    table = numbers(source, "lengths", least=0)
    if isinstance(table, int):
        raise TypeError(f"packed: must be Packed, or one length for each sequence, got {describe(source)}")
    return tuple(table.host.tolist())


def _ends(lengths: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(lengths).tolist()]

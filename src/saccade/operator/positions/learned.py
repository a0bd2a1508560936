"""Learned positions, added to embeddings.

Shape legend: B batch, L length, E model width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._masks._data import whole
from .offsets import Offset, checked, extremes, places
from .sinusoidal import check_embedded


class Learned(nn.Module):
    """Adds one learned vector for each position: `x + weight[position]`, (B, L, E) -> (B, L, E).

    Gehring et al., "Convolutional Sequence to Sequence Learning" (2017), section 3.1; BERT and GPT-2. There are exactly
    `length` positions; one beyond them was never learned and raises an error.

    Values in a tensor of offsets are checked only on a CPU. On other devices the check would make every call wait for
    the device, and under torch.compile and torch.func it is impossible. There, a token beyond or before the table gets
    a row of NaN, which the loss shows; an unchecked index would end the process or read another row.

    Initialisation: normal with variance 1/2, the mean square of `Sinusoidal`'s entries, for embeddings that enter with
    variance 1. Where they enter with a smaller one (GPT-2's .02), draw the weight to match.

    Args:
        length: positions 0 ... length - 1.
        width: E.

    Raises:
        TypeError: a length or width that is not an int.
        ValueError: a length or width below 1.

    Example:
        >>> import torch, saccade
        >>> positions = saccade.positions.Learned(length=16, width=8)
        >>> x = torch.zeros(2, 5, 8)
        >>> torch.equal(positions(x, offset=3)[0], positions.weight[3:8])
        True
    """

    def __init__(self, length: int, width: int):
        super().__init__()
        self.length, self.width = whole(length, "length", least=1), whole(width, "width", least=1)
        self.weight = nn.Parameter(torch.empty(self.length, self.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table anew."""
        nn.init.normal_(self.weight, std=math.sqrt(0.5))

    def forward(self, x: Tensor, offset: Offset = 0) -> Tensor:
        """`x (B, L, E)` plus its positions' rows, in x's dtype.

        `offset` says where the tokens stand: an int for the first token, (B,) int64 for each item's first token, (B, L)
        int64 for every token (with left padding, clamp it at 0).

        Raises:
            ValueError: a position beyond the table, or a negative one.
        """
        check_embedded(x, self.width)
        offset = checked(offset, x.shape[1], x.shape[0])
        rows = self._rows_at(offset, x) if isinstance(offset, Tensor) else self._neighbour_rows(offset, x.shape[1])
        return (x + rows).to(x.dtype)

    def _neighbour_rows(self, start: int, length: int) -> Tensor:
        """Rows of neighbours, (L, E)."""
        if start + length > self.length:
            raise self._beyond(start, start + length - 1)
        return self.weight[start : start + length]

    def _rows_at(self, offset: Tensor, x: Tensor) -> Tensor:
        """Rows of any positions, (B, L, E)."""
        positions = places(offset, x.shape[1], x.device, x.shape[0])
        seen = extremes(positions)
        if seen is not None:
            if seen[0] < 0 or seen[1] >= self.length:
                raise self._beyond(*seen)
            return F.embedding(positions, self.weight)
        rows = F.embedding(positions.clamp(0, self.length - 1), self.weight)
        inside = (positions >= 0) & (positions < self.length)
        return rows.where(inside[..., None], math.nan)

    def _beyond(self, first: int, last: int) -> ValueError:
        return ValueError(
            f"offset: the table has {self.length} learned positions, 0 to {self.length - 1}, but tokens stand at "
            f"{first} to {last}"
        )

    def extra_repr(self) -> str:
        return f"{self.length}, {self.width}"

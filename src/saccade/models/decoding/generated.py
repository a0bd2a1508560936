"""What generating text gives.

Shape legend: B items, n texts of each, L length.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Generated:
    """Texts of a batch, the best of each item first.

    Attributes:
        ids: (B, n, L), new tokens alone, the end token included; the padding token behind them.
        lengths: (B, n), how many they are; 0 where an item has fewer texts than were asked for.
        scores: (B, n), of a search as `BeamSearch` says, of drawn texts the mean log-probability of their tokens;
            -inf where there is no text.
    """

    ids: Tensor
    lengths: Tensor
    scores: Tensor

    def texts(self) -> list[list[list[int]]]:
        """The tokens of each text of each item, without padding."""
        ids, lengths = self.ids.tolist(), self.lengths.tolist()
        return [[row[:n] for row, n in zip(*item, strict=True)] for item in zip(ids, lengths, strict=True)]

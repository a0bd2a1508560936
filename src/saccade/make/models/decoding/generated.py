"""What generating text gives.

Shape legend: B items, n texts of each, L length.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Generated:
    """Generated texts of a batch, the best of each item first.

    Attributes:
        ids: (B, n, L), only the new tokens, the end token included; after them the padding token.
        lengths: (B, n), the number of new tokens; 0 where an item has fewer than n texts.
        scores: (B, n): of a search as in `BeamSearch`, of drawn texts the mean log-probability of their tokens;
            -inf where there is no text.

    Example:
        >>> import torch, saccade
        >>> texts = saccade.models.Generated(
        ...     torch.tensor([[[5, 7, 1], [6, 1, 0]]]), torch.tensor([[3, 2]]), torch.tensor([[-0.1, -0.9]])
        ... )  # what `generate` of an encoder-decoder returns
        >>> texts.texts()
        [[[5, 7, 1], [6, 1]]]
    """

    ids: Tensor
    lengths: Tensor
    scores: Tensor

    def texts(self) -> list[list[list[int]]]:
        """The tokens of each text of each item, without padding."""
        ids, lengths = self.ids.tolist(), self.lengths.tolist()
        return [[row[:n] for row, n in zip(*item, strict=True)] for item in zip(ids, lengths, strict=True)]

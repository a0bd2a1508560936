"""A dense causal model of one layer with mask, positions and cache given by hand: faults are known by construction.

Shape legend: R rows, L length, H heads, E width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS = 47, 24, 3


class Dense(nn.Module):
    """Logits (R, L, VOCABULARY); `attention_mask` (R, L) marks real tokens, or (R, 1, L, L) gives all pairs."""

    def __init__(self, window: int = 10**6, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.window = window
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(211, WIDTH)
        self.qkv, self.out, self.head = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, VOCABULARY),
        )

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        rows, length = input_ids.shape
        if position_ids is None:
            position_ids = torch.arange(length).expand(rows, length)
        x = self.embed(input_ids) + self.places(position_ids)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / (WIDTH // HEADS) ** 0.5
        weights = scores.masked_fill(~self.pairs(length, attention_mask), torch.finfo(scores.dtype).min).softmax(-1)
        return self.head(x + self.out((weights @ v).transpose(1, 2).flatten(2)))

    def pairs(self, length: int, attention_mask: Tensor | None) -> Tensor:
        """(R or 1, 1, L, L), True = attend."""
        behind = torch.arange(length)[:, None] - torch.arange(length)
        allowed = (behind >= 0) & (behind < self.window)
        if attention_mask is None:
            return allowed
        return allowed & (attention_mask if attention_mask.dim() == 4 else attention_mask[:, None, None].bool())


def packed(documents: list[list[int]]) -> dict[str, Tensor]:
    """All documents in one row, right: blocks in the mask, positions that restart, labels that end at the seams."""
    lengths = torch.tensor([len(document) for document in documents])
    owner = torch.repeat_interleave(torch.arange(len(documents)), lengths)
    ids = torch.tensor([[token for document in documents for token in document]])
    positions = torch.cat([torch.arange(int(length)) for length in lengths])[None]
    labels = ids.clone()
    labels[positions == 0] = -100
    blocks = (owner[:, None] == owner)[None, None]
    return {"input_ids": ids, "attention_mask": blocks, "position_ids": positions, "labels": labels}

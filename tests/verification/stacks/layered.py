"""A decoder of several layers whose masks, kernel and positions are given by hand: faults are known by construction.

Shape legend: R rows, L length, H heads, D head width.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.verification._verify_stack import PROBES, Given, messages, stack_report

VOCABULARY, HEADS, HEAD_WIDTH = 47, 3, 8
WIDTH = HEADS * HEAD_WIDTH

Pairs = Callable[[int], Tensor]  # (L, L) or (H, L, L) bool of a length


def window(width: int) -> Pairs:
    def pairs(length: int) -> Tensor:
        behind = torch.arange(length)[:, None] - torch.arange(length)
        return (behind >= 0) & (behind < width)

    return pairs


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


class Attention(nn.Module):
    """`fast`: the pairs where no attention_mask is given, else `pairs`."""

    def __init__(self, pairs: Pairs, fast: Pairs | None = None, kernel: str = "sdpa"):
        super().__init__()
        self.pairs, self.fast, self.kernel = pairs, fast or pairs, kernel
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def rotated(self, x: Tensor, position_ids: Tensor, what: str) -> Tensor:
        """Rotary positions of queries and keys."""
        angles = position_ids[:, None, :, None] * 100.0 ** -(torch.arange(HEAD_WIDTH // 2) / 4)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def split(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]

    def forward(self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor) -> Tensor:
        query, key, value = self.split(x)
        query, key = self.rotated(query, position_ids, "query"), self.rotated(key, position_ids, "key")
        pairs = (self.fast if attention_mask is None else self.pairs)(x.shape[1])
        if attention_mask is not None:  # a query of padding sees itself
            own = torch.eye(x.shape[1], dtype=torch.bool)
            pairs = pairs & (attention_mask[:, None, None].bool() | own)
        if self.kernel == "sdpa":
            heads = F.scaled_dot_product_attention(query, key, value, attn_mask=pairs)
        else:
            scores = query @ key.mT / HEAD_WIDTH**0.5
            hidden = float("-inf") if self.kernel == "infinite" else torch.finfo(scores.dtype).min
            heads = scores.masked_fill(~pairs, hidden).softmax(-1) @ value
        return self.out(heads.transpose(1, 2).flatten(2))


class Layered(nn.Module):
    """Logits (R, L, VOCABULARY)."""

    def __init__(self, *layers: Attention, seed: int = 0):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(layers)
        torch.manual_seed(seed)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x, attention_mask, position_ids)
        return self.head(x)


def found(report, probe: str):
    """The findings of one probe, which ran."""
    status = {outcome.name: outcome.status for outcome in report.outcomes}[probe]
    assert status != "n/a", report
    return [finding for finding in report.findings if finding.probe == probe]


def probed(probe: str, model, **given):
    """The findings of one probe, which runs alone: all together call a model a hundred times."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = messages(Given(**{"model": model, **given}), [one for one in PROBES if one.name == probe])
        return found(stack_report(alone), probe)

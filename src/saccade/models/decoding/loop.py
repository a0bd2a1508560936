"""Token after token, for a batch of prompts side by side.

Shape legend: N items, L length of the prompts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from .sampling import Repeated, Sampling
from .step import Step


@torch.no_grad()
def tokens_after(
    step: Step,
    ids: Tensor,
    count: int,
    sampling: Sampling,
    *,
    attention_mask: Tensor | None = None,
    ends: Collection[int] = (),
    pad: int = 0,
) -> Iterator[Tensor]:
    """The next tokens of all items, int64 (N,) at a time: up to `count`, or until every item has ended.

    Items that have ended get `pad` from then on. Once they are half of those that are computed, the rest goes on
    without them.

    Args:
        step: what reads tokens; the prompts first.
        ids: (N, L), the prompts.
        attention_mask: (N, L) of the prompts, as `step` has it; what it hides counts for no repetition.
        ends: tokens that end an item; they are given, and nothing after.
    """
    generator = sampling.generator()
    last = torch.tensor(sorted(ends), dtype=torch.int64, device=ids.device)
    items = torch.arange(ids.shape[0], device=ids.device)  # those that are computed
    going = torch.ones(ids.shape[0], dtype=torch.bool, device=ids.device)
    repeated: Repeated | None = None
    new = ids
    for _ in range(count):
        logits = step.step(new)
        if new is ids:
            repeated = Repeated.of(sampling, ids, logits, attention_mask)
        if repeated is not None:
            logits = repeated.penalised(logits)
        drawn = sampling.draw(logits, generator)
        if not last.numel():
            yield drawn
        else:
            drawn = torch.where(going, drawn, pad)
            yield torch.full_like(ids[:, 0], pad, dtype=torch.int64).index_copy_(0, items, drawn)
            going = going & ~torch.isin(drawn, last)
            left = int(going.sum())
            if not left:
                return
        kept = None
        if last.numel() and 2 * left <= going.numel():
            kept = going.nonzero()[:, 0]
            step.reorder(kept)
        if repeated is not None:
            repeated.add(drawn, kept)
        if kept is not None:
            items, going, drawn = items[kept], going[kept], drawn[kept]
        new = drawn[:, None]

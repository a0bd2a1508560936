"""Token after token for items side by side: drawn, or always the most probable, with or without constraints.

Shape legend: N items, L length of what they begin with, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ....support._shared_cores import shared_cores
from .constraints import Constraints, told_by
from .sampling import Draws, Sampling
from .step import DecodingStep, Generated


@torch.no_grad()
def tokens_after(
    step: DecodingStep,
    ids: Tensor,
    sampling: Sampling,
    constraints: Constraints,
    *,
    attention_mask: Tensor | None = None,
    pad: int = 0,
) -> Iterator[Tensor]:
    """The next tokens of all items, int64 (N,) at a time: as many as the constraints allow, or until every item
    has ended.

    Items that have ended get `pad` from then on. Once they are half of those that are computed, the rest goes on
    without them.

    Args:
        step: what reads tokens; the prompts first.
        ids: (N, L), the prompts.
        sampling: how the next token is chosen, once the constraints have left out what may not come.
        attention_mask: (N, L) of the prompts, as `step` has it; what it hides counts for no repetition.

    Raises:
        ValueError: constraints that name tokens that there are not.
    """
    draws, new = Draws(sampling, ids, attention_mask), ids
    told = ids
    items = torch.arange(ids.shape[0], device=ids.device)  # those that are computed
    going = torch.ones_like(items, dtype=torch.bool)
    with shared_cores():
        for count in range(constraints.max_new_tokens):
            logits = step.step(new)
            if count == 0:
                constraints.check(logits.shape[-1])
                told = told_by(ids, attention_mask) if constraints.reads_text else ids
            drawn = draws.draw(constraints.apply(draws.penalised(logits), told, count))
            if not constraints.ends:
                yield drawn
            else:
                drawn = torch.where(going, drawn, pad)
                yield torch.full_like(ids[:, 0], pad, dtype=torch.int64).index_copy_(0, items, drawn)
                going = going & ~constraints.finished(drawn, count + 1)
                left = int(going.sum())
                if not left:
                    return
                if 2 * left <= going.numel():
                    kept = going.nonzero()[:, 0]
                    step.reorder(kept)
                    draws.keep(kept)
                    items, going, drawn, told = items[kept], going[kept], drawn[kept], told[kept]
            new = drawn[:, None]
            if constraints.reads_text:
                told = torch.cat((told, new), 1)


@torch.no_grad()
def draw(step: DecodingStep, start: Tensor, sampling: Sampling, constraints: Constraints, pad: int = 0) -> Generated:
    """One text for each item, and its score. Items that have ended leave the batch.

    Args:
        step: what reads tokens; `start` first.
        start: (N, L), what the texts begin with.
        sampling: how the next token is chosen, once the constraints have left out what may not come.
        pad: stands behind the end of a text.

    Raises:
        ValueError: constraints that name tokens that there are not.
    """
    draws, new, told = Draws(sampling, start), start, start
    items = torch.arange(start.shape[0], device=start.device)
    ids = torch.full((len(items), constraints.max_new_tokens), pad, device=start.device)
    lengths, sums = torch.zeros_like(items), torch.zeros(len(items), device=start.device)
    for count in range(constraints.max_new_tokens):
        logits = step.step(new).float()
        if count == 0:
            constraints.check(logits.shape[-1])
        scores = constraints.apply(F.log_softmax(draws.penalised(logits), -1), told, count)
        tokens = draws.draw(scores)
        ids[items, count], lengths[items] = tokens, count + 1
        sums[items] += scores.gather(1, tokens[:, None])[:, 0]
        going = (~constraints.finished(tokens, count + 1)).nonzero()[:, 0]
        if not len(going):
            break
        if len(going) < len(items):
            step.reorder(going)
            draws.keep(going)
        items, new = items[going], tokens[going][:, None]
        told = torch.cat((told[going], new), 1)
    return Generated(ids[:, None, : int(lengths.max())], lengths[:, None], (sums / lengths)[:, None])

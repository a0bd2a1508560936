"""Generates tokens for a batch by sampling or greedily, with constraints.

Shape legend: N items, L length of the prompts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ....support._shared_cores import shared_cores
from .constraints import Constraints, masked_prompts
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
    """Generate tokens, int64 (N,) for all items at a time, up to the limit of the constraints or until all items have
    ended.

    Ended items get `pad`. Once half of the computed items have ended, the others continue without them.

    Args:
        step: the model's decoding step, first called with the prompts.
        ids: (N, L), the prompts.
        sampling: how to choose among the tokens that the constraints allow.
        attention_mask: (N, L) of the prompts; masked tokens do not count as repeated.

    Raises:
        ValueError: constraints with tokens outside the vocabulary.
    """
    draws, new = Draws(sampling, ids, attention_mask), ids
    texts = ids
    items = torch.arange(ids.shape[0], device=ids.device)  # indices of the items that are still computed
    going = torch.ones_like(items, dtype=torch.bool)
    with shared_cores():
        for count in range(constraints.max_new_tokens):
            logits = step.step(new)
            if count == 0:
                constraints.check(logits.shape[-1])
                texts = masked_prompts(ids, attention_mask) if constraints.reads_text else ids
            drawn = draws.draw(constraints.apply(draws.penalised(logits), texts, count))
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
                    items, going, drawn, texts = items[kept], going[kept], drawn[kept], texts[kept]
            new = drawn[:, None]
            if constraints.reads_text:
                texts = torch.cat((texts, new), 1)


@torch.no_grad()
def draw(step: DecodingStep, start: Tensor, sampling: Sampling, constraints: Constraints, pad: int = 0) -> Generated:
    """Generate one text for each item, with its score. Ended items leave the batch.

    Args:
        step: the model's decoding step, first called with `start`.
        start: (N, L), the tokens that texts begin with.
        sampling: how to choose among the tokens that the constraints allow.
        pad: the token after the end of a text.

    Raises:
        ValueError: constraints with tokens outside the vocabulary.
    """
    draws, new, texts = Draws(sampling, start), start, start
    items = torch.arange(start.shape[0], device=start.device)
    ids = torch.full((len(items), constraints.max_new_tokens), pad, device=start.device)
    lengths, sums = torch.zeros_like(items), torch.zeros(len(items), device=start.device)
    for count in range(constraints.max_new_tokens):
        logits = step.step(new).float()
        if count == 0:
            constraints.check(logits.shape[-1])
        scores = constraints.apply(F.log_softmax(draws.penalised(logits), -1), texts, count)
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
        texts = torch.cat((texts[going], new), 1)
    return Generated(ids[:, None, : int(lengths.max())], lengths[:, None], (sums / lengths)[:, None])

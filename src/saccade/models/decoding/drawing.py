"""Texts whose tokens are drawn one after another, or always the likeliest, within constraints.

Shape legend: B items, L length of what they begin with, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .constraints import Constraints
from .generated import Generated
from .sampling import Repeated, Sampling
from .step import Step


@torch.no_grad()
def draw(step: Step, start: Tensor, sampling: Sampling, constraints: Constraints, pad: int = 0) -> Generated:
    """One text for each item. Items that have ended leave the batch.

    Args:
        step: what reads tokens; `start` first.
        start: (B, L), what the texts begin with.
        sampling: how the next token is chosen, once the constraints have left out what may not come.
        pad: stands behind the end of a text.

    Raises:
        ValueError: constraints that name tokens that there are not.
    """
    generator = sampling.generator()
    batch, most = start.shape[0], constraints.max_new_tokens
    items, new, told = torch.arange(batch, device=start.device), start, start
    ids = torch.full((batch, most), pad, device=start.device)
    lengths = torch.zeros(batch, dtype=torch.int64, device=start.device)
    repeated: Repeated | None = None
    sums = torch.zeros(batch, device=start.device)
    for count in range(most):
        logits = step.step(new).float()
        if count == 0:
            constraints.check(logits.shape[-1])
            repeated = Repeated.of(sampling, start, logits)
        scores = F.log_softmax(logits if repeated is None else repeated.penalised(logits), -1)
        scores = constraints.apply(scores, told, count)
        tokens = sampling.draw(scores, generator)
        ids[items, count], lengths[items] = tokens, count + 1
        sums[items] += scores.gather(1, tokens[:, None])[:, 0]
        going = (~constraints.finished(tokens, count + 1)).nonzero()[:, 0]
        if not len(going):
            break
        if len(going) < len(items):
            step.reorder(going)
        if repeated is not None:
            repeated.add(tokens, going)
        items, new = items[going], tokens[going][:, None]
        told = torch.cat((told[going], new), 1)
    return Generated(ids[:, None, : int(lengths.max())], lengths[:, None], (sums / lengths)[:, None])

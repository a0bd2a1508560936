"""Texts whose tokens are drawn one after another, or always the likeliest, within constraints.

Shape legend: B items, L length of what they begin with, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .constraints import Constraints
from .generated import Generated
from .sampling import Sampling
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
    generator = torch.Generator()
    generator.seed() if sampling.seed is None else generator.manual_seed(sampling.seed)
    batch, most = start.shape[0], constraints.max_new_tokens
    items, new, told = torch.arange(batch, device=start.device), start, start
    ids = torch.full((batch, most), pad, device=start.device)
    lengths = torch.zeros(batch, dtype=torch.int64, device=start.device)
    sums = torch.zeros(batch, device=start.device)
    for count in range(most):
        scores = F.log_softmax(step.step(new).float(), -1)
        if count == 0:
            constraints.check(scores.shape[-1])
        scores = constraints.apply(scores, told, count)
        tokens = _drawn(scores, sampling, generator)
        ids[items, count], lengths[items] = tokens, count + 1
        sums[items] += scores.gather(1, tokens[:, None])[:, 0]
        going = (~constraints.finished(tokens, count + 1)).nonzero()[:, 0]
        if not len(going):
            break
        if len(going) < len(items):
            step.reorder(going)
        items, new = items[going], tokens[going][:, None]
        told = torch.cat((told[going], new), 1)
    return Generated(ids[:, None, : int(lengths.max())], lengths[:, None], (sums / lengths)[:, None])


def _drawn(scores: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """A token (B,) for each row of `scores (B, V)`."""
    if sampling.temperature == 0.0:
        return scores.argmax(-1)
    shares = torch.stack([sampling.probabilities(row) for row in scores]).cpu()
    return torch.multinomial(shares, 1, generator=generator)[:, 0].to(scores.device)

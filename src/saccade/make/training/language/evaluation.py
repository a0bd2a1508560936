"""Validation loss of a language model, and of a bigram model for comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from accelerate import Accelerator

    from .shared import SharedWindows

DISCOUNT = 0.75  # subtracted from the count of each pair, and given to pairs that did not occur


@torch.no_grad()
def evaluate(
    model: nn.Module,
    windows: Tensor,
    *,
    batch: int = 32,
    accelerator: Accelerator | None = None,
    shared: SharedWindows | None = None,
) -> float:
    """Mean negative log-likelihood per token, in nats. Dropout is off.

    Args:
        model: takes tokens (B, L), like `saccade.models.DecoderLM`.
        windows: (count, L + 1), such as of `whole_windows`.
        batch: windows in each call of the model.
        accelerator: distributes the windows over its processes; each of them calls this and gets the same number.
        shared: lets several of its processes share each window.

    Example:
        >>> import torch, saccade
        >>> lm = saccade.models.load()
        >>> tokens = torch.tensor(lm.tokenizer.encode("Once upon a time there was a cat.").ids)
        >>> windows = saccade.training.whole_windows(tokens, start=lm.tokenizer.start, context=len(tokens))
        >>> saccade.training.evaluate(lm.model, windows) < 7.6  # log 2048, of a model that has learned nothing
        True
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    shares, own = (1, 0) if accelerator is None else (accelerator.num_processes, accelerator.process_index)
    sharing = 1 if shared is None else shared.processes
    shares, own, total = shares // sharing, own // sharing, 0.0
    for part in windows.split(batch * shares):
        rows = part.tensor_split(shares)[own].to(device)
        # Gathering sharded weights needs all processes, so a process without rows computes a dummy batch.
        given = rows if rows.shape[0] else part[:1].to(device)
        if shared is None:
            logits, targets = model(given[:, :-1]), given[:, 1:]
        else:
            logits, targets = shared.predicted(model, given)
        if rows.shape[0]:
            total += cross_entropy(logits, targets, "sum").item()
    model.train(was_training)
    if accelerator is not None and shares * sharing > 1:
        total = accelerator.reduce(torch.tensor(total, dtype=torch.float64, device=device), "sum").item()
    return total / (windows.shape[0] * (windows.shape[1] - 1))


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """In nats, in float32 or wider: logits (B, L, V) and targets (B, L)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def bigram_loss(training: Tensor, validation: Tensor, vocabulary: int) -> float:
    """Validation loss in nats per token of a bigram model with absolute discounting, fitted to `training`."""
    known, asked = training.long().flatten().cpu(), validation.long().flatten().cpu()
    single = torch.bincount(known, minlength=vocabulary).double() + 1
    pairs, counts = torch.unique(known[:-1] * vocabulary + known[1:], return_counts=True)
    total = torch.zeros(vocabulary, dtype=torch.float64).index_add(0, pairs // vocabulary, counts.double())
    followers = torch.bincount(pairs // vocabulary, minlength=vocabulary)
    wanted, before = asked[:-1] * vocabulary + asked[1:], asked[:-1]
    at = torch.searchsorted(pairs, wanted).clamp(max=len(pairs) - 1)
    discounted = torch.where(pairs[at] == wanted, counts[at] - DISCOUNT, 0.0)
    shares = (single / single.sum())[asked[1:]]
    whole = total[before]
    mixed = (discounted + DISCOUNT * followers[before] * shares) / whole.clamp(min=1)
    return -float(torch.where(whole > 0, mixed, shares).log().mean())

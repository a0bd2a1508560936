"""How well a model predicts a text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor, *, batch: int = 32) -> float:
    """Mean negative log-likelihood per token, in nats, over `windows (count, L + 1)`; dropout is off meanwhile."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    total = 0.0
    for part in windows.split(batch):
        part = part.to(device)
        logits = model(part[:, :-1])
        total += F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
    model.train(was_training)
    return total / (windows.shape[0] * (windows.shape[1] - 1))

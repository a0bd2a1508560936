"""What attention's numbers are, from dense float64 weights: nothing here comes from saccade.

B batch, H query heads, Lq / Lk lengths, D width.
"""

from __future__ import annotations

import math

import torch


def dense(query, key, seen=None, *, scale=None, bias=None):
    """Weights (B, H, Lq, Lk) in float64; rows that see nothing are 0. seen: booleans, True = attend."""
    query, key = query.detach().double(), key.detach().double()
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + bias.detach().double()
    if seen is not None:
        logits = torch.where(seen, logits, -math.inf)
    return torch.nan_to_num(logits.softmax(-1), nan=0.0)


def entropy(weights):
    return -torch.special.xlogy(weights, weights).sum(-1)


def numbers(weights, counted=None):
    """By statistic, what each head's samples over the counted rows are: {name: [samples of head 0, ...]}."""
    _, heads, rows, keys = weights.shape
    counted = weights.sum(-1) > 0 if counted is None else counted.expand(weights.shape[:3])
    stand = torch.arange(rows) + keys - rows
    distance = (weights * (torch.arange(keys) - stand[:, None]).abs()).sum(-1)
    own = weights.diagonal(keys - rows, 2, 3) if keys >= rows else None
    found = {"entropy": entropy(weights), "largest": weights.amax(-1), "distance": distance, "mass.self": own}
    return {
        name: [values[:, head][counted[:, head]] for head in range(heads)]
        for name, values in found.items()
        if values is not None
    }


def check(observed, call, weights, counted=None, steps=1, tolerance=2e-5):
    """The aggregates of a call are those of the dense weights, in every head; each of `steps` steps was the same."""
    for name, heads in numbers(weights, counted).items():
        for head, samples in enumerate(heads):
            got = observed.aggregates[call][head][name]
            assert got.count == steps * samples.numel(), (name, head)
            want = (samples.mean(), samples.std(correction=0), samples.min(), samples.max())
            for one, other in zip((got.mean, got.spread, got.min, got.max), want, strict=True):
                assert abs(one - float(other)) <= tolerance * max(1.0, abs(float(other))), (name, head, got, want)

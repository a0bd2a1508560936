"""Every statistic from its definition, on the dense matrix of weights in float64: the judge of `saccade.statistics`.

Nothing here comes from saccade. B items, Hq/Hkv heads, Lq/Lk lengths.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


class Dense:
    """p, s and who is seen, (B, Hq, Lq, Lk) as float64 and bool arrays; statistics are methods."""

    def __init__(self, query, key, seen, *, bias=None, scale=None, softcap=None, sink=None, standing=None):
        heads = query.shape[1]
        shape = (*query.shape[:3], key.shape[2])
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        logits = scale * query.double() @ key.double().repeat_interleave(heads // key.shape[1], 1).transpose(-1, -2)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if bias is not None:
            logits = logits + bias.double()
        self.seen = torch.from_numpy(np.broadcast_to(np.asarray(seen), shape).copy())
        self.logits = logits.masked_fill(~self.seen, -math.inf)
        self.counted = self.seen.any(-1)
        extra = torch.full((heads,), -math.inf, dtype=torch.float64) if sink is None else sink.double()
        extra = extra[None, :, None, None].expand(*shape[:3], 1)
        # An empty row's softmax would be 0 / 0: it is given one logit, and its weights are set to 0.
        padded = torch.where(self.counted[..., None], torch.cat([self.logits, extra], -1), 0.0)
        shares = torch.softmax(padded, -1) * self.counted[..., None]
        self.p, self.sink = shares[..., :-1], shares[..., -1]
        self.lse = torch.where(self.counted, torch.logsumexp(padded, -1), -math.inf)
        standing = shape[3] - shape[2] if standing is None else standing
        offsets = torch.as_tensor(standing).reshape(-1, 1)
        self.position = (torch.arange(shape[2]) + offsets)[:, None, :, None]  # (B|1, 1, Lq, 1)
        self.keys = torch.arange(shape[3])

    @property
    def entropy(self) -> Tensor:
        return -torch.special.xlogy(self.p, self.p).sum(-1)

    @property
    def largest(self) -> Tensor:
        return self.p.amax(-1)

    @property
    def distance(self) -> Tensor:
        return (self.p * (self.position - self.keys).abs()).sum(-1)

    @property
    def keys_seen(self) -> Tensor:
        return self.seen.sum(-1)

    @property
    def received(self) -> Tensor:
        return self.p.sum(2)

    def on(self, chosen: Tensor) -> Tensor:
        """The mass on the keys that `chosen`, broadcastable to (B, Hq, Lq, Lk), marks."""
        return (self.p * chosen).sum(-1)

    def beside(self, step: int) -> Tensor:
        return self.on(self.keys == self.position + step)

    @property
    def first(self) -> Tensor:
        """The first key that any row of any head of each item sees."""
        read = self.seen.any(2).any(1)  # (B, Lk)
        return self.on((self.keys == read.to(torch.uint8).argmax(-1)[:, None])[:, None, None])

    def mean(self, rows: Tensor) -> list[float]:
        return [rows[:, h][self.counted[:, h]].mean().item() for h in range(rows.shape[1])]


def of_case(problem, standing=None) -> Dense:
    """Of a `problems.Problem`."""
    tensors = problem.tensors
    return Dense(
        tensors["query"],
        tensors["key"],
        problem.seen(),
        bias=problem.to_dense(tensors),
        sink=tensors.get("sink"),
        standing=standing,
        **problem.options,
    )


def bound(dense: Dense, query: Tensor, key: Tensor, dtype: torch.dtype, scale: float | None = None) -> float:
    """How far a weight computed in `dtype` may be off, relative to it.

    A dot product of D terms is off by D eps sum|q||k| (Higham 2002, section 3.1), what follows by a few eps of the
    logit; exp turns an absolute error of the logit into a relative one of the weight, the denominator has the same
    again, and its sum of Lk terms Lk eps more. 4 for the roundings that are not counted singly.
    """
    width, keys = query.shape[-1], key.shape[2]
    scale = width**-0.5 if scale is None else abs(scale)
    norms = [x.double().norm(dim=-1).nan_to_num(0, 0, 0).max().item() if x.numel() else 0.0 for x in (query, key)]
    finite = dense.logits[torch.isfinite(dense.logits)]
    size = max(1.0, scale * norms[0] * norms[1], finite.abs().max().item() if finite.numel() else 0.0)
    return 4 * torch.finfo(dtype).eps * (2 * (width + 4) * size + keys)

"""Statistics of dense weights in float64, and how far float32 may be from them.

u = 2^-24 is the error of one rounding. A logit of D products is off by at most about 2 sqrt(D) u S, where S is the sum
of its terms' sizes (Higham & Mary 2019, "A new approach to probabilistic rounding error analysis", lambda = 2) and
counts the bias and the largest of its row, from which it is subtracted. A weight is the exponential of that: its
relative error is e = 2 sqrt(D) u S + 40 u, the 40 for exponential (5), quotients, and sums of 12 + 4 + 4 terms for and
under the line. What is summed from weights has the same relative error, the entropy -sum p log p of e (1 + 2 H).

Shape legend: B batch, Hq query heads, Lq / Lk lengths, G groups.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from native.fuzzing import Draw, scale_of, seen_by
from saccade.operator._backends.native import _statistics
from saccade.operator._backends.native._statistics import NativeStatistics
from saccade.operator._biases import ALiBi, RelativeBias
from saccade.operator._checks import make_call

U, TINY = 2.0**-24, 2.0**-125  # what is below is 0 on some instruction sets


class Question(NamedTuple):
    """A call and what is asked of it."""

    draw: Draw
    placement: Any  # an int or a list of one per item
    first: Tensor  # int64 (B,)
    groups: Tensor  # bool (G, B | 1, Lk)
    top: int

    def placed(self) -> Tensor:
        """(B | 1,)"""
        return torch.tensor(self.placement).reshape(-1)


def ask(question: Question, received: bool = True) -> NativeStatistics:
    draw = question.draw
    leaves = draw.leaves
    bias = leaves.get("bias")
    if "slopes" in leaves:
        bias = ALiBi(leaves["slopes"])
    elif "table" in leaves:
        bias = RelativeBias(leaves["table"], **draw.relative)
    call = make_call(
        leaves["query"],
        leaves["key"],
        leaves["value"],
        draw.mask,
        bias=bias,
        scale=draw.options.get("scale"),
        softcap=draw.options.get("softcap"),
        sink=leaves.get("sink"),
        dropout=0.0,
    )
    assert _statistics.refuses(call, question.top) is None
    placement = question.placement if isinstance(question.placement, int) else question.placed()
    made = _statistics.filled(
        call, placement, first=question.first, groups=question.groups, received=received, top=question.top
    )
    return made.named()


class Dense(NamedTuple):
    """Everything in float64."""

    logits: Tensor  # (B, Hq, Lq, Lk), -inf where nothing is seen
    seen: Tensor
    weights: Tensor
    sizes: Tensor  # (B, Hq, Lq): S

    def slack(self, width: int) -> Tensor:
        """(B, Hq, Lq): how far a logit may be off."""
        return 2 * math.sqrt(width) * U * self.sizes


def dense(draw: Draw) -> Dense:
    leaves = {name: leaf.detach().double() for name, leaf in draw.leaves.items()}
    query = leaves["query"]
    key = leaves["key"].repeat_interleave(query.shape[1] // leaves["key"].shape[1], 1)
    bias = draw.dense(leaves)
    seen = seen_by(draw, bias).expand(draw.sizes)
    logits, sizes = scale_of(draw) * query @ key.mT, abs(scale_of(draw)) * query.abs() @ key.abs().mT
    if (cap := draw.options.get("softcap")) is not None:
        logits = cap * torch.tanh(logits / cap)
    if bias is not None:
        logits, sizes = logits + torch.where(bias == -math.inf, 0.0, bias), sizes + bias.abs()
    logits = torch.where(seen, logits, -math.inf)
    whole = torch.where(seen.any(-1, keepdim=True), logits, 0.0)
    if "sink" in leaves:
        whole = torch.cat([whole, leaves["sink"][None, :, None, None].expand(*logits.shape[:3], 1)], -1)
    weights = torch.where(seen, torch.softmax(whole, -1)[..., : draw.sizes[3]], 0.0)
    largest = torch.where(seen, sizes, 0.0)
    return Dense(logits, seen, weights, largest.amax(-1) * 2 if draw.sizes[3] else largest.sum(-1))


def truth(question: Question, of: Dense) -> dict[str, tuple[Tensor, Tensor]]:
    """Each statistic by name with what its error may be, from the dense weights."""
    draw, (p, seen) = question.draw, (of.weights, of.seen)
    e = of.slack(draw.leaves["query"].shape[3]) + 40 * U
    keys, some = torch.arange(draw.sizes[3]), seen.any(-1)
    away = keys - torch.arange(draw.sizes[2])[:, None] - question.placed()[:, None, None, None]  # (B | 1, 1, Lq, Lk)
    lse = torch.logsumexp(of.logits, -1)
    sink = draw.leaves.get("sink")
    share = torch.zeros_like(lse) if sink is None else torch.sigmoid(sink.double()[:, None] - lse)
    entropy = -torch.xlogy(p, p).sum(-1)

    def sums(x: Tensor) -> tuple[Tensor, Tensor]:
        total = (p * x).sum(-1)
        return total, e * total + TINY * x.double().expand(p.shape).sum(-1)

    found = {
        "lse": (lse, e + 4 * U * torch.where(some, lse.abs(), 0.0)),
        "sink": (torch.where(some, share, 0.0), e + 4 * U),
        "entropy": (entropy, e * (1 + 2 * entropy) + 200 * TINY * draw.sizes[3]),
        "distance": sums(away.abs()),
        "own": sums(away == 0),
        "previous": sums(away == -1),
        "next": sums(away == 1),
        "first": sums(keys == question.first[:, None, None, None]),
    }
    if draw.sizes[3]:
        found["largest"] = p.amax(-1), e * p.amax(-1) + TINY
        least = torch.where(some, torch.where(seen, p, math.inf).amin(-1), 0.0)
        found["smallest"] = least, e * least + TINY
        slack = of.slack(draw.leaves["query"].shape[3]) + 8 * U
        found["highest"] = of.logits.amax(-1), slack
        found["lowest"] = torch.where(seen, of.logits, math.inf).amin(-1), slack
    members = [sums(group[:, None, None]) for group in question.groups]
    if members:
        found["groups"] = tuple(map(torch.stack, zip(*members, strict=True)))  # type: ignore[assignment]
    # Here sums run over 48 rows in float32.
    found["received"] = p.sum(2), (p * (e + 50 * U)[..., None]).sum(2) + TINY * draw.sizes[2]
    return found


def apart(got: Tensor, want: Tensor) -> Tensor:
    """The absolute difference; equal infinities differ by nothing, a NaN by everything."""
    got = got.double()
    return torch.where(got == want, 0.0, (got - want).abs()).nan_to_num(nan=math.inf)


def assert_equal(question: Question, got: NativeStatistics, of: Dense, where: str) -> None:
    """Every number, and every key that is named."""
    for name, (want, allowed) in truth(question, of).items():
        far = apart(getattr(got, name), want) - allowed
        assert not far.numel() or far.max() <= 0, f"{name} on {where}: {far.max().item():.3g} too far: {question}"
    some = of.seen.any(-1)
    assert torch.equal(got.lse == -math.inf, ~some)
    assert torch.equal(got.nonfinite, torch.zeros_like(got.nonfinite)) and (got.nonfinite_at == -1).all()
    assert torch.equal(got.largest_at == -1, ~some)
    if not of.logits.numel():
        return
    slack = 2 * of.slack(question.draw.leaves["query"].shape[3]) + 8 * U
    there = of.logits.gather(-1, got.largest_at.clamp(min=0)[..., None])[..., 0]
    assert (~some | (there >= of.logits.amax(-1) - slack)).all(), f"largest_at on {where}: {question}"
    if question.top:
        assert_best(question, got, of, slack, where)


def assert_best(question: Question, got: NativeStatistics, of: Dense, slack: Tensor, where: str) -> None:
    weights, keys, top = got.top_weights, got.top_keys, question.top
    best, _ = of.logits.topk(min(top, of.logits.shape[-1]), -1)
    best = torch.cat([best, best.new_full((*best.shape[:3], top - best.shape[3]), -math.inf)], -1)
    there = keys >= 0
    assert torch.equal(there, best > -math.inf) and (weights[~there] == 0).all()
    named = torch.where(there, of.logits.gather(-1, keys.clamp(min=0)), -math.inf)
    assert (~there | (named >= best - slack[..., None])).all(), f"top keys on {where}: {question}"
    p, e = of.weights.gather(-1, keys.clamp(min=0)), slack[..., None] + 40 * U
    assert (~there | (apart(weights, p) <= e * p + TINY)).all(), f"top weights on {where}: {question}"
    assert (weights.diff(dim=-1) <= 0).all()
    ordered = torch.where(there, keys, -1 - torch.arange(top)).sort(-1)[0]
    assert (ordered.diff(dim=-1) != 0).all(), f"a key twice on {where}: {question}"

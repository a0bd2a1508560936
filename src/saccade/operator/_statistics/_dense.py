"""The meaning of every statistic: dense, slow, obvious. O(B Hq Lq Lk D) memory; any dtype.

Shape legend: B items, Hq query heads, Lq / Lk lengths, G named groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._biases import Placement
from .._call import CheckedCall
from .._reference import _logits, _seen_and_bias
from .._scores._score import ModifiedScores
from ._request import StatisticsRequest
from ._rows import RowStatistics, positions


def refuses(call: CheckedCall, asked: StatisticsRequest) -> str | None:
    """None: the reference takes every call."""
    return None


def rows(call: CheckedCall, asked: StatisticsRequest, standing: Placement, first: Tensor) -> RowStatistics:
    seen, bias = _seen_and_bias(call)
    seen = seen & (bias != -torch.inf)
    logits = torch.where(seen, _logits(call, seen, bias), -torch.inf)
    if isinstance(call.bias, ModifiedScores):
        seen = seen & (logits != -torch.inf)
    empty = ~(logits != -torch.inf).any(-1)
    spoiled = ~empty & (torch.isnan(logits) | (logits == torch.inf)).any(-1)
    log_p, sink, lse = _softmax(call, logits, empty, spoiled)
    p = torch.where(seen & ~empty[..., None], torch.exp(log_p), 0.0)
    keys = torch.arange(call.length_k, device=call.device)
    at = positions(torch.arange(call.length_q, device=call.device), standing)[:, None, :, None]  # (B|1, 1, Lq, 1)

    def mass(chosen: Tensor) -> Tensor:
        return torch.where(chosen.expand(p.shape), p, 0.0).sum(-1)

    masses = {
        "self": mass(keys == at),
        "previous": mass(keys == at - 1),
        "next": mass(keys == at + 1),
        "first": mass((keys == first[:, None])[:, None, None]),
        "sink": torch.zeros_like(lse) if call.sink is None else torch.where(empty, 0.0, torch.exp(sink)),
    }
    for number, name in enumerate(asked.groups):
        assert asked.members is not None
        masses[name] = torch.where(spoiled, torch.nan, mass(asked.members[:, None, None, number]))
    bad = seen & ~torch.isfinite(logits)
    fine = seen & ~bad
    best = _greatest(logits, -torch.inf)
    top_weights, top_keys = _top(logits, p, asked.top)
    return RowStatistics(
        lse=lse,
        entropy=torch.where(p == 0, 0.0, -p * log_p).sum(-1),
        largest=_greatest(p, 0.0),
        largest_at=torch.where(empty, -1, torch.where(spoiled, _first(bad), _first(logits == best[..., None]))),
        smallest=torch.where(empty, 0.0, -_greatest(torch.where(seen, -p, -torch.inf), 0.0)),
        distance=(p * (at - keys).abs()).sum(-1),
        mass=masses,
        low=-_greatest(torch.where(fine, -logits, -torch.inf), -torch.inf),
        high=_greatest(torch.where(fine, logits, -torch.inf), -torch.inf),
        bad=bad.sum(-1),
        bad_at=_first(bad),
        top_weights=top_weights,
        top_keys=top_keys,
        pivot=torch.where(empty, 0.0, best),
        rest=torch.where(empty, 0.0, -_greatest(log_p, 0.0)),
        received=p.sum(2) if asked.received else None,
    )


def _softmax(call: CheckedCall, logits: Tensor, empty: Tensor, spoiled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log p (B, Hq, Lq, Lk), the sink's (B, Hq, Lq) and lse; no -inf - -inf is formed for an empty row."""
    sink = logits.new_full((call.heads,), -torch.inf) if call.sink is None else call.sink.to(logits.dtype)
    terms = torch.cat([logits, sink[None, :, None, None].expand(*logits.shape[:3], 1)], -1)
    terms = torch.where(empty[..., None], 0.0, terms)
    log_p = torch.where(spoiled[..., None], torch.nan, torch.log_softmax(terms, -1))
    lse = torch.where(spoiled, torch.nan, torch.logsumexp(terms, -1))
    return log_p[..., :-1], log_p[..., -1], torch.where(empty, -torch.inf, lse)


def _top(logits: Tensor, p: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest weights and their keys. In a tie the first key is taken; missing entries are 0 and -1."""
    order = torch.sort(logits, dim=-1, descending=True, stable=True)
    at, known = order.indices[..., :count], order.values[..., :count] != -torch.inf
    weights, keys = torch.where(known, p.gather(-1, at), 0.0), torch.where(known, at, -1)
    more = (0, count - keys.shape[-1])
    return torch.nn.functional.pad(weights, more), torch.nn.functional.pad(keys, more, value=-1)


def _greatest(entries: Tensor, otherwise: float) -> Tensor:
    """The maximum over keys; `otherwise` if there are no keys."""
    return entries.amax(-1) if entries.shape[-1] else entries.new_full(entries.shape[:-1], otherwise)


def _first(chosen: Tensor) -> Tensor:
    """The first key chosen in each row, -1 without one."""
    if not chosen.shape[-1]:
        return torch.full(chosen.shape[:-1], -1, device=chosen.device)
    return torch.where(chosen.any(-1), chosen.to(torch.uint8).argmax(-1), -1)

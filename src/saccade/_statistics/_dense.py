"""The meaning of every statistic: dense, slow, obvious. O(B Hq Lq Lk D) memory; any dtype.

Shape legend: B items, Hq query heads, Lq / Lk lengths, G named groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._biases import Placement
from .._call import Call
from .._reference import _logits, _seen_and_bias
from ._asked import Asked
from ._rows import Rows


def refuses(call: Call, asked: Asked) -> str | None:
    """None: the reference takes every call."""
    return None


def rows(call: Call, asked: Asked, standing: Placement, first: Tensor) -> Rows:
    seen, bias = _seen_and_bias(call)
    seen = seen & (bias != -torch.inf)
    shape = seen.shape
    logits = torch.where(seen, _logits(call, seen) + bias, -torch.inf)
    sink = logits.new_full((1, call.heads, 1), -torch.inf)
    if call.sink is not None:
        sink = call.sink.to(logits.dtype)[None, :, None]
    terms = torch.cat([logits, sink[..., None].expand(*shape[:3], 1)], -1)
    empty = ~(logits != -torch.inf).any(-1)
    lse = torch.where(empty, -torch.inf, torch.logsumexp(terms, -1))
    spoiled = ~empty & (torch.isnan(logits) | (logits == torch.inf)).any(-1)
    lse = torch.where(spoiled, torch.nan, lse)
    log_p = logits - torch.where(empty, 0.0, lse)[..., None]
    p = torch.where(seen, torch.exp(log_p), 0.0)
    keys = torch.arange(call.length_k, device=call.device)
    index = torch.arange(call.length_q, device=call.device)
    at = (index + (standing if isinstance(standing, int) else standing.view(-1, 1, 1)))[..., None]  # (B, 1, Lq, 1)

    def mass(chosen: Tensor) -> Tensor:
        return torch.where(spoiled, torch.nan, torch.where(chosen.expand(shape), p, 0.0).sum(-1))

    masses = {
        "self": mass(keys == at),
        "previous": mass(keys == at - 1),
        "next": mass(keys == at + 1),
        "first": mass((keys == first[:, None])[:, None, None]),
        "sink": torch.where(empty, 0.0, torch.exp(sink - torch.where(empty, 0.0, lse))),
    }
    for number, name in enumerate(asked.groups):
        assert asked.members is not None
        masses[name] = mass(asked.members[:, None, None, number])
    bad = seen & ~torch.isfinite(logits)
    fine = seen & ~bad
    top = torch.sort(logits, dim=-1, descending=True, stable=True)
    width = min(asked.top, call.length_k)
    known = top.values[..., :width] != -torch.inf
    fill = (0, asked.top - width)
    top_weights = torch.where(known, p.gather(-1, top.indices[..., :width]), 0.0)
    top_keys = torch.where(known, top.indices[..., :width], -1)
    return Rows(
        lse=lse,
        entropy=torch.where(p == 0, 0.0, -p * log_p).sum(-1),
        largest=_greatest(p, 0.0),
        largest_at=torch.where(
            empty, -1, torch.where(spoiled, _first(bad), _first(logits == _greatest(logits, 0.0)[..., None]))
        ),
        smallest=-_greatest(torch.where(seen, -p, -torch.inf), 0.0),
        distance=(p * (at - keys).abs()).sum(-1),
        mass=masses,
        low=-_greatest(torch.where(fine, -logits, -torch.inf), -torch.inf),
        high=_greatest(torch.where(fine, logits, -torch.inf), -torch.inf),
        bad=bad.sum(-1),
        bad_at=_first(bad),
        top_weights=torch.nn.functional.pad(top_weights, fill),
        top_keys=torch.nn.functional.pad(top_keys, fill, value=-1),
        pivot=torch.zeros_like(lse),
        rest=lse,
        received=p.sum(2) if asked.received else None,
    )


def _greatest(entries: Tensor, otherwise: float) -> Tensor:
    """The maximum over keys, `otherwise` where there are none."""
    return entries.amax(-1) if entries.shape[-1] else entries.new_full(entries.shape[:-1], otherwise)


def _first(chosen: Tensor) -> Tensor:
    """The first key chosen in each row, -1 without one."""
    if not chosen.shape[-1]:
        return torch.full(chosen.shape[:-1], -1, device=chosen.device)
    return torch.where(chosen.any(-1), chosen.to(torch.uint8).argmax(-1), -1)

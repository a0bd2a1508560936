"""`Score` in every call: values and derivatives against dense attention in plain PyTorch, written with broadcasting.

Sizes are distinct primes. Some functions are recognised and have kernels, some are programs, and some cannot be traced.
"""

from __future__ import annotations

import pytest
import torch

import saccade

B, HQ, HKV, LQ, LK, D, DV = 2, 6, 3, 11, 13, 7, 5
W = 2 * LK  # distances of a table: more than any pair has


def tables(dtype=torch.float64):
    torch.manual_seed(5)
    sizes = {"heads": (HQ,), "items": (B, LK), "distances": (HQ, 2 * W), "pairs": (LK, LK), "single": ()}
    return {name: torch.randn(size, dtype=dtype, requires_grad=True) for name, size in sizes.items()}


def positions():
    """b, h, q, k with the axes of scores; the last query stands at the last key."""
    sizes = (B, HQ, LQ, LK)
    b, h, q, k = (torch.arange(n).view([-1 if axis == at else 1 for axis in range(4)]) for at, n in enumerate(sizes))
    return b, h, q + LK - LQ, k


# Each function is written once: on scalars it is the `Score`, on whole tensors the dense formula.
FUNCTIONS = {
    "itself": lambda s, b, h, q, k, t: s,
    "twice": lambda s, b, h, q, k, t: s * 2,
    "negative": lambda s, b, h, q, k, t: -s / 3,
    "softcap": lambda s, b, h, q, k, t: 2 * torch.tanh(s / 2),
    "negative softcap": lambda s, b, h, q, k, t: torch.tanh(s * 3) * -2,
    "alibi": lambda s, b, h, q, k, t: s - t["heads"][h] * (q - k).abs(),
    "relative": lambda s, b, h, q, k, t: 3 * torch.tanh(s) + t["distances"][h, k - q + W],
    "relative to a threshold": lambda s, b, h, q, k, t: s + torch.where(q > k + 2, 0.5, t["single"]),
    "heads": lambda s, b, h, q, k, t: s + t["heads"][h] * 0.5,
    "items": lambda s, b, h, q, k, t: s + t["items"][b, k],
    "rows": lambda s, b, h, q, k, t: s + t["heads"][h] * torch.cos(q * 1.0),
    "causal": lambda s, b, h, q, k, t: torch.where(q >= k, s, -torch.inf),
    "inverse causal with a program": lambda s, b, h, q, k, t: torch.where(q > k, -torch.inf, s * s),
    "every other head": lambda s, b, h, q, k, t: torch.where((h % 2 == 0) & (q - k > 1), -torch.inf, s),
    "squared": lambda s, b, h, q, k, t: s * s,
    "not of distances": lambda s, b, h, q, k, t: s + torch.sin((q + k) * 1.0) + t["pairs"][q, k],
    "scaled by heads": lambda s, b, h, q, k, t: s * t["heads"][h].sigmoid() + t["items"][b, k] * t["single"],
    "exponent of a table": lambda s, b, h, q, k, t: s + torch.exp(t["heads"][h]),
    "rounded index": lambda s, b, h, q, k, t: s + t["heads"][(s * 0).to(torch.int64) + h],
    "without the score": lambda s, b, h, q, k, t: t["heads"][h] * (q - k) + 0.0 * s,
    "not traced": lambda s, b, h, q, k, t: s + torch.stack([s * 0, t["heads"][h].expand(s.shape)]).logsumexp(0),
}
KNOWN = {
    "itself": "recognised as the score itself",
    "twice": "recognised as scale 2",
    "softcap": "recognised as softcap 2",
    "alibi": "recognised as distances (h, k - q)",
    "relative": "recognised as softcap 3 and distances (h, k - q)",
    "relative to a threshold": "recognised as distances (h, k - q)",
    "heads": "recognised as a constant per head",
    "items": "recognised as a term (b, h, k)",
    "rows": "recognised as a term (b, h, q)",
    "causal": "recognised as a mask",
    "inverse causal with a program": "recognised as a mask and a program",
    "squared": "a program of 1 operation",
}


def score(name, held):
    function = FUNCTIONS[name]
    return saccade.Score(lambda s, b, h, q, k: function(s, b, h, q, k, held))


def tensors(dtype=torch.float64, items=B, rows=LQ, keys=LK):
    torch.manual_seed(17)
    shapes = (items, HQ, rows, D), (items, HKV, keys, D), (items, HKV, keys, DV)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def dense(name, query, key, value, held, visible=True, softcap=None, sink=None):
    scores = query @ key.repeat_interleave(HQ // HKV, 1).mT / D**0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = FUNCTIONS[name](scores, *positions(), held)
    scores = torch.where(torch.as_tensor(visible), scores, -torch.inf)
    ends = torch.full((HQ,), -torch.inf, dtype=scores.dtype) if sink is None else sink
    terms = torch.cat([scores, ends.view(1, HQ, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return torch.softmax(terms, -1)[..., :-1] @ value.repeat_interleave(HQ // HKV, 1), terms.logsumexp(-1)


def gradients(results, given):
    total = sum(result.sin().sum() for result in results)
    found = torch.autograd.grad(total, given, allow_unused=True)
    return [torch.zeros_like(x) if one is None else one for one, x in zip(found, given, strict=True)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_every_gradient_are_those_of_the_dense_formula(name):
    held, (query, key, value) = tables(), tensors()
    mask, sink = saccade.Causal(), torch.randn(HQ, dtype=torch.float64, requires_grad=True)
    options = {"softcap": 1.5, "sink": sink}
    given = [query, key, value, sink, *held.values()]
    _, _, q, k = positions()
    expected = dense(name, query, key, value, held, k <= q, **options)
    wanted = gradients(expected, given)
    for backend in ("chunked", "reference"):
        found = saccade.attention_with_lse(query, key, value, mask, bias=score(name, held), backend=backend, **options)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(gradients(found, given), wanted)


@pytest.mark.parametrize("name", KNOWN)
def test_explain_says_what_a_function_is_recognised_as(name):
    held, given = tables(torch.float32), tensors(torch.float32)
    plan = saccade.explain(*given, bias=score(name, held))
    assert plan.score == KNOWN[name]
    found = saccade.attention(*given, bias=score(name, held))
    torch.testing.assert_close(found, dense(name, *given, held)[0], atol=2e-5, rtol=2e-5)

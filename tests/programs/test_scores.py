"""`Score` in every call: values and derivatives against dense attention in plain PyTorch, written with broadcasting.

Sizes are distinct primes. The programs are of two kinds: those that have a kernel, and those that have none.
"""

from __future__ import annotations

import pytest
import torch

import saccade
from saccade.operator._programs._language import Builder
from saccade.operator._scores import Score

B, HQ, HKV, LQ, LK, D, DV = 2, 6, 3, 11, 13, 7, 5


def tensors(dtype=torch.float64):
    torch.manual_seed(17)
    shapes = (B, HQ, LQ, D), (B, HKV, LK, D), (B, HKV, LK, DV)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def reciprocal(heads, items):
    """`sigmoid(heads[h]) * score + sin(items[b, k]) / (q - k)`, which divides by 0 on the diagonal."""
    build = Builder()
    score, b, h, q, k = (build.leaf(name) for name in ("score", "b", "h", "q", "k"))
    distance = build.number(build.of("sub", q, k))
    term = build.of("div", build.of("sin", build.load(1, "float", b, k)), distance)
    new = build.of("add", build.of("mul", build.of("sigmoid", build.load(0, "float", h)), score), term)
    return Score._of_program(build.program(new), [heads, items])


def dense(query, key, value, visible, scores):
    """Attention with these scores of all pairs."""
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)
    return weights @ value.repeat_interleave(HQ // HKV, 1)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_a_program_and_all_its_gradients(backend):
    query, key, value = tensors()
    heads, items = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((HQ,), (B, LK)))
    given = (query, key, value, heads, items)
    out = saccade.attention(
        query, key, value, ~saccade.Window(0, 0), bias=reciprocal(heads, items), softcap=1.5, backend=backend
    )
    found = torch.autograd.grad(out.sin().sum(), given)

    products = query @ key.repeat_interleave(HQ // HKV, 1).mT / D**0.5
    distance = torch.arange(LQ)[:, None] + LK - LQ - torch.arange(LK)
    safe = torch.where(distance == 0, 1, distance)
    scores = 1.5 * torch.tanh(products / 1.5) * heads.sigmoid()[:, None, None] + items.sin()[:, None, None] / safe
    expected = dense(query, key, value, distance != 0, scores)
    torch.testing.assert_close(out, expected)
    for one, other in zip(found, torch.autograd.grad(expected.sin().sum(), given), strict=True):
        torch.testing.assert_close(one, other)

"""Attention by hand in the ways that people write it: written into, used twice, in other dtypes, along other axes.

Shape legend: B batch, H heads, L length, D width.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import saccade
from attention_numbers import check, dense

B, H, L, D = 3, 2, 11, 5
MASK = torch.ones(L, L, dtype=torch.bool).tril()
BIAS = torch.randn(H, L, L, generator=torch.Generator().manual_seed(5))
NOT_FIRST = (torch.arange(L) > 0) | (torch.arange(L) < 1)[:, None]  # but to the first row
NOT_SELF = ~torch.eye(L, dtype=torch.bool)


class Attention(nn.Module):
    """A module whose forward is a function of q, k, v (B, H, L, D), which are its projections of x."""

    def __init__(self, function):
        super().__init__()
        self.projection, self.function = nn.Linear(H * D, 3 * H * D), function

    def parts(self, x):
        return [part.unflatten(-1, (H, D)).transpose(1, 2) for part in self.projection(x).chunk(3, -1)]

    def forward(self, x):
        return self.function(*self.parts(x)).transpose(1, 2).flatten(2)


def inputs():
    return torch.randn(B, L, H * D)


def set_items(scores):
    scores[:, :, ~MASK] = -math.inf


def fill_a_view(scores):
    scores[..., 1:, 0].fill_(-math.inf)


def fill_a_view_of_a_view(scores):
    scores.view(B * H, L, L)[:, 1:, 0].fill_(-math.inf)


def fill_the_diagonal(scores):
    scores.diagonal(dim1=-2, dim2=-1).fill_(-1e9)


def scale_under_another_name(scores):
    scores.view(B * H, L, L).mul_(0.3)


def add_in_place(scores):
    scores += BIAS


def add_into(scores):
    torch.add(scores.clone(), BIAS, out=scores)


WRITTEN = {
    set_items: {"seen": MASK},
    fill_a_view: {"seen": NOT_FIRST},
    fill_a_view_of_a_view: {"seen": NOT_FIRST},
    fill_the_diagonal: {"seen": NOT_SELF},
    scale_under_another_name: {"scale": 0.3},
    add_in_place: {"bias": BIAS},
    add_into: {"bias": BIAS},
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITTEN)
def test_what_is_written_into_scores_counts(write, mode):
    def function(q, k, v):
        scores = q @ k.mT
        write(scores)
        return scores.softmax(-1) @ v

    model, x = Attention(function), inputs()
    with mode():
        plain = model(x)
        with saccade.watch(model) as seen:
            assert torch.equal(model(x), plain)
        query, key, _ = model.parts(x)
    assert not seen.unobserved
    check(seen, "", dense(query, key, **{"scale": 1.0, **WRITTEN[write]}))


def test_scores_that_are_scaled_in_place_need_no_dense_bias():
    def function(q, k, v):
        scores = q @ k.mT
        scores *= 0.6
        scores /= 2
        scores += BIAS
        scores -= 2 * BIAS
        return scores.softmax(-1) @ v

    model, x = Attention(function), inputs()
    with saccade.watch(model, keep=True) as seen:
        model(x)
    query, key, _ = model.parts(x)
    check(seen, "", dense(query, key, scale=0.3, bias=-BIAS))
    assert seen.kept[""].scale == pytest.approx(0.3)
    assert torch.allclose(seen.kept[""].bias.parameter, -BIAS)


def test_scores_that_two_softmaxes_use_are_two_calls():
    def function(q, k, v):
        scores = q @ k.mT
        before = scores.masked_fill(~MASK, -math.inf).softmax(-1)
        after = scores.masked_fill(~MASK.mT, -math.inf).softmax(-1)
        return before @ v + after @ v

    model, x = Attention(function), inputs()
    with saccade.watch(model) as seen:
        model(x)
    query, key, _ = model.parts(x)
    assert not seen.unobserved
    check(seen, "", dense(query, key, MASK, scale=1.0))
    check(seen, "#2", dense(query, key, MASK.mT, scale=1.0))


def test_weights_that_meet_values_twice_are_one_call():
    def function(q, k, v):
        weights = (q @ k.mT).softmax(-1)
        return weights @ v + weights @ (v * 2)

    model = Attention(function)
    with saccade.watch(model) as seen:
        model(inputs())
    assert [call.name for call in seen.calls] == [""]
    assert not seen.unobserved


OTHER_AXES = {
    "rows are keys": lambda q, k, v: (v.mT @ (k @ q.mT).softmax(-2)).mT,
    "heads last": lambda q, k, v: torch.einsum(
        "bijh,bhjd->bhid", (torch.einsum("bhid,bhjd->bijh", q, k) * 0.3).softmax(2), v
    ),
    "a product of another order": lambda q, k, v: torch.einsum(
        "bjih,bhjd->bhid", torch.einsum("bhid,bhjd->bjih", q, k).softmax(1), v
    ),
}


@pytest.mark.parametrize("name", OTHER_AXES)
def test_a_softmax_over_another_axis_is_counted(name):
    model, x = Attention(OTHER_AXES[name]), inputs()
    plain = model(x)
    with saccade.watch(model) as seen:
        assert torch.equal(model(x), plain)
    assert not seen.calls
    assert seen.unobserved["softmax"].count == 1
    assert "another axis than the last" in seen.unobserved["softmax"].reason


def test_each_softmax_without_values_is_counted_where_it_is():
    class Unused(nn.Module):
        def forward(self, x):
            (x @ x.mT).softmax(-1)
            return x

    model = nn.Sequential(*(Unused() for _ in range(7)))
    with torch.no_grad(), saccade.watch(model) as seen:
        model(inputs())
    assert {name: missed.count for name, missed in seen.unobserved.items()} == {f"{n}: softmax": 1 for n in range(7)}


UPCAST = {
    "before": lambda s: F.softmax(s.float(), dim=-1).to(s.dtype),
    "within": lambda s: s.softmax(-1, dtype=torch.float32).type_as(s),
    "and dropout": lambda s: F.dropout(F.softmax(s, dim=-1, dtype=torch.float32), 0.5).to(s.dtype),
}


@pytest.mark.parametrize("name", UPCAST)
def test_a_softmax_in_float32_of_scores_in_bfloat16(name):
    model, x = Attention(lambda q, k, v: UPCAST[name](q @ k.mT * 0.3) @ v).bfloat16(), inputs().bfloat16()
    torch.manual_seed(1)
    plain, state = model(x), torch.get_rng_state()
    torch.manual_seed(1)
    with saccade.watch(model) as seen:
        again = model(x)
    assert torch.equal(plain, again) and torch.equal(state, torch.get_rng_state())
    assert not seen.unobserved
    query, key, _ = model.parts(x)
    check(seen, "", dense(query, key, scale=0.3), tolerance=2e-2)  # scores are rounded to 8 bits

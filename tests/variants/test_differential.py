"""Differential attention against its formula, made of calls of the reference backend, in float64.

Shape legend: B batch, H heads, Hkv key-value heads, LQ / LK lengths, D width of a query or key, DV value width.
"""

from __future__ import annotations

import math

import pytest
import torch

import saccade
from looped import looped
from saccade import ALiBi, Causal, Dropout, Padding, Window
from saccade.nn import AttentionConfig, BlockConfig, Decoder, MultiHeadAttention
from saccade.positions import RotaryConfig
from saccade.variants import DifferentialConfig, HeadSizes, differential_attention, initial_lambda

B, H, LQ, LK, D, DV = 2, 6, 7, 11, 5, 13
INITIAL = 0.37


def inputs(kv_heads=H, dtype=torch.float64):
    """query, key, value, the four vectors, and the norm's weight."""
    sizes = [(B, 2 * H, LQ, D), (B, 2 * kv_heads, LK, D), (B, kv_heads, LK, DV), *[(D,)] * 4, (DV,)]
    return [(0.7 * torch.randn(*size, dtype=torch.float64)).to(dtype).requires_grad_() for size in sizes]


def ours(query, key, value, *rest, mask=None, **options):
    *vectors, weight = rest
    return differential_attention(query, key, value, mask, vectors=vectors, weight=weight, initial=INITIAL, **options)


def formula(query, key, value, lq1, lk1, lq2, lk2, weight, mask=None, **options):
    """(1 - l0) RMSNorm(A1 v - l A2 v), head by head."""
    taken = torch.exp(sum(lq1 * lk1)) - torch.exp(sum(lq2 * lk2)) + INITIAL
    group, heads = H // value.shape[1], []
    for h in range(H):
        g = h // group
        maps = [
            saccade.attention(
                query[:, 2 * h + m : 2 * h + m + 1],
                key[:, 2 * g + m : 2 * g + m + 1],
                value[:, g : g + 1],
                mask,
                backend="reference",
                **options,
            )
            for m in range(2)
        ]
        difference = maps[0] - taken * maps[1]
        heads.append(difference / torch.sqrt(difference.square().mean(-1, keepdim=True) + 1e-5) * weight)
    return (1 - INITIAL) * torch.cat(heads, 1)


@looped("kv_heads", [H, 2, 1])
@looped("mask", [None, Causal(), Causal() & Padding([11, 4], queries=[7, 2]), Window(2, 3)])
@looped("options", [{}, dict(scale=0.3, softcap=1.7)])
def test_the_formula_and_all_its_gradients(kv_heads, mask, options):
    given = inputs(kv_heads)
    out, expected = (f(*given, mask=mask, **options) for f in (ours, formula))
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    cotangent = torch.randn_like(out)
    grads = torch.autograd.grad(out, given, cotangent)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, given, cotangent), rtol=1e-9, atol=1e-11)
    assert all(grad.abs().max() > 0 for grad in grads)


def test_a_bias_is_of_the_heads_of_the_output():
    given, slopes = inputs(), torch.rand(H, dtype=torch.float64)
    out = ours(*given, bias=ALiBi(slopes))
    distance = (torch.arange(LK) - torch.arange(LQ)[:, None] - (LK - LQ)).abs()
    dense = -slopes[:, None, None] * distance
    alone = [formula(*given, bias=dense[None, h : h + 1])[:, h] for h in range(H)]
    torch.testing.assert_close(out, torch.stack(alone, 1))


def test_each_map_drops_its_own_weights():
    given = inputs()
    torch.manual_seed(3)
    one, other = (
        saccade.attention(given[0][:, m::2], given[1][:, m::2], given[2], dropout=0.5) for m in range(2)
    )  # the first map draws first
    torch.manual_seed(3)
    out = ours(*given, dropout=0.5)
    assert not torch.allclose(out, ours(*given))
    taken = torch.exp(given[3] @ given[4]) - torch.exp(given[5] @ given[6]) + INITIAL
    expected = torch.nn.functional.rms_norm(one - taken * other, (DV,), given[7], 1e-5) * (1 - INITIAL)
    torch.testing.assert_close(out, expected)


def test_gradients_by_finite_differences():
    torch.manual_seed(1)
    sizes = [(1, 2, 3, 2), (1, 2, 4, 2), (1, 1, 4, 3), *[(2,)] * 4, (3,)]
    given = [torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in sizes]
    assert torch.autograd.gradcheck(lambda *x: ours(*x, mask=Causal()), given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(dtype):
    narrow = inputs(dtype=dtype)
    out, plain = ours(*narrow), formula(*narrow)
    exact = formula(*[x.detach().double() for x in narrow])
    assert out.dtype == dtype
    assert (out.double() - exact).abs().max() <= 2 * (plain.double() - exact).abs().max()


def test_initial_lambda():
    """Section 2.1 counts layers from 1: 0.8 - 0.6 exp(-0.3 (l - 1))."""
    assert [initial_lambda(depth) for depth in (0, 1, 7)] == pytest.approx(
        [0.2, 0.8 - 0.6 * math.exp(-0.3), 0.8 - 0.6 * math.exp(-2.1)]
    )


def test_each_layer_of_a_stack_begins_with_its_own_lambda():
    config = BlockConfig(AttentionConfig(16, 2, mechanism=DifferentialConfig()), hidden=8)
    found = [block.attention.mechanism.initial for block in Decoder(config, 3).blocks]
    assert found == [initial_lambda(depth) for depth in range(3)]


def test_parameters_as_the_paper_starts_them():
    torch.manual_seed(0)
    module = DifferentialConfig(2).build(HeadSizes(4096, 2, 2, 1024, 2048))
    assert [name for name, _ in module.named_parameters()] == [
        "lambda_q1",
        "lambda_k1",
        "lambda_q2",
        "lambda_k2",
        "weight",
    ]
    for vector in module.vectors:
        assert abs(vector.std() - 0.1) < 5 * 0.1 / (2 * 1024) ** 0.5  # five standard errors
        assert abs(vector.mean()) < 5 * 0.1 / 1024**0.5
    assert (module.weight == 1).all()
    assert "initial=0.471" in repr(module)


def test_a_module_is_the_function_between_projections():
    config = AttentionConfig(24, 3, 1, positions=RotaryConfig(), mechanism=DifferentialConfig(4))
    module = MultiHeadAttention(config).double()
    x, given = torch.randn(B, LQ, 24, dtype=torch.float64), []
    module.mechanism.register_forward_pre_hook(lambda _, inputs: given.extend(inputs))
    out = module(x, Causal())
    query, key, value, mask = given
    inner = module.mechanism
    expected = differential_attention(
        query, key, value, mask, vectors=inner.vectors, weight=inner.weight, initial=initial_lambda(4)
    )
    torch.testing.assert_close(out, module.output(expected.transpose(1, 2).flatten(2)))
    # As many weights as softmax attention of the same width has, and the vectors and the norm's weight.
    plain = MultiHeadAttention(AttentionConfig(24, 3, 1))
    count = sum(p.numel() for p in module.parameters()) - sum(p.numel() for p in plain.parameters())
    assert count == 4 * 4 + 8


REFUSED = {
    "odd query": ((3, 2, 1), "query has 3 heads (axis 1), expected pairs: two maps for each head"),
    "odd key": ((2, 3, 1), "key has 3 heads (axis 1), expected pairs: two maps for each head"),
    "values": ((4, 4, 4), "value has 4 heads (axis 1), expected half of key's 4: two maps read each"),
    "groups": (
        (6, 4, 2),
        "query has 3 heads (axis 1), expected a positive multiple of key's 2; the layout is (batch, heads,",
    ),
}


@looped("heads, words", REFUSED.values())
def test_heads_that_do_not_fit(heads, words):
    query, key, value = (torch.randn(1, count, 3, width) for count, width in zip(heads, (4, 4, 8), strict=True))
    vectors = [torch.zeros(4)] * 4
    with pytest.raises(ValueError) as refused:
        differential_attention(query, key, value, vectors=vectors, weight=torch.ones(8), initial=0.2)
    assert str(refused.value).startswith(words)


def test_what_does_not_fit_is_named():
    query, key, value = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), torch.randn(1, 1, 3, 8)
    good = dict(vectors=[torch.zeros(4)] * 4, weight=torch.ones(8), initial=0.2)
    with pytest.raises(ValueError, match=r"vectors: expected lq1, lk1, lq2, lk2, each \(4,\), got \[\(4,\), \(4,\)\]"):
        differential_attention(query, key, value, **{**good, "vectors": [torch.zeros(4)] * 2})
    with pytest.raises(ValueError, match=r"weight: expected \(8,\), one for each column of value, got \(7,\)"):
        differential_attention(query, key, value, **{**good, "weight": torch.ones(7)})
    with pytest.raises(TypeError, match="query must be a tensor"):
        differential_attention(None, key, value, **good)
    with pytest.raises(ValueError, match="depth: counts layers from 0, got -1"):
        DifferentialConfig(-1)
    with pytest.raises(TypeError, match="depth: expected an int, got 1.5"):
        DifferentialConfig(1.5)
    with pytest.raises(ValueError, match="heads: differential attention takes pairs of query heads.* got 3 and 2"):
        DifferentialConfig().build(HeadSizes(12, 3, 2, 4, 8))


@pytest.mark.parametrize("size", [1e4, 1e20, 1e30])
def test_large_values_are_normalised_like_any_others(size):
    """The norm takes their size away: what is left of eps is below rounding."""
    given = inputs(dtype=torch.float32)
    with torch.no_grad():
        given[2].mul_(size)
    out, exact = ours(*given), formula(*[x.detach().double() for x in given])
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), given))


def test_values_without_columns():
    query, key, value = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), torch.randn(1, 1, 3, 0)
    out = differential_attention(query, key, value, vectors=[torch.zeros(4)] * 4, weight=torch.ones(0), initial=0.2)
    assert out.shape == (1, 1, 3, 0)


def test_a_fixed_seed_drops_other_weights_in_each_map(monkeypatch):
    drawn = []

    def listen(*args, **options):
        drawn.append(saccade.attention(*args, **options))
        return drawn[-1]

    monkeypatch.setattr("saccade.variants.differential.attention", listen)
    query = key = torch.zeros(1, 2, 31, 4)
    value = torch.eye(31)[None, None]
    vectors = [torch.zeros(4)] * 4
    for _ in range(2):
        differential_attention(
            query, key, value, vectors=vectors, weight=torch.ones(31), initial=0.2, dropout=Dropout(0.5, 3)
        )
    first, second, again, _ = (one[0, 0] > 0 for one in drawn)
    assert torch.equal(first, again)
    # 961 weights, each dropped by both maps or by none with probability 1/2: 5 standard errors.
    assert abs((first == second).double().mean() - 0.5) < 5 * 0.5 / 31

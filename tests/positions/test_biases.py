"""ALiBi and T5's positions as modules: through the operator, against the papers' formulas written densely."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import oracle
import problems
import saccade
from looped import looped
from problems import assert_close
from saccade.positions import AlibiBias, T5Bias
from slowly import alternate

HEADS = [1, 2, 6, 8, 12]


@pytest.fixture(params=("reference", "chunked"))
def exact(request):
    return request.param


def alibi(slopes, rows, keys):
    """Press et al. 2022: -slope_h |i - j|, the last query at the last key. (1, H, rows, keys), float64."""
    dense = torch.empty(1, len(slopes), rows, keys, dtype=torch.float64)
    for h, slope in enumerate(slopes):
        for i in range(rows):
            for j in range(keys):
                dense[0, h, i, j] = -float(slope) * abs(i + keys - rows - j)
    return dense


def test_the_papers_slopes():
    # Section 3: for 8 heads the geometric sequence 1/2, 1/4, ..., 1/256; for 16 heads 2^-0.5, 2^-1, ..., 2^-8.
    assert AlibiBias(8).slopes.tolist() == [2.0**-n for n in range(1, 9)]
    sixteen = torch.tensor([2 ** (-n / 2) for n in range(1, 17)])
    torch.testing.assert_close(AlibiBias(16).slopes, sixteen)
    # Between powers of two, the authors' code: those of 8 heads, then every second one of 16.
    torch.testing.assert_close(AlibiBias(11).slopes, torch.cat((AlibiBias(8).slopes, sixteen[0:6:2])))


@looped("learned", [False, True])
@looped("mask", [None, saccade.Causal()])
def test_alibi_through_the_operator(learned, mask, exact):
    named = problems.tensors()
    module = AlibiBias(6, learned=learned)
    out, lse = saccade.attention_with_lse(*named.values(), mask, bias=module(), backend=exact)
    see = None if mask is None else oracle.causal(11, 13)
    want = oracle.attend(*named.values(), see, bias=alibi(module.slopes.tolist(), 11, 13))
    assert_close(out, want.out)
    assert_close(lse, want.lse)


def test_gradients_reach_learned_slopes(exact):
    named = problems.tensors()
    module = AlibiBias(6, learned=True).double()
    out = saccade.attention(*named.values(), saccade.Causal(), bias=module(), backend=exact)
    cotangent = torch.randn_like(out)
    out.backward(cotangent)
    slopes = module.slopes.detach().clone().requires_grad_()
    distance = alibi([1.0] * 6, 11, 13)
    dense = oracle.attend(*named.values(), oracle.causal(11, 13), bias=slopes[:, None, None] * distance)
    want = torch.autograd.grad(dense.out, slopes, cotangent)[0]
    assert_close(module.slopes.grad, want, terms=11 * 13 * 13)


@looped("heads", HEADS)
def test_fixed_slopes_are_not_saved_and_learned_ones_are(heads):
    fixed, learned = AlibiBias(heads), AlibiBias(heads, learned=True)
    assert not fixed.state_dict() and not list(fixed.parameters())
    assert list(learned.state_dict()) == ["slopes"] and learned.slopes.requires_grad
    assert torch.equal(fixed.slopes, learned.slopes)
    with torch.no_grad():
        learned.slopes.mul_(2)
    again = AlibiBias(heads, learned=True)
    again.load_state_dict(learned.state_dict())
    assert torch.equal(again().parameter, 2 * fixed.slopes)
    again.reset_parameters()
    assert torch.equal(again.slopes, fixed.slopes)


@looped("change", [lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.double(), copy.deepcopy])
def test_fixed_slopes_stay_exact(change):
    assert torch.equal(change(AlibiBias(12)).slopes, AlibiBias(12).slopes)
    assert torch.equal(change(torch.nn.Sequential(AlibiBias(12)))[0].slopes, AlibiBias(12).slopes)


def test_fixed_slopes_are_there_after_a_start_on_the_meta_device():
    with torch.device("meta"):
        module = AlibiBias(12)
    assert module.slopes.device.type == "meta"
    assert torch.equal(module.to_empty(device="cpu").slopes, AlibiBias(12).slopes)


def test_learned_slopes_are_cast_like_any_parameter():
    assert AlibiBias(6, learned=True).bfloat16().slopes.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("bidirectional", "sizes", "seen"), alternate([True, False], [(32, 128), (8, 20), (6, 50)], [0, 5])
)
def test_t5_is_compute_bias_of_transformers(bidirectional, sizes, seen, exact):
    buckets, max_distance = sizes
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = t5.T5Config(
        d_model=6 * 5,
        d_kv=5,
        num_heads=6,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=max_distance,
        is_decoder=not bidirectional,
    )
    theirs = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0).double()
    module = T5Bias(6, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional).double()
    theirs.relative_attention_bias.load_state_dict({"weight": module.table.detach()})
    # The rows of a text of 67 tokens that follow `seen` of them in a cache.
    rows, keys = 67 - seen, 67
    dense = theirs.compute_bias(rows, keys, past_seen_tokens=seen)
    named = problems.tensors(batch=1, rows=rows, keys=keys)
    mask = saccade.Window(None, None).at(seen)
    out = saccade.attention(*named.values(), mask, bias=module(), backend=exact)
    want = oracle.attend(*named.values(), bias=dense)
    assert_close(out, want.out, terms=67)
    cotangent = torch.randn_like(out)
    out.backward(cotangent)
    gradient = torch.autograd.grad(want.out, theirs.relative_attention_bias.weight, cotangent)[0]
    assert_close(module.table.grad, gradient, terms=rows * keys)


def test_the_table_starts_as_in_t5x():
    table = T5Bias(101, buckets=1024, max_distance=4096).table.detach().double()
    variance, count = 2 / (1024 + 101), table.numel()
    assert table.abs().max() <= (3 * variance) ** 0.5
    # Four standard errors for uniform numbers, whose squares have a variance of 4/5 of their squared mean.
    assert abs(table.mean()) < 4 * (variance / count) ** 0.5
    assert abs(table.square().mean() / variance - 1) < 4 * (0.8 / count) ** 0.5


def test_the_table_is_saved_and_drawn_by_the_seed():
    torch.manual_seed(3)
    one = T5Bias(6)
    torch.manual_seed(3)
    other = T5Bias(6)
    assert list(one.state_dict()) == ["table"] and one.table.shape == (32, 6)
    assert torch.equal(one.table, other.table)
    other.reset_parameters()
    assert not torch.equal(one.table, other.table)
    assert torch.equal(pickle.loads(pickle.dumps(one)).table, one.table)


def test_they_say_what_they_are():
    assert repr(AlibiBias(6)) == "AlibiBias(6, learned=False)"
    assert repr(T5Bias(6, max_distance=64)) == "T5Bias(6, buckets=32, max_distance=64, bidirectional=True)"


@looped(
    ("call", "error", "message"),
    [
        (lambda: AlibiBias(0), ValueError, "heads must be at least 1, got 0"),
        (lambda: AlibiBias(6.0), TypeError, "heads must be an int, got 6.0"),
        (lambda: AlibiBias(6, learned=1), TypeError, "learned: must be True or False, got 1"),
        (lambda: T5Bias(0), ValueError, "heads must be at least 1, got 0"),
        (lambda: T5Bias(6, buckets=2), ValueError, "buckets, got 2"),
        (lambda: T5Bias(6, buckets=7), ValueError, "an even number of at least 4 buckets, got 7"),
        (lambda: T5Bias(6, buckets=1, bidirectional=False), ValueError, "at least 2 buckets, got 1"),
        (lambda: T5Bias(6, buckets=-4), ValueError, "buckets must be at least 0, got -4"),
        (lambda: T5Bias(6, buckets=32.0), TypeError, "buckets must be an int, got 32.0"),
        (lambda: T5Bias(6, max_distance=8), ValueError, "max_distance must exceed 8, got 8"),
        (lambda: T5Bias(6, max_distance=128.0), TypeError, "max_distance must be an int, got 128.0"),
        (lambda: T5Bias(6, bidirectional="no"), TypeError, "bidirectional: must be True or False, got 'no'"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("module", [AlibiBias(5), T5Bias(5)])
def test_other_numbers_of_heads_are_refused_by_the_call(module):
    with pytest.raises(ValueError, match=r"bias: .* 5 .*, expected one per query head \(6\)"):
        saccade.attention(*problems.tensors().values(), bias=module())

"""What the operator makes of masks and biases: polarity, shapes, positions, slopes, buckets."""

from __future__ import annotations

import math

import pytest
import torch

import oracle
import problems
import saccade
from looped import looped
from problems import assert_close


def test_true_means_attend(backend):
    named = problems.tensors(rows=13)
    out = saccade.attention(*named.values(), torch.eye(13, dtype=torch.bool), backend=backend)
    assert_close(out, named["value"].repeat_interleave(2, 1))


@looped("shape", [(11, 13), (1, 1, 11, 13), (2, 1, 1, 13), (1, 6, 11, 1), (2, 6, 11, 13), (2, 1, 11, 13)])
def test_boolean_shapes(shape, backend):
    named = problems.tensors()
    bits = torch.rand(shape) < 0.6
    out = saccade.attention(*named.values(), bits, backend=backend)
    assert_close(out, oracle.attend(*named.values(), bits.numpy()).out)


@looped("shape", [(13,), (2, 11, 13), (6, 11, 13), (1, 2, 6, 11, 13), ()])
def test_other_ranks_are_refused(shape, backend):
    with pytest.raises(ValueError, match=r"(?s)mask.*\(Lq, Lk\)") as error:
        saccade.attention(*problems.tensors().values(), torch.ones(shape, dtype=torch.bool), backend=backend)
    assert str(tuple(shape)) in str(error.value)


@looped("shape", [(13, 11), (11, 12), (3, 1, 11, 13), (2, 3, 11, 13), (2, 5, 1, 1)])
def test_shapes_that_do_not_fit_are_refused(shape, backend):
    with pytest.raises(ValueError, match="mask") as error:
        saccade.attention(*problems.tensors().values(), torch.ones(shape, dtype=torch.bool), backend=backend)
    assert any(str(n) in str(error.value) for n in (11, 13, 2, 6)), error.value


@looped("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_float_mask_is_a_type_error_that_says_bias(dtype, backend):
    with pytest.raises(TypeError, match="bias="):
        saccade.attention(*problems.tensors().values(), torch.zeros(11, 13, dtype=dtype), backend=backend)


@looped("dtype", [torch.int64, torch.uint8])
def test_an_integer_mask_is_a_type_error(dtype, backend):
    with pytest.raises(TypeError, match="(?i)mask.*bool"):
        saccade.attention(*problems.tensors().values(), torch.ones(11, 13, dtype=dtype), backend=backend)


@looped(("rows", "keys"), [(1, 13), (11, 13), (13, 13), (17, 13)])
def test_causal_is_bottom_right(rows, keys, backend):
    named = problems.tensors(rows=rows, keys=keys)
    out, lse = saccade.attention_with_lse(*named.values(), saccade.Causal(), backend=backend)
    lower_right = torch.ones(rows, keys).tril(keys - rows).bool()
    want = oracle.attend(*named.values(), lower_right.numpy())
    assert_close(out, want.out)
    assert_close(lse, want.lse)


@looped("offset", [0, 2, -3, 5, -11, 29])
def test_at_places_the_queries(offset, backend):
    named = problems.tensors()
    out = saccade.attention(*named.values(), saccade.Causal().at(offset), backend=backend)
    assert_close(out, oracle.attend(*named.values(), oracle.causal(11, 13, offset)).out)


@looped("as_", [list, tuple, torch.tensor])
def test_at_places_each_item(as_, backend):
    named = problems.tensors(batch=3)
    mask = (saccade.Causal() & saccade.Window(4, None)).at(as_([-2, 0, 7]))
    see = oracle.causal(11, 13, [-2, 0, 7]) & oracle.window(11, 13, 4, None, [-2, 0, 7])
    assert_close(saccade.attention(*named.values(), mask, backend=backend), oracle.attend(*named.values(), see).out)


def test_at_must_fit_the_batch(backend):
    with pytest.raises(ValueError, match=r"(?s)(batch|B).*(2|3)"):
        saccade.attention(*problems.tensors().values(), saccade.Causal().at([0, 1, 2]), backend=backend)


@looped(("left", "right"), [(0, 0), (3, 0), (0, 2), (2, 3), (None, 1), (1, None), (None, None)])
def test_window_includes_both_ends(left, right, backend):
    named = problems.tensors()
    out = saccade.attention(*named.values(), saccade.Window(left, right), backend=backend)
    assert_close(out, oracle.attend(*named.values(), oracle.window(11, 13, left, right)).out)


def test_padding_by_lengths_and_by_booleans_is_the_same(exact):
    named = problems.tensors()
    present = torch.arange(13) < torch.tensor([[7], [13]])
    by_length = saccade.attention(*named.values(), saccade.Padding(torch.tensor([7, 13])), backend=exact)
    assert torch.equal(by_length, saccade.attention(*named.values(), saccade.Padding(present), backend=exact))


def test_decoding_one_token_at_a_time_is_the_whole(backend):
    named = problems.tensors(rows=13)
    whole = saccade.attention(*named.values(), saccade.Causal(), backend=backend)
    for n in range(1, 14):
        cached = [named["key"][:, :, :n], named["value"][:, :, :n]]
        step = saccade.attention(named["query"][:, :, n - 1 : n], *cached, saccade.Causal(), backend=backend)
        assert_close(step, whole[:, :, n - 1 : n])


BIAS_SHAPES = [
    (11, 13),
    (1, 1, 11, 13),
    (2, 1, 11, 13),
    (1, 6, 11, 13),
    (2, 6, 11, 13),
    (2, 1, 1, 13),
    (1, 6, 11, 1),
    (2, 6, 1, 1),
]


@looped("shape", BIAS_SHAPES)
@looped("masked", [False, True])
def test_bias_shapes_and_their_gradients(shape, masked, backend):
    named = problems.tensors() | {"bias": torch.randn(shape, dtype=problems.DTYPE)}
    problem = problems.Problem(named)
    if masked:
        problem.see, problem.mask = oracle.causal(11, 13), saccade.Causal()
    ours, theirs = problems.leaves(named), problems.leaves(named)
    out, want = problem.out(ours, backend), problem.truth(theirs).out
    assert_close(out, want)
    cotangent = torch.randn(out.shape, dtype=out.dtype)
    got = torch.autograd.grad(out, [ours["bias"]], cotangent)[0]
    assert_close(got, torch.autograd.grad(want, [theirs["bias"]], cotangent)[0], terms=256)


@looped("shape", [(13,), (6, 11, 13), (2, 11, 13), (1, 2, 6, 11, 13)])
def test_bias_of_another_rank_is_refused(shape, backend):
    with pytest.raises(ValueError, match="bias") as error:
        saccade.attention(*problems.tensors().values(), bias=torch.zeros(shape, dtype=problems.DTYPE), backend=backend)
    assert str(tuple(shape)) in str(error.value)


def test_hidden_pairs_of_a_bias_get_no_gradient_and_no_say(exact):
    problem = problems.CASES["bias_matrix"]()
    problem.see, problem.mask = oracle.causal(11, 13), saccade.Causal()
    clean = problem.out(backend=exact)
    hidden = torch.from_numpy(~problem.see[0, 0])
    problem.tensors["bias"][hidden] = math.nan
    ours = problems.leaves(problem.tensors)
    out = problem.out(ours, exact)
    assert_close(out, clean)
    gradient = torch.autograd.grad(out.sum(), [ours["bias"]])[0]
    assert (gradient[hidden] == 0).all() and gradient.isfinite().all()


@looped("offset", [None, 0, 4])
def test_alibi_by_its_formula(offset, backend):
    named = problems.tensors()
    slopes = torch.tensor([2.0**-n for n in range(1, 7)], dtype=problems.DTYPE)
    mask = saccade.Causal() if offset is None else saccade.Causal().at(offset)
    out = saccade.attention(*named.values(), mask, bias=saccade.ALiBi(slopes), backend=backend)
    dense = oracle.alibi(slopes, 11, 13, offset)
    assert_close(out, oracle.attend(*named.values(), oracle.causal(11, 13, offset), bias=dense).out)


def test_alibi_follows_positions_per_item(exact):
    named, offsets = problems.tensors(), [-2, 5]
    slopes = torch.rand(6, dtype=problems.DTYPE)
    mask = saccade.Causal().at(offsets)
    out = saccade.attention(*named.values(), mask, bias=saccade.ALiBi(slopes), backend=exact)
    dense = torch.cat([oracle.alibi(slopes, 11, 13, n) for n in offsets])
    assert_close(out, oracle.attend(*named.values(), oracle.causal(11, 13, offsets), bias=dense).out)


@looped("bidirectional", [True, False])
@looped(("buckets", "max_distance"), [(32, 128), (8, 20), (32, 64), (6, 50)])
def test_relative_bias_buckets_are_those_of_t5(bidirectional, buckets, max_distance, real_tiles):
    # q = 0, so the logits are the bias alone, at every distance from -198 to 198.
    named = problems.tensors(batch=1, heads=2, kv_heads=1, rows=199, keys=199, width=2, value_width=1)
    named["query"] = torch.zeros_like(named["query"])
    table = torch.randn(buckets, 2, dtype=problems.DTYPE)
    bias = saccade.RelativeBias(table, bidirectional=bidirectional, max_distance=max_distance)
    out = saccade.attention(*named.values(), bias=bias, backend=real_tiles)
    dense = oracle.relative_bias(table, 199, 199, bidirectional, max_distance)
    weights = torch.softmax(dense, -1)
    assert_close(out, weights @ named["value"].double().expand(1, 2, 199, 1), terms=199)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (32, 64), (6, 50)])
def test_the_oracle_agrees_with_transformers(bidirectional, buckets, max_distance):
    T5Attention = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    distances = torch.arange(-300, 301)
    theirs = T5Attention._relative_position_bucket(distances, bidirectional, buckets, max_distance).tolist()
    ours = [oracle.t5_bucket(d, buckets, bidirectional, max_distance) for d in distances.tolist()]
    assert ours == theirs


def test_relative_bias_against_transformers_by_lse(exact):
    T5Attention = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    named = problems.tensors(batch=1, heads=2, kv_heads=1, rows=149, keys=167)
    table = torch.randn(32, 2, dtype=problems.DTYPE)
    # T5's position of query i is i: top-left
    distances = torch.arange(167)[None, :] - torch.arange(149)[:, None]
    dense = table[T5Attention._relative_position_bucket(distances, True, 32, 128)].permute(2, 0, 1)[None]
    mask = saccade.Window(None, None).at(0)
    got = saccade.attention_with_lse(*named.values(), mask, bias=saccade.RelativeBias(table), backend=exact)
    want = oracle.attend(*named.values(), bias=dense)
    assert_close(got[0], want.out, terms=167)
    assert_close(got[1], want.lse, terms=167)


@looped("bias", ["alibi", "relative_both_ways"])
def test_bias_values_take_other_lengths(bias, exact):
    # the same value serves any length: decoding with one query against 13 keys
    problem = problems.CASES[bias]()
    whole = problem.truth().out[:, :, -1:]
    problem.tensors["query"] = problem.tensors["query"][:, :, -1:]
    assert_close(problem.out(backend=exact), whole)


def test_masks_and_biases_are_safe_from_later_edits():
    named = problems.tensors()
    bits, lengths = torch.rand(11, 13) < 0.6, torch.tensor([7, 13])
    from_bits, padding = saccade.FromTensor(bits), saccade.Padding(lengths)
    want = [saccade.attention(*named.values(), mask, backend="reference") for mask in (from_bits, padding)]
    bits.logical_not_()
    lengths.fill_(1)
    got = [saccade.attention(*named.values(), mask, backend="reference") for mask in (from_bits, padding)]
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))

"""Sigmoid attention against its formula over sets, and the promises of the tiles it is computed in.

B batch, Hq/Hkv query/kv heads, Lq/Lk lengths, D key width, Dv value width.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import oracle
import problems
import saccade
from looped import looped
from problems import CASES, NATIVE, assert_close
from recording import Largest, saved
from saccade.nn import AttentionConfig, BlockConfig, Decoder, GrowingLayer, KVCache
from saccade.operator import _tiles
from saccade.operator._dropout import Dropout
from saccade.positions import AlibiConfig, RotaryConfig
from saccade.variants import HeadSizes, SigmoidConfig, sigmoid_attention

# Softcap and sink are of softmax's logits and denominator: sigmoid attention has neither.
NAMES = [name for name in CASES if "sink" not in name and name not in ("softcap", "everything")]
every_case = looped("name", NAMES)


@pytest.fixture(params=["tiles", NATIVE])
def way(request, monkeypatch):
    """Tiles have float64, and the native kernels float32; tolerances follow the dtype."""
    if request.param == "native":
        monkeypatch.setattr(problems, "DTYPE", torch.float32)


both_ways = pytest.mark.usefixtures("way")


def by_sets(query, key, value, see=None, *, bias=None, scale=None, length=None, factor=None):
    """The formula, one set of keys at a time: what a query may not see is never read. `length`: a fixed n."""
    query, key, value = query.double(), key.double(), value.double()
    (batch, heads, rows, width), (_, kv_heads, keys, _) = query.shape, key.shape
    full = (batch, heads, rows, keys)
    see = np.broadcast_to(np.asarray(True if see is None else see), full)
    bias = torch.zeros(full, dtype=torch.float64) if bias is None else bias.double().expand(full)
    see = see & (bias.detach().numpy() != -math.inf)
    scale = width**-0.5 if scale is None else scale
    flat, order, out = batch * heads * rows, [], []
    queries, biases = query.reshape(flat, width), bias.reshape(flat, keys)
    for own, js in oracle.sets(see.reshape(flat, keys)):
        theirs = own // (heads * rows), own // rows % heads // (heads // kv_heads)
        n = len(js) if length is None else length
        logits = scale * (queries[own][:, None] * key[theirs][:, js]).sum(-1) + biases[own][:, js]
        weights = 1 / (1 + n * torch.exp(-logits))
        if factor is not None:
            weights = weights * factor.expand(full).reshape(flat, keys)[own][:, js]
        order.append(own)
        out.append((weights[:, :, None] * value[theirs][:, js]).sum(1))
    return torch.cat(out)[torch.cat(order).argsort()].reshape(batch, heads, rows, -1)


def ours(problem, tensors, **more):
    q, k, v = (tensors[name] for name in ("query", "key", "value"))
    return sigmoid_attention(q, k, v, problem.mask, bias=problem.to_bias(tensors), **problem.options, **more)


def truth(problem, tensors, **more):
    q, k, v = (tensors[name] for name in ("query", "key", "value"))
    dense = problem.to_dense(tensors)
    return by_sets(q, k, v, problem.see, bias=dense, **problem.options, **more)


# --- the formula ------------------------------------------------------------------------------------------------------


@both_ways
@every_case
@looped("length", [None, 29])
def test_the_formula_and_its_gradients(name, length):
    problem = CASES[name]()
    mine, theirs = problems.leaves(problem.tensors), problems.leaves(problem.tensors)
    out, want = ours(problem, mine, length=length), truth(problem, theirs, length=length)
    assert_close(out, want)
    cotangent = problems._normal(*out.shape, seed=5)
    # A bias's gradient is a sum over up to 2 x 17 x 13 pairs.
    for got, expected in zip(
        problems.pull([out], mine, [cotangent]), problems.pull([want], theirs, [cotangent]), strict=True
    ):
        assert_close(got, expected, terms=512)


@both_ways
@pytest.mark.parametrize(("rows", "keys"), [(307, 523), (1, 601), (523, 307)])
def test_many_tiles(rows, keys):
    """As above, all queries at once: Lq x Lk weights, masked."""
    t = problems.tensors(1, 2, 1, rows, keys, 3, 2) | {"slopes": problems._normal(2).abs() / 50}
    see = torch.from_numpy(np.arange(keys) <= np.arange(rows)[:, None] + keys - rows)
    mine, theirs = problems.leaves(t), problems.leaves(t)
    out = sigmoid_attention(*list(mine.values())[:3], saccade.Causal(), bias=saccade.ALiBi(mine["slopes"]))
    distance = torch.from_numpy(np.abs(np.arange(keys) - np.arange(rows)[:, None] - keys + rows))
    query, key, value, slopes = (tensor.double() for tensor in theirs.values())
    logits = 3**-0.5 * query @ key.mT - slopes[:, None, None] * distance
    n = see.sum(-1, keepdim=True).clamp(min=1).double()
    want = (1 / (1 + n * torch.exp(-logits)) * see) @ value
    assert_close(out, want, terms=keys)
    cotangent = problems._normal(*out.shape, seed=5)
    for got, expected in zip(
        problems.pull([out], mine, [cotangent]), problems.pull([want], theirs, [cotangent]), strict=True
    ):
        assert_close(got, expected, terms=rows * keys)


def test_gradients_by_finite_differences():
    t = problems.leaves(problems.tensors(1, 2, 1, 3, 5, 2, 3) | {"bias": problems._normal(1, 2, 3, 5)})
    mask = saccade.Causal()
    assert torch.autograd.gradcheck(lambda q, k, v, b: sigmoid_attention(q, k, v, mask, bias=b), tuple(t.values()))


def test_weights_of_small_logits_sum_to_one():
    """What -log n is for: sum_j sigmoid(-log n) = n / (1 + n)."""
    query, key = torch.zeros(1, 1, 1, 3), torch.randn(1, 1, 999, 3)
    out = sigmoid_attention(query, key, torch.ones(1, 1, 999, 1))
    torch.testing.assert_close(out.item(), 999 / 1000, rtol=1e-5, atol=0.0)


@both_ways
def test_dropout_multiplies_the_weights_it_would_multiply_in_softmax_attention():
    problem = CASES["wide_causal"]()
    dropout = Dropout(0.3, 11)
    b, h, i, j = (torch.arange(n) for n in problem.shape)
    factor = dropout.factor(b, h, i, j, torch.float64)
    mine, theirs = problems.leaves(problem.tensors), problems.leaves(problem.tensors)
    out, want = ours(problem, mine, dropout=dropout), truth(problem, theirs, factor=factor)
    assert_close(out, want)
    assert not torch.equal(out, ours(problem, mine))
    cotangent = torch.ones_like(out)
    for got, expected in zip(
        problems.pull([out], mine, [cotangent]), problems.pull([want], theirs, [cotangent]), strict=True
    ):
        assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_float32_at_least(dtype):
    """1500 weights of 0.5: a sum in bfloat16 stands still at 256 of them."""
    keys = 1500
    query, key = torch.zeros(1, 1, 2, 3, dtype=dtype), torch.ones(1, 1, keys, 3, dtype=dtype)
    out = sigmoid_attention(query, key, torch.ones(1, 1, keys, 1, dtype=dtype), length=1)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), torch.full_like(out, keys / 2).double(), rtol=0.004, atol=0.0)
    tensors = problems.tensors(dtype=dtype)
    out, want = sigmoid_attention(*tensors.values()), by_sets(*tensors.values())
    # float32 sums; each weight may be rounded to the dtype, and the output is
    size = by_sets(tensors["query"], tensors["key"], tensors["value"].abs())
    assert ((out.double() - want).abs() <= torch.finfo(dtype).eps / 2 * (size + want.abs()) + 1e-5).all()


def test_double_precision_survives_autocast():
    tensors = problems.tensors()
    with torch.autocast("cpu", torch.bfloat16):
        out = sigmoid_attention(*tensors.values())
    assert out.dtype == torch.float64
    assert_close(out, by_sets(*tensors.values()))


def test_autocast_casts_float32():
    tensors = problems.tensors(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = sigmoid_attention(*tensors.values())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, sigmoid_attention(*(x.bfloat16() for x in tensors.values())))


# --- what n is --------------------------------------------------------------------------------------------------------


@both_ways
def test_a_padded_item_gives_what_it_gives_alone():
    t = problems.tensors(rows=13)
    out = sigmoid_attention(*t.values(), saccade.Padding([7, 13], queries=[7, 13]))
    alone = sigmoid_attention(*(x[:1, :, :7] for x in t.values()))
    assert_close(out[:1, :, :7], alone)
    assert (out[0, :, 7:] == 0).all()


@pytest.mark.parametrize("positions", [AlibiConfig(), RotaryConfig(), None], ids=["alibi", "rotary", "none"])
def test_cached_decoding_equals_training(positions):
    attention = AttentionConfig(12, 3, positions=positions, mechanism=SigmoidConfig())
    model = Decoder(BlockConfig(attention, hidden=16), 2).double().eval()
    x = torch.randn(2, 11, 12, dtype=torch.float64)
    whole, cache = model(x), KVCache([GrowingLayer() for _ in range(2)])
    parts = [model(x[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, 9), (9, 11))]
    assert_close(torch.cat(parts, 1), whole, terms=512)


@both_ways
def test_keys_hidden_by_the_bias_do_not_count():
    t = problems.tensors(heads=3, rows=3, keys=13)
    bias = torch.zeros(3, 13, dtype=problems.DTYPE)
    bias[:, 7:] = -math.inf
    out = sigmoid_attention(*t.values(), bias=bias)
    assert_close(out, sigmoid_attention(t["query"], t["key"][:, :, :7], t["value"][:, :, :7]))


@both_ways
@looped("shape", [(1, 1), (11, 1), (1, 13), (2, 1, 11, 1), (1, 6, 1, 1)])
def test_a_broadcast_bias_is_the_whole_one(shape):
    t = problems.tensors()
    t["value"][0, 0, 2] = math.nan
    bias = torch.zeros(shape, dtype=problems.DTYPE)
    if bias.numel() > 1:
        bias[(0,) * len(shape)] = -math.inf
    out = sigmoid_attention(*t.values(), bias=bias)
    whole = sigmoid_attention(*t.values(), bias=bias.expand(2, 6, 11, 13).contiguous())
    assert whole.isnan().any()
    torch.testing.assert_close(out, whole, equal_nan=True)


# --- what may not be seen, and extremes -------------------------------------------------------------------------------

POISON = pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=["nan", "+inf", "-inf"])


@both_ways
@POISON
@pytest.mark.parametrize(("place", "where"), [("key", 4), ("value", 4), ("query", 2)])
@pytest.mark.parametrize("name", ["square_causal", "boolean_matrix", "window", "bias_with_hidden_pairs", "cache"])
def test_poison_reaches_only_who_sees_it(name, place, where, bad):
    """Rows that see it are NaN. For the others, and in their gradients, the oracle says what is to come."""
    problem = CASES[name]()
    dirty = dict(problem.tensors)
    dirty[place] = dirty[place].clone()
    dirty[place][:, :, where] = bad
    seen = torch.tensor(problem.seen())
    hit = seen[..., where].clone()
    if place == "query":
        hit[:] = False
        hit[:, :, where] = seen[:, :, where].any(-1)
    assert hit.any() and not hit.all()
    # An infinite logit has a weight, 0 or 1, but it is not promised: the oracle is told of NaN in that place.
    spoiled = dirty[place].clone()
    spoiled[:, :, where] = math.nan
    mine, theirs = problems.leaves(dirty), problems.leaves(dirty | {place: spoiled})
    out, want = ours(problem, mine), truth(problem, theirs)
    assert_close(out[~hit], want[~hit])
    assert not torch.isfinite(out[hit]).any()
    got = torch.autograd.grad(out[~hit].sum(), list(mine.values()))
    expected = torch.autograd.grad(want[~hit].sum(), list(theirs.values()))
    assert all(torch.isfinite(other).any() for other in expected)
    for one, other in zip(got, expected, strict=True):
        right = torch.isfinite(other)
        assert_close(one[right], other[right], terms=512)


@both_ways
@POISON
def test_upstream_poison_of_padded_rows_reaches_nothing(bad):
    problem = CASES["queries_padded"]()
    leaves = problems.leaves(problem.tensors)
    out = ours(problem, leaves)
    upstream = torch.ones_like(out)
    want = torch.autograd.grad(out, list(leaves.values()), upstream, retain_graph=True)
    dirty = upstream.clone()
    dirty[0, :, 3:] = bad
    for one, other in zip(torch.autograd.grad(out, list(leaves.values()), dirty), want, strict=True):
        assert torch.isfinite(other).all()
        assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_norms_stay_finite(dtype):
    leaves = {n: x.detach().requires_grad_() for n, x in problems.tensors(dtype=dtype).items()}
    out = sigmoid_attention(leaves["query"] * 1e17, leaves["key"] * 1e17, leaves["value"], saccade.Causal())
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), list(leaves.values())))


@both_ways
@looped("sizes", [(0, 6, 3, 5, 7), (2, 6, 3, 0, 7), (2, 6, 3, 5, 0), (0, 6, 3, 0, 0)])
@looped("mask", [None, saccade.Causal()])
def test_empty_sizes(sizes, mask):
    batch, heads, kv_heads, rows, keys = sizes
    leaves = problems.leaves(problems.tensors(batch, heads, kv_heads, rows, keys))
    out = sigmoid_attention(*leaves.values(), mask)
    assert out.shape == (batch, heads, rows, 7)
    assert (out == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), list(leaves.values())))


# --- work, memory, bits -----------------------------------------------------------------------------------------------


def run(length, mask, **options):
    leaves = problems.leaves(problems.tensors(1, 1, 1, length, length, 4, 3, dtype=torch.float32))
    sigmoid_attention(*leaves.values(), mask, **options).sum().backward()


MASKS = {"none": None, "causal": saccade.Causal(), "window": saccade.Window(61, 0)}


@pytest.mark.parametrize("bias", [None, "alibi"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_no_tensor_of_lq_times_lk(mask, bias):
    """What is largest is a tile, whatever the length."""
    sizes = []
    for length in (512, 1024):
        with Largest() as largest:
            run(length, mask, bias=None if bias is None else saccade.ALiBi(torch.ones(1, requires_grad=True)))
        sizes.append(largest.numel)
    assert sizes[0] >= 256 * 256
    assert sizes[1] == sizes[0], sizes


def test_the_graph_keeps_the_inputs_and_one_number_a_row():
    t = problems.leaves(problems.tensors(1, 3, 3, 1021, 1021, 4, 4, dtype=torch.float32))
    with saved() as kept:
        sigmoid_attention(*t.values(), saccade.Causal())
    assert sum(kept.values()) == 3 * 3 * 1021 * 4 + 1021


def test_tiles_that_nobody_sees_are_not_computed():
    """Products of a window grow with the length, not with its square."""
    counted = []
    for length in (1024, 2048):
        with FlopCounterMode(display=False) as counter:
            run(length, saccade.Window(61, 0))
        counted.append(counter.get_total_flops())
    # Of n blocks of rows each sees its own keys and those of the block before.
    assert counted[0] > 0
    assert counted[1] * (2 * 4 - 1) == counted[0] * (2 * 8 - 1)


def test_batch_mates_change_no_bit():
    t = problems.tensors(3, 6, 3, 301, 277, 5, 7, dtype=torch.float32)
    alone = sigmoid_attention(*(x[1:2] for x in t.values()), saccade.Causal())
    assert torch.equal(sigmoid_attention(*t.values(), saccade.Causal())[1:2], alone)


def test_groups_of_batch_items_change_no_bit(monkeypatch):
    """Many items are computed in turns, and what they share is added up."""
    t = problems.tensors(5, 6, 3, 37, 41) | {"slopes": problems._normal(6).abs()}
    lengths = torch.tensor([41, 7, 0, 12, 33])
    mask = saccade.Causal() & saccade.Padding(lengths)

    def everything():
        leaves = problems.leaves(t)
        q, k, v, slopes = leaves.values()
        out = sigmoid_attention(q, k, v, mask, bias=saccade.ALiBi(slopes))
        return out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))

    whole = everything()
    monkeypatch.setattr(_tiles, "GROUP", 2 * 6 * 37 * 41)
    *parts, slopes = everything()
    assert all(torch.equal(a, b) for a, b in zip(parts, whole[:-1], strict=True))
    assert_close(slopes, whole[-1], terms=5 * 37 * 41)


# --- refusals ---------------------------------------------------------------------------------------------------------


@both_ways
def test_a_second_derivative_is_refused():
    leaves = problems.leaves(problems.tensors())
    (first,) = torch.autograd.grad(
        sigmoid_attention(*leaves.values()).square().sum(), leaves["query"], create_graph=True
    )
    with pytest.raises(RuntimeError, match="only first derivatives"):
        torch.autograd.grad(first.sum(), leaves["key"])


@pytest.mark.parametrize("make", [lambda n: SigmoidConfig(length=n), lambda n: call(length=n)], ids=["config", "call"])
def test_lengths_that_make_no_sense(make):
    with pytest.raises(ValueError, match=r"length must be at least 1, got 0"):
        make(0)
    with pytest.raises(TypeError, match=r"length must be an int, got 2\.5"):
        make(2.5)


def call(**options):
    return sigmoid_attention(*problems.tensors().values(), **options)


def test_arguments_are_checked_as_attention_checks_them():
    with pytest.raises(ValueError, match="scale must be finite, got nan"):
        call(scale=math.nan)
    with pytest.raises(ValueError, match="made for a batch of 3"):
        sigmoid_attention(*problems.tensors().values(), saccade.Padding([1, 2, 3]))
    with pytest.raises(TypeError, match="mask"):
        sigmoid_attention(*problems.tensors().values(), torch.zeros(11, 13))


def test_the_module_passes_its_options_on():
    problem = CASES["alibi"]()
    t = problem.tensors
    module = SigmoidConfig(length=29).build(HeadSizes(30, 6, 3, 5, 7))
    assert not list(module.parameters())
    got = module(t["query"], t["key"], t["value"], problem.mask, bias=saccade.ALiBi(t["slopes"]), scale=0.3)
    problem.options = {"scale": 0.3}
    assert_close(got, truth(problem, t, length=29))
    assert "length=29" in repr(module)

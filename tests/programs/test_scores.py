"""`Score` in every call: values and derivatives against dense attention in plain PyTorch, written with broadcasting.

Sizes are distinct primes. Some functions are recognised and have kernels, some are programs, and some cannot be traced.
"""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.attention.flex_attention import flex_attention

import saccade
from saccade.operator._backends import flex
from saccade.operator._checks import make_call
from slowly import diagonal, slow_but

B, HQ, HKV, LQ, LK, D, DV = 2, 6, 3, 11, 13, 7, 5
W = 2 * LK  # distances of a table: more than any pair has


def tables(dtype=torch.float64):
    torch.manual_seed(5)
    sizes = {
        "heads": (HQ,),
        "items": (B, LK),
        "distances": (HQ, 2 * W),
        "pairs": (W, W),
        "four": (B, W, HQ, W),
        "single": (),
    }
    return {name: torch.randn(size, dtype=dtype, requires_grad=True) for name, size in sizes.items()}


def positions():
    """b, h, q, k with the axes of scores; the last query stands at the last key."""
    sizes = (B, HQ, LQ, LK)
    b, h, q, k = (torch.arange(n).view([-1 if axis == at else 1 for axis in range(4)]) for at, n in enumerate(sizes))
    return b, h, q + LK - LQ, k


def without_gradients(x):
    with torch.no_grad():
        return x * 1.0


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
    "added causal": lambda s, b, h, q, k, t: s - t["heads"][h] + torch.where(k > q, -torch.inf, t["items"][b, k]),
    "every other head": lambda s, b, h, q, k, t: torch.where((h % 2 == 0) & (q - k > 1), -torch.inf, s),
    "squared": lambda s, b, h, q, k, t: s * s,
    "not of distances": lambda s, b, h, q, k, t: s + torch.sin((q + k) * 1.0) + t["pairs"][q, k],
    "table of pairs": lambda s, b, h, q, k, t: s + t["four"][b, q, h, k],
    "scaled by heads": lambda s, b, h, q, k, t: s * t["heads"][h].sigmoid() + t["items"][b, k] * t["single"],
    "exponent of a table": lambda s, b, h, q, k, t: s + torch.exp(t["heads"][h]),
    "rounded index": lambda s, b, h, q, k, t: s + t["heads"][(s * 0).to(torch.int64) + h],
    "without the score": lambda s, b, h, q, k, t: t["heads"][h] * (q - k) + 0.0 * s,
    "straight through": lambda s, b, h, q, k, t: (s.tanh() - s).detach() + s * t["heads"][h] + t["items"][b, k].data,
    "without gradients": lambda s, b, h, q, k, t: s * t["heads"][h] + without_gradients(s * t["items"][b, k]),
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
    "table of pairs": "recognised as a tensor of scores",
    "causal": "recognised as the mask Causal()",
    "inverse causal with a program": "recognised as the mask Window(0, None) and a program",
    "added causal": "recognised as the mask Causal() and a term (b, h, k)",
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


@pytest.mark.parametrize(
    "function, fix",
    [
        (lambda s, b, h, q, k: s if q > k else -s, "use torch.where, &, |, ~"),
        (lambda s, b, h, q, k: s + [1.0, 2.0][h], "make it a tensor"),
        (lambda s, b, h, q, k: s + torch.rand_like(s), "draw them before the call"),
    ],
)
def test_explain_raises_what_a_call_raises(function, fix):
    given, bias = tensors(torch.float32), saccade.Score(function)
    for call in (saccade.explain, saccade.attention):
        with pytest.raises(RuntimeError, match=re.escape(fix)):
            call(*given, bias=bias)


def test_functions_that_cannot_be_traced_say_so():
    held, given = tables(torch.float32), tensors(torch.float32)
    plan = saccade.explain(*given, bias=score("not traced", held))
    assert plan.backend == "chunked" and "cannot be traced: " in plan.score and "FunctionBias" in plan.refused["native"]


@pytest.mark.parametrize("name", slow_but(["relative", "scaled by heads", "rounded index", "not traced"], "relative"))
def test_second_derivatives_and_forward_mode(name):
    torch.manual_seed(3)
    heads, single, query, key, value = (
        torch.randn(size, dtype=torch.float64, requires_grad=True)
        for size in ((2,), (), (1, 2, 3, 2), (1, 1, 3, 2), (1, 1, 3, 1))
    )
    rest = {"items": torch.ones(1, 3).double(), "distances": torch.ones(2, 2 * W).double()}

    def call(query, key, value, heads, single):
        bias = score(name, {"heads": heads, "single": single, **rest})
        return saccade.attention_with_lse(query, key, value, saccade.Causal(), bias=bias, softcap=2.0)

    given = query, key, value, heads, single
    assert gradcheck(call, given, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(call, given, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("name", ["alibi", "scaled by heads"])
def test_vmap_over_a_captured_tensor_and_its_gradient(name):
    held, (query, key, value) = tables(), (x.detach() for x in tensors())

    def total(heads):
        return saccade.attention(query, key, value, bias=score(name, {**held, "heads": heads})).sin().sum()

    several = torch.randn(3, HQ, dtype=torch.float64)
    found = torch.func.vmap(torch.func.grad(total))(several)
    torch.testing.assert_close(found, torch.stack([torch.func.grad(total)(one) for one in several]))


HIDDEN = {
    "division by zero": lambda s, b, h, q, k, t: s + t["heads"][h] / (q - k),
    "infinite slope": lambda s, b, h, q, k, t: t["heads"][h].abs() * torch.sqrt((s * (q - k)).abs()),
    "NaN in a table": lambda s, b, h, q, k, t: s * t["broken"][h, k],
    "index out of range": lambda s, b, h, q, k, t: s * t["heads"][h] + t["short"][q - k - 1],
    "not traced": lambda s, b, h, q, k, t: torch.stack([s, s * 0 + t["short"][q - k - 1] / (q - k)]).sum(0),
}


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("name", HIDDEN)
def test_whatever_stands_at_hidden_pairs_reaches_nothing(name, backend):
    held, (query, key, value) = tables(), tensors()
    _, h, q, k = positions()
    hidden = (q - k <= 0) | (q - k > 3) | (k == 5)
    held["broken"] = torch.randn(HQ, LK, dtype=torch.float64)
    held["broken"][:, 5] = torch.nan
    held["broken"].requires_grad_()
    held["short"] = torch.randn(3, dtype=torch.float64, requires_grad=True)
    mask = saccade.Window(3, 0) & ~saccade.Window(0, 0) & saccade.Predicate(lambda b, h, q, k: k != 5)
    given = [query, key, value, held["heads"], held["broken"], held["short"]]
    function = HIDDEN[name]
    bias = saccade.Score(lambda s, b, h, q, k: function(s, b, h, q, k, held))
    out = saccade.attention(query, key, value, mask, bias=bias, backend=backend)
    found = gradients([out], given)

    # The formula with harmless values at hidden pairs.
    q, k = torch.where(hidden, LK, q), torch.where(hidden, LK - 1, k)
    scores = query @ key.repeat_interleave(HQ // HKV, 1).mT / D**0.5
    scores = function(torch.where(hidden, 1.0, scores), torch.zeros_like(q), h, q, k, held)
    weights = torch.softmax(torch.where(hidden, -torch.inf, scores), -1)
    expected = torch.where(hidden.all(-1, keepdim=True), 0.0, weights) @ value.repeat_interleave(HQ // HKV, 1)
    expected = torch.where(hidden.all(-1)[..., None], 0.0, expected)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, [torch.nan_to_num(one) for one in gradients([expected], given)])


@pytest.mark.parametrize("index", [LK, -LK - 1])
@pytest.mark.parametrize("how", [lambda s: s, torch.square])
def test_an_index_out_of_range_at_a_visible_pair_is_an_error(index, how):
    table = torch.zeros(B, LK, dtype=torch.float64)
    bias = saccade.Score(lambda s, b, h, q, k: how(s) + table[b, torch.where((q == 9) & (k == 4), index, k)])
    with pytest.raises(
        IndexError, match=rf"index {index} is out of range for axis 1 \(size {LK}\) of captured tensor 0"
    ):
        saccade.attention(*tensors(), bias=bias)


@pytest.mark.parametrize("offset", [None, 2, [4, 1]])
@pytest.mark.parametrize("name", ["alibi", "causal", "rows", "table of pairs", "not of distances", "not traced"])
def test_queries_stand_where_they_are_placed(name, offset):
    held, given = tables(), tensors()
    bias = score(name, held)
    placed = bias if offset is None else bias.at(offset)
    out = saccade.attention(*given, bias=placed)
    places = torch.tensor([LK - LQ, LK - LQ] if offset is None else [offset] * 2 if offset == 2 else offset)
    b, h, q, k = positions()
    q = q - (LK - LQ) + places.view(2, 1, 1, 1)
    scores = given[0] @ given[1].repeat_interleave(HQ // HKV, 1).mT / D**0.5
    weights = torch.softmax(FUNCTIONS[name](scores, b, h, q, k, held), -1)
    torch.testing.assert_close(out, weights @ given[2].repeat_interleave(HQ // HKV, 1))
    if offset is not None:
        follows = saccade.attention(*given, (saccade.Causal() | ~saccade.Causal()).at(offset), bias=bias)
        torch.testing.assert_close(follows, out)


@pytest.mark.parametrize("name", ["items", "relative", "causal", "table of pairs", "not of distances", "not traced"])
def test_slices_of_a_call_merge_into_the_whole(name):
    held, (query, key, value) = tables(), tensors()
    mask = saccade.Causal() | saccade.Window(3, 3)
    whole = saccade.attention_with_lse(query, key, value, mask, bias=score(name, held))
    parts = []
    for start, stop in ((0, 4), (4, LK)):
        # A function of the whole problem: `b` and the positions are those of the whole call.
        part = mask.slice((0, LQ), (start, stop), lengths=(LQ, LK))
        parts.append(
            saccade.attention_with_lse(
                query, key[:, :, start:stop], value[:, :, start:stop], part, bias=score(name, held)
            )
        )
    torch.testing.assert_close(saccade.merge(parts), whole)


def test_dropout_falls_on_the_weights():
    held, given = tables(), tensors()
    dropout = saccade.Dropout(0.4, seed=7)
    out = saccade.attention(*given, bias=score("squared", held), dropout=dropout)
    expected = saccade.attention(*given, bias=score("squared", held), dropout=dropout, backend="reference")
    eye = torch.eye(LK, dtype=torch.float64).expand(B, HKV, LK, LK)
    kept = saccade.attention(given[0], given[1], eye, bias=score("squared", held), dropout=dropout) != 0
    weights = torch.softmax((given[0] @ given[1].repeat_interleave(HQ // HKV, 1).mT / D**0.5).square(), -1)
    torch.testing.assert_close(out, (weights * kept / 0.6) @ given[2].repeat_interleave(HQ // HKV, 1))
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("name", ["scaled by heads", "rounded index", "relative", "inverse causal with a program"])
def test_tiles_and_threads_change_no_bit_of_a_gradient(name):
    rows, keys = 263, 521
    held = tables(torch.float32)
    held["distances"] = torch.randn(HQ, 2 * keys, requires_grad=True)
    held["items"] = torch.randn(B, keys, requires_grad=True)
    function = FUNCTIONS[name]

    def run():
        given = tensors(torch.float32, rows=rows, keys=keys)
        bias = saccade.Score(lambda s, b, h, q, k: function(s, b, h, q, k, held))
        out = saccade.attention(*given, bias=bias, backend="chunked")
        return [out, *gradients([out], [*given, held["heads"], held["items"], held["single"], held["distances"]])]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first = run()
        torch.set_num_threads(3)
        second = run()
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("mask", "name"),
    diagonal(
        [None, saccade.Causal().slice((2, 2 + LQ), (3, 3 + LK), lengths=(17, 19))],
        ["alibi", "inverse causal with a program", "scaled by heads", "not traced"],
    ),
)
def test_eager_flex_receives_the_same_function(name, mask):
    held = tables(torch.float32)
    held["items"] = torch.randn(B, 19)
    given = [torch.randn(x.shape) for x in tensors()]
    call = make_call(*given, mask, bias=score(name, held), softcap=1.5, needs_lse=True)
    torch._dynamo.reset()  # after calls of other sizes it would be compiled for any, which PyTorch cannot
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # eager flex_attention warns that it is not compiled
        found = flex.attend(call, flex_attention)
    expected = saccade.attention_with_lse(*given, mask, bias=score(name, held), softcap=1.5, backend="reference")
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of the compiler
def test_a_compiled_graph_breaks_at_the_call_and_the_kernels_compute_it():
    held, given = tables(torch.float32), tensors(torch.float32)

    def layer(query, key, value):
        return saccade.attention(query, key, value, bias=score("scaled by heads", held), backend="native") + 1

    found = torch.compile(layer, backend="eager")(*given)
    torch.testing.assert_close(found, layer(*given))
    torch._dynamo.reset()  # the broken graphs would be found again
    with pytest.raises(Exception, match="a Score is a function that Saccade traces itself"):
        torch.compile(layer, backend="eager", fullgraph=True)(*given)


class OutOfSight:
    def __getattr__(self, name):
        return HIDDEN_GAINS


HIDDEN_GAINS = torch.ones(HQ, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda s, b, h, q, k: s if q > k else s * 2, RuntimeError, "torch.where instead of `if`"),
        (
            lambda s, b, h, q, k: torch.stack([s, s]).norm()[None],
            ValueError,
            r"must return one number, got shape \(1,\)",
        ),
        (lambda s, b, h, q, k: torch.stack([s, s]).norm().int(), TypeError, "got torch.int32"),
        (lambda s, b, h, q, k: (s * OutOfSight().gains[h]).lgamma(), ValueError, "out of sight"),
    ],
)
def test_functions_that_neither_the_tracer_nor_vmap_can_run(function, error, message):
    with pytest.raises(error, match=message):
        saccade.attention(*tensors(), bias=saccade.Score(function))


def test_a_score_needs_a_function():
    with pytest.raises(TypeError, match="Score: function must be callable as"):
        saccade.Score(torch.zeros(3))


def documents_of(ids):
    return saccade.Score(lambda s, b, h, q, k: torch.where((ids[b, q] == ids[b, k]) & (q >= k), s * s, -torch.inf))


@pytest.mark.parametrize("write", [lambda ids, new: ids.copy_(new), lambda ids, new: ids.numpy().__setitem__(..., new)])
def test_a_condition_on_tables_of_ints_is_a_mask_that_follows_their_contents(write):
    query, key, value = tensors(torch.float32, rows=LK)
    ids = (torch.arange(LK) // torch.tensor([[3], [5]])).contiguous()
    score = documents_of(ids)
    assert "the mask" in saccade.explain(query, key, value, bias=score).score
    for shift in (0, 2, 1):
        write(ids, (torch.arange(LK) + shift) // torch.tensor([[3], [5]]))
        visible = (ids[:, None, :, None] == ids[:, None, None, :]) & torch.ones(LK, LK, dtype=torch.bool).tril()
        squared = (query @ key.repeat_interleave(HQ // HKV, 1).mT / D**0.5) ** 2
        weights = torch.softmax(squared.masked_fill(~visible, -torch.inf), -1)
        expected = weights @ value.repeat_interleave(HQ // HKV, 1)
        torch.testing.assert_close(saccade.attention(query, key, value, bias=score), expected)


def test_a_condition_that_reads_outside_of_its_table_at_hidden_pairs_alone_is_no_error():
    query, key, value = tensors(torch.float32)
    ids = torch.arange(LK - 2) // 3  # the last two keys have no entry
    score = saccade.Score(lambda s, b, h, q, k: torch.where(ids[k] > 0, s, -torch.inf))
    out = saccade.attention(query, key, value, saccade.Padding([LK - 2] * B), bias=score)
    torch.testing.assert_close(
        out, saccade.attention(query, key, value, saccade.Predicate(lambda b, h, q, k: (k > 2) & (k < LK - 2)))
    )
    with pytest.raises(IndexError, match=f"index {LK - 2} is out of range"):
        saccade.attention(query, key, value, bias=score)

"""saccade.flex_attention beside PyTorch's eager code, which forms all scores: outputs, lse, max_scores, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from flex_functions import DV, HKV, HQ, LK, LQ, B, D, mask_functions, qkv, score_functions, table, theirs
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

import saccade
from slowly import alternate

SCORES = sorted(score_functions())
MASKS = sorted(mask_functions())
close = torch.testing.assert_close


def ours(query, key, value, score_mod=None, mask_mod=None, **options):
    block = None
    if mask_mod is not None:
        shape = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
        block = create_block_mask(mask_mod, *shape, device="cpu", BLOCK_SIZE=8)
    options |= {"enable_gqa": True, "return_aux": AuxRequest(lse=True, max_scores=True)}
    out, aux = saccade.flex_attention(query, key, value, score_mod, block, **options)
    return out, aux.lse, aux.max_scores


def gradients(result, tensors):
    """Of a random linear function of out and of the lse of rows that see a key."""
    out, lse, _ = result
    loss = (out * table(*out.shape, seed=20).to(out.dtype)).sum()
    loss = loss + (lse * table(*lse.shape, seed=21).to(lse.dtype))[lse > -math.inf].sum()
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(tensors, found, strict=True)]


def nowhere_nan(gradient):
    """PyTorch's lse of a row without keys has gradients of NaN that `lse > -inf` does not take away."""
    return torch.nan_to_num(gradient, nan=0.0)


@pytest.mark.parametrize("name", SCORES)
def test_a_score_function_and_its_gradients(name):
    function, learned = score_functions()[name]
    given = qkv()
    expected = theirs(*given, function)
    result = ours(*given, function)
    for mine, right in zip(result, expected, strict=True):
        close(mine, right, rtol=1e-9, atol=1e-9)
    tensors = [*given, *learned]
    for mine, right in zip(gradients(result, tensors), gradients(expected, tensors), strict=True):
        close(mine, nowhere_nan(right), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("name", "dtype"), alternate([*SCORES], [torch.float32, torch.bfloat16]), ids=str)
def test_the_kernels_are_as_close_to_float64_as_pytorch_is(name, dtype):
    wide, narrow = qkv(), qkv(dtype)
    with torch.no_grad():
        for tensor, rounded in zip(wide, narrow, strict=True):
            tensor.copy_(rounded)
    (function, learned), (same, small) = score_functions()[name], score_functions(torch.float32)[name]
    with torch.no_grad():
        for tensor, rounded in zip(learned, small, strict=True):
            tensor.copy_(rounded)
    exact, rough, mine = theirs(*wide, function), theirs(*narrow, same), ours(*narrow, same)
    errors = [
        [
            (part.double() - right).nan_to_num(0.0, 0.0, 0.0).abs().max()
            for part, right in zip(found, exact, strict=True)
        ]
        for found in (rough, mine)
    ]
    for theirs_off, ours_off, right in zip(*errors, exact, strict=True):
        finite = right[right.isfinite()].abs().max()
        assert ours_off <= 2 * theirs_off + 2e-6 * finite
    tensors = [*wide, *learned]
    right = gradients(exact, tensors)
    slack = [*rounded_factors(wide, function, dtype), *[0.0] * len(learned)]
    mine, rough = (gradients(found, [*narrow, *small]) for found in (mine, rough))
    for got, other, true, more in zip(mine, rough, right, slack, strict=True):
        true = nowhere_nan(true)
        off = (got.double() - true).abs()
        others = (nowhere_nan(other).double() - true).abs().max()
        assert (off <= 2 * others + 4e-6 * (1 + true.abs().max()) + more).all()


def rounded_factors(given, function, dtype):
    """How far gradients of query, key and value may be off because products take slopes and weights in half precision.

    Each product's factor is off by u, half a unit of it: as |slopes| |key|, |slopes| |query| and |weights| |cotangent|.
    """
    if dtype == torch.float32:
        return 0.0, 0.0, 0.0
    query, key, value = given
    added = torch.zeros(B, HQ, LQ, LK, dtype=torch.float64, requires_grad=True)
    result = theirs(*given, lambda score, b, h, q, k: function(score + added[b, h, q, k], b, h, q, k))
    weighted = (result[0] * table(*result[0].shape, seed=20).abs()).sum()
    of_value = nowhere_nan(torch.autograd.grad(weighted, value, retain_graph=True)[0])
    slopes = nowhere_nan(gradients(result, [added])[0]).abs()
    u, scale, group = torch.finfo(dtype).eps / 2, D**-0.5, HQ // HKV
    of_query = slopes @ key.abs().repeat_interleave(group, 1)
    of_key = (slopes.mT @ query.abs()).unflatten(1, (HKV, group)).sum(2)
    return u * scale * of_query.detach(), u * scale * of_key.detach(), u * of_value


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_function(name):
    function, given = mask_functions()[name], qkv()
    expected, result = theirs(*given, None, function), ours(*given, None, function)
    for mine, right in zip(result, expected, strict=True):
        close(mine, right, rtol=1e-9, atol=1e-9)
    for mine, right in zip(gradients(result, given), gradients(expected, given), strict=True):
        close(mine, nowhere_nan(right), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("mask", ["window", "by head", "padding"])
@pytest.mark.parametrize("name", ["alibi", "pairs", "stick"])
def test_a_score_function_beside_a_mask_function(name, mask):
    (function, learned), shown, given = score_functions()[name], mask_functions()[mask], qkv()
    expected, result = theirs(*given, function, shown), ours(*given, function, shown)
    for mine, right in zip(result, expected, strict=True):
        close(mine, right, rtol=1e-9, atol=1e-9)
    tensors = [*given, *learned]
    for mine, right in zip(gradients(result, tensors), gradients(expected, tensors), strict=True):
        close(mine, nowhere_nan(right), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("mask", [None, "window", "documents"])
@pytest.mark.parametrize("name", ["relative", "jagged", "pairs", "stick"])
def test_lengths_of_several_tiles(name, mask):
    lengths = 157, 211
    function, learned = score_functions(torch.float32, lengths)[name]
    given, shown = qkv(torch.float32, lengths=lengths), mask_functions().get(mask)
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    exact, precise = score_functions(torch.float64, lengths)[name]
    expected, result = theirs(*wide, exact, shown), ours(*given, function, shown)
    right = gradients(expected, [*wide, *precise])
    for mine, other in zip([*result, *gradients(result, [*given, *learned])], [*expected, *right], strict=True):
        other = nowhere_nan(other) if other.isnan().any() else other
        close(mine.double(), other, rtol=1e-4, atol=1e-4)


def test_a_masked_pair_may_compute_nan_and_infinity():
    weight = table(LK, seed=9, dtype=torch.float32).requires_grad_()

    def wild(score, b, h, q, k):
        return score + weight[k] / (q - k) + torch.log((q - k).float())  # NaN and infinite where k >= q

    def earlier(b, h, q, k):
        return k < q

    def tame(score, b, h, q, k):
        apart = torch.where(k < q, q - k, 1)
        return score + weight[k] / apart + torch.log(apart.float())

    given = qkv(torch.float32)
    expected, result = theirs(*given, tame, earlier), ours(*given, wild, earlier)
    for mine, right in zip(result[:2], expected[:2], strict=True):
        close(mine, right, rtol=1e-5, atol=1e-5)
    for mine, right in zip(gradients(result, [*given, weight]), gradients(expected, [*given, weight]), strict=True):
        close(mine, nowhere_nan(right), rtol=1e-4, atol=1e-4)


def test_scale_counts_before_the_function():
    given = qkv()
    squared = score_functions()["squared"][0]
    close(ours(*given, squared, scale=0.3)[0], theirs(*given, squared, scale=0.3)[0], rtol=1e-9, atol=1e-9)


def test_what_is_returned_is_what_pytorch_returns():
    query, key, value = qkv(torch.float32, heads=(HKV, HKV))
    out = saccade.flex_attention(query, key, value)
    pair = saccade.flex_attention(query, key, value, return_lse=True)
    assert isinstance(out, torch.Tensor) and len(pair) == 2
    close(pair[1], theirs(query, key, value)[1], rtol=1e-5, atol=1e-5)
    for request in (AuxRequest(), AuxRequest(lse=True), AuxRequest(max_scores=True)):
        _, aux = saccade.flex_attention(query, key, value, return_aux=request)
        assert (aux.lse is not None, aux.max_scores is not None) == tuple(request)
    assert saccade.flex_attention(query, key, value, kernel_options={"BLOCK_M": 64, "new": 1}).equal(out)


def test_one_batch_of_keys_serves_all_items():
    query = qkv(heads=(HKV, HKV))[0]
    _, key, value = qkv(heads=(HKV, HKV), batch=1)
    shown = mask_functions()["padding"]
    out, lse, _ = ours(query, key, value, None, shown)
    expected = theirs(query, key, value, None, shown)
    close(out, expected[0], rtol=1e-9, atol=1e-9)
    both = [gradients((out, lse, None), [key, value]), gradients(expected, [key, value])]
    for mine, right in zip(*both, strict=True):
        close(mine, right, rtol=1e-8, atol=1e-9)


def test_keys_and_values_of_a_lower_precision_are_taken_as_they_are():
    query, key, value = qkv(torch.float32)
    low = key.detach().bfloat16(), value.detach().bfloat16()
    out = saccade.flex_attention(query, *low, enable_gqa=True)
    close(out, theirs(query, low[0].float(), low[1].float())[0], rtol=1e-5, atol=1e-5)


def test_a_captured_tensor_is_read_anew_at_every_call():
    function, learned = score_functions(torch.float32)["relative"]
    given = qkv(torch.float32)
    for _ in range(2):
        close(ours(*given, function)[0], theirs(*given, function)[0], rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            learned[3].mul_(-2)


@pytest.mark.parametrize("name", ["relative", "pairs", "jagged"])
def test_gradients_have_the_same_bits_with_any_number_of_threads(name):
    lengths = 157, 211  # of several tiles
    function, learned = score_functions(torch.float32, lengths)[name]
    given, threads, seen = qkv(torch.float32, lengths=lengths), torch.get_num_threads(), []
    try:
        for number in (1, 2, 3, 5):
            torch.set_num_threads(number)
            result = ours(*given, function)
            seen.append([*result, *gradients(result, [*given, *learned])])
    finally:
        torch.set_num_threads(threads)
    for others in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], others, strict=True))


def one(score, b, h, q, k):
    return score


BAD = [
    ({"enable_gqa": False}, ValueError, f"query has {HQ} heads .* expected key's {HKV}; enable_gqa=True"),
    ({"score_mod": lambda score, b, h, q: score}, TypeError, "score_mod must take the 5 arguments"),
    ({"score_mod": lambda score, b, h, q, k: q - k}, TypeError, "score_mod must return a float tensor .* got a int32"),
    ({"score_mod": 3}, TypeError, "score_mod must be a function .* or None, got 3"),
    ({"block_mask": saccade.Causal()}, TypeError, "block_mask must be a BlockMask .*Causal"),
    ({"return_lse": True, "return_aux": AuxRequest()}, ValueError, "return_lse and return_aux cannot both be passed"),
    ({"kernel_options": {"BACKEND": "FAST"}}, ValueError, "BACKEND must be one of .* got 'FAST'"),
    ({"kernel_options": {"OUTPUT_MAX": True}}, ValueError, "OUTPUT_MAX follows from"),
    ({"scale": math.inf}, ValueError, "scale must be finite"),
]


@pytest.mark.parametrize("block_mask", [None, create_block_mask(mask_functions()["causal"], 1, 1, LQ, LK, "cpu")])
def test_tensors_that_are_none_of_four_axes(block_mask):
    query, key, value = qkv(torch.float32)
    with pytest.raises(ValueError, match="query must be 4-D"):
        saccade.flex_attention(query[0], key, value, None, block_mask)
    with pytest.raises(TypeError, match="key must be a tensor"):
        saccade.flex_attention(query, None, value, None, block_mask)


@pytest.mark.parametrize(("wrong", "error", "message"), BAD, ids=lambda value: None)
def test_bad_arguments(wrong, error, message):
    with pytest.raises(error, match=message):
        saccade.flex_attention(*qkv(torch.float32), **{"enable_gqa": True, **wrong})


def test_one_batch_of_keys_needs_a_mask_made_for_all_items():
    query, (_, key, value) = qkv()[0], qkv(batch=1)
    with pytest.raises(ValueError, match=f"key has batch size 1, expected {B} like query.*got no block_mask"):
        saccade.flex_attention(query, key, value, one, enable_gqa=True)


def test_a_function_that_reads_outside_of_its_tensor():
    short = torch.zeros(LK - 1)
    with pytest.raises((ValueError, IndexError), match="index|range|bounds"):
        saccade.flex_attention(*qkv(torch.float32), lambda s, b, h, q, k: s + short[k], enable_gqa=True)


@pytest.mark.parametrize("lengths", [(0, LK), (LQ, 0), (0, 0)])
def test_no_queries_and_no_keys(lengths):
    given = qkv(torch.float32, lengths=lengths)
    for name in ("relative", "alibi", "pairs", "clipped"):
        out = saccade.flex_attention(*given, score_functions(torch.float32)[name][0], enable_gqa=True)
        assert torch.equal(out, torch.zeros(B, HQ, lengths[0], DV))
        out.sum().backward()
        assert not any(tensor.grad.any() for tensor in given)


def test_half_precision_keeps_its_dtype_and_lse_does_not():
    out, lse, top = ours(*qkv(torch.bfloat16), one)
    assert (out.dtype, lse.dtype, top.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert out.shape == (B, HQ, LQ, DV)

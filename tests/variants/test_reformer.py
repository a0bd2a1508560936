"""Reformer's attention against the sets of its definition, pair by pair, in float64.

Shape legend: B batch, H heads, R rounds, L tokens, D key width, Dv value width.
"""

from __future__ import annotations

import functools
import itertools
import math
import re

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from looped import looped
from saccade import Causal, Padding, Window
from saccade.variants import HeadSizes, ReformerConfig, lsh_attention
from saccade.variants._lsh import factors

B, H, R, L, D, DV = 2, 3, 3, 37, 5, 7
EXACT = dict(rtol=1e-12, atol=1e-12)


def made(*shapes, dtype=torch.float64, grad=True):
    return [torch.randn(shape, dtype=dtype).requires_grad_(grad) for shape in shapes]


def visible(hashes, chunk, causal):
    """Who reads whom, from the definition: bool (B, H, L, L), without tokens that read themselves."""
    batch, heads, rounds, length = hashes.shape
    seen = torch.zeros(batch, heads, length, length, dtype=torch.bool)
    for b, h, r in np.ndindex(batch, heads, rounds):
        bucket, chunk_of, before = hashes[b, h, r].tolist(), [0] * length, {}
        for place, t in enumerate(sorted(range(length), key=lambda t: (bucket[t], t))):
            inside = before.get(bucket[t], 0)
            before[bucket[t]] = inside + 1
            chunk_of[t] = (inside if causal else place) // chunk
        for i, j in itertools.permutations(range(length), 2):
            if bucket[i] == bucket[j] and chunk_of[i] - chunk_of[j] in (0, 1) and (j < i or not causal):
                seen[b, h, i, j] = True
    return seen


def dense(query, value, seen, scale=None):
    """Softmax over the pairs seen; a row that sees none is its own value. Keys are the unit queries."""
    key = query / query.norm(dim=-1, keepdim=True)
    scores = (query @ key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    itself = torch.eye(query.shape[2], dtype=torch.bool) & ~seen.any(-1, keepdim=True)
    return scores.masked_fill(~(seen | itself), -math.inf).softmax(-1) @ value


def agree(found, expected, inputs):
    torch.testing.assert_close(found, expected, **EXACT)
    upstream = torch.randn_like(found)
    pairs = zip(*(torch.autograd.grad(out, inputs, upstream) for out in (found, expected)), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.slow
@looped("causal", [False, True])
@looped(("buckets", "chunk"), [(1, 1), (2, 3), (2, 4), (5, 3), (17, 2), (3, 41)])
def test_softmax_over_the_pairs_that_any_round_shows(causal, buckets, chunk):
    query, value = made((B, H, L, D), (B, H, L, DV))
    hashes = torch.randint(0, buckets, (B, H, R, L))
    found = lsh_attention(query, value, Causal() if causal else None, hashes=hashes, chunk=chunk)
    agree(found, dense(query, value, visible(hashes, chunk, causal)), (query, value))


@pytest.mark.parametrize("causal", [False, True])
def test_one_bucket_and_one_chunk_is_dense_attention_to_all_others(causal):
    query, value = made((B, H, L, D), (B, H, L, DV))
    everyone = ~torch.eye(L, dtype=torch.bool).expand(B, H, L, L)
    everyone = everyone.tril() if causal else everyone
    found = lsh_attention(
        query,
        value,
        Causal() if causal else None,
        hashes=torch.zeros(B, H, 2, L, dtype=torch.int64),
        chunk=L,
        scale=0.7,
    )
    agree(found, dense(query, value, everyone, 0.7), (query, value))


@looped("causal", [False, True])
@looped("side", ["left", "right", "holes"])
def test_padded_tokens_are_in_nobodys_way(causal, side):
    query, value = made((2, H, L, D), (2, H, L, DV))
    real = torch.ones(2, L, dtype=torch.bool)
    real[1] = {"left": torch.arange(L) >= 8, "right": torch.arange(L) < 29, "holes": torch.rand(L) < 0.6}[side]
    mask = Padding(real) & Causal() if causal else Padding(real)
    with torch.no_grad():
        for tensor in (query, value):
            tensor[1, :, ~real[1]] = math.nan
    found = lsh_attention(query, value, mask, rounds=R, chunk=3, seed=5)
    grads = torch.autograd.grad(found.sum(), (query, value))
    alone_inputs = [tensor[1:, :, real[1]].detach().requires_grad_() for tensor in (query, value)]
    alone = lsh_attention(*alone_inputs, Causal() if causal else None, rounds=R, chunk=3, seed=5)
    torch.testing.assert_close(found[1:, :, real[1]], alone, **EXACT)
    assert (found[1, :, ~real[1]] == 0).all()
    for mine, theirs in zip(grads, torch.autograd.grad(alone.sum(), alone_inputs), strict=True):
        torch.testing.assert_close(mine[1:, :, real[1]], theirs, **EXACT)
        assert (mine[1, :, ~real[1]] == 0).all()


@pytest.mark.parametrize("short", [53, 131])
def test_an_item_keeps_its_number_of_buckets_beside_a_longer_one(short):
    # With chunks of 1, 149 tokens have 298 buckets from two hashes, 53 have 106 from one, 131 have 262 from two.
    query, value = made((2, H, 149, D), (2, H, 149, DV), grad=False)
    found = lsh_attention(query, value, Padding([149, short]), chunk=1)
    alone = lsh_attention(query[1:, :, :short], value[1:, :, :short], chunk=1)
    torch.testing.assert_close(found[1:, :, :short], alone, **EXACT)
    fewer = lsh_attention(query[1:, :, :short], value[1:, :, :short], chunk=1, buckets=2)
    assert (fewer - alone).abs().max() > 0.1


def test_padding_of_rows_alone_leaves_their_keys():
    query, value = made((2, H, L, D), (2, H, L, DV), grad=False)
    hashes = torch.randint(0, 2, (2, H, R, L))
    rows = Padding([L, L], queries=[L, 11])
    found, all_rows = (lsh_attention(query, value, mask, hashes=hashes, chunk=4) for mask in (rows, None))
    torch.testing.assert_close(found[1, :, :11], all_rows[1, :, :11], rtol=0, atol=0)
    assert (found[1, :, 11:] == 0).all() and (all_rows[1, :, 11:] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_token_reads_itself_only_where_no_round_shows_another(dtype):
    query, value = made((1, 1, 4, D), (1, 1, 4, DV), dtype=dtype, grad=False)
    # 0 and 1 meet in the second round alone, 2 and 3 in none.
    hashes = torch.tensor([[[[0, 1, 2, 3], [5, 5, 7, 8]]]])
    out = lsh_attention(query * 30, value, hashes=hashes, chunk=2)
    torch.testing.assert_close(out, value[:, :, [1, 0, 2, 3]], rtol=0, atol=0)


def test_rounds_that_show_the_same_pairs_count_them_once():
    query, value = made((B, H, L, D), (B, H, L, DV), grad=False)
    once = torch.randint(0, 3, (B, H, 1, L))
    torch.testing.assert_close(
        lsh_attention(query, value, hashes=once.expand(-1, -1, 5, -1), chunk=4),
        lsh_attention(query, value, hashes=once, chunk=4),
        rtol=0,
        atol=0,
    )


@pytest.mark.parametrize("first", [1, 17, 36])
def test_later_tokens_change_nothing_not_even_the_borders_of_chunks(first):
    query, value = made((B, H, L, D), (B, H, L, DV), grad=False)
    others = [torch.cat((x[:, :, :first], torch.randn_like(x[:, :, first:])), 2) for x in (query, value)]
    found, changed = (lsh_attention(*x, Causal(), buckets=6, chunk=2, seed=3) for x in ((query, value), others))
    torch.testing.assert_close(changed[:, :, :first], found[:, :, :first], **EXACT)
    assert (changed[:, :, first:] - found[:, :, first:]).abs().max() > 0.1


@pytest.mark.parametrize("step", [1, 5, 19])
def test_new_queries_after_all_tokens_so_far_are_the_rows_of_the_whole(step):
    query, value = made((B, H, L, D), (B, H, L, DV))
    numbers = dict(buckets=4, rounds=R, chunk=3, seed=11)
    whole = lsh_attention(query, value, Causal(), **numbers)
    parts = []
    for start in range(0, L, step):
        stop = min(start + step, L)
        parts.append(
            lsh_attention(query[:, :, start:stop], value[:, :, :stop], Causal(), key=query[:, :, :stop], **numbers)
        )
    agree(torch.cat(parts, 2), whole, (query, value))


def test_more_queries_than_tokens_have_empty_rows_first():
    query, value = made((B, H, L, D), (B, H, L, DV), grad=False)
    more = torch.cat((torch.randn(B, H, 2, D, dtype=torch.float64), query), 2)
    found = lsh_attention(more, value, Causal(), buckets=4, chunk=3, key=query)
    assert (found[:, :, :2] == 0).all()
    torch.testing.assert_close(found[:, :, 2:], lsh_attention(query, value, Causal(), buckets=4, chunk=3), **EXACT)


def met(angle, buckets, rounds, trials):
    """Share of trials (heads, each with directions of its own) in which two tokens at this angle read each other."""
    pair = torch.zeros(1, 1, 2, D, dtype=torch.float64)
    pair[..., 0, 0], pair[..., 1, 0], pair[..., 1, 1] = 1.0, math.cos(angle), math.sin(angle)
    value = torch.tensor([0.0, 1.0], dtype=torch.float64).view(1, 1, 2, 1).expand(1, trials, 2, 1)
    out = lsh_attention(pair.expand(1, trials, 2, D), value, buckets=buckets, rounds=rounds, chunk=2, seed=7)
    return float((out[0, :, 0, 0] == 1).double().mean())


@functools.cache
def once_met(angle, buckets, trials):
    """The same for one round, simulated with NumPy from argmax([x R; -x R])."""
    drawn = np.random.default_rng(1).standard_normal((trials, 2, buckets // 2))  # the plane of both is enough
    sides = np.array([[1.0, 0.0], [math.cos(angle), math.sin(angle)]])
    along = sides @ drawn
    first, second = np.concatenate([along, -along], axis=-1).argmax(-1).T
    return float((first == second).mean())


@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize(("angle", "buckets"), [(0.5, 2), (1.3, 2), (0.6, 8), (0.4, 32)])
def test_recall_after_some_rounds(angle, buckets, rounds):
    trials = 10_007
    if buckets == 2:
        once, error = 1 - angle / math.pi, 0.0  # one direction: that it does not part the two
    else:
        once = once_met(angle, buckets, 100_003)
        error = rounds * (1 - once) ** (rounds - 1) * math.sqrt(once * (1 - once) / 100_003)
    expected = 1 - (1 - once) ** rounds
    bound = 5 * math.hypot(math.sqrt(expected * (1 - expected) / trials), error)
    assert abs(met(angle, buckets, rounds, trials) - expected) < bound


@looped("count", [2, 128, 130, 512, 1000, 4096])
def test_many_buckets_are_a_product_of_two_even_numbers(count):
    found = factors(count)
    assert all(part % 2 == 0 for part in found) and len(found) == (1 if count <= 128 else 2)
    product = math.prod(found)
    assert count <= product <= count + 2 * found[0]


def test_two_factors_fill_their_buckets_and_keep_neighbours_together():
    query = torch.randn(1, 2, 997, 64)
    near = query + 1e-4 * torch.randn_like(query)
    value = torch.cat((torch.zeros(1, 2, 997, 1), torch.ones(1, 2, 997, 1)), 2)
    out = lsh_attention(torch.cat((query, near), 2), value, buckets=512, rounds=2, chunk=512)
    # Each of the first half finds its neighbour in the second; with few others in a bucket most of what it reads.
    assert (out[:, :, :997] > 0).double().mean() > 0.99


def test_seeds():
    query, value = made((B, H, L, D), (B, H, L, DV), grad=False)

    def read(seed):
        return lsh_attention(query, value, buckets=6, rounds=2, chunk=4, seed=seed)

    assert torch.equal(read(3), read(3)) and torch.equal(read(-1), read(2**64 - 1))
    assert not torch.equal(read(3), read(4))


def test_a_sample_does_not_depend_on_its_batch_mates():
    query, value = made((5, H, 149, 16), (5, H, 149, 16), dtype=torch.float32, grad=False)
    whole = lsh_attention(query, value, Causal(), buckets=8, chunk=16)
    for item in range(5):
        alone = lsh_attention(*(x[item : item + 1] for x in (query, value)), Causal(), buckets=8, chunk=16)
        assert torch.equal(whole[item : item + 1], alone)


def module(**numbers):
    return ReformerConfig(**{"buckets": 4, "chunk": 3, **numbers}).build(HeadSizes(H * D, H, H, D, DV))


def test_training_draws_anew_and_evaluation_does_not():
    query, value = made((B, H, L, D), (B, H, L, DV), grad=False)
    reads = module()
    first, second = (reads(query, query, value) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    again = reads(query, query, value)
    torch.manual_seed(3)
    assert torch.equal(reads(query, query, value), again)
    reads.eval()
    assert torch.equal(reads(query, query, value), reads(query, query, value))
    other = module().eval()
    assert not torch.equal(other(query, query, value), reads(query, query, value))
    other.load_state_dict(reads.state_dict())
    assert torch.equal(other(query, query, value), reads(query, query, value))


@pytest.mark.parametrize(("redraw", "preserve"), [(True, True), (False, False)])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_hashes_alike(redraw, preserve, reentrant):
    query, value = made((B, H, L, D), (B, H, L, DV))
    reads = module(redraw=redraw)
    upstream = torch.randn(B, H, L, DV, dtype=torch.float64)

    def run(q, v):
        return reads(q, q, v, Causal())

    torch.manual_seed(13)
    plain = run(query, value)
    torch.manual_seed(13)
    saved = checkpoint(run, query, value, use_reentrant=reentrant, preserve_rng_state=preserve)
    torch.manual_seed(17)  # what is drawn between the two passes does not matter
    found, expected = [], []
    for out, into in ((saved, found), (plain, expected)):
        query.grad = value.grad = None
        out.backward(upstream)
        into += [out.detach(), query.grad, value.grad]
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_recomputation_with_other_hashes_is_told():
    query, value = made((B, H, L, D), (B, H, L, DV))
    reads = module(redraw=True)
    out = checkpoint(lambda q, v: reads(q, q, v, Causal()), query, value, use_reentrant=False, preserve_rng_state=False)
    with pytest.raises(RuntimeError, match="hashed with another seed.* expected redraw=False, or .*preserve_rng_state"):
        out.sum().backward()


@pytest.mark.parametrize("rows", [L, 2])
def test_autocast_rounds_inputs_and_output_alone(rows):
    results = []
    for cast in (True, False):
        torch.manual_seed(3)
        query, value = made((B, H, L, 17), (B, H, L, DV), dtype=torch.float32)
        given = query[:, :, L - rows :], value, query
        # Each is cast by itself, as autocast does: the query's two gradients are added in float32 then.
        last, read, key = given if cast else [tensor.bfloat16() for tensor in given]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            out = lsh_attention(last, read, Causal(), buckets=4, chunk=3, key=key)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (query, value))))
    for mine, plain in zip(*results, strict=True):
        assert torch.equal(mine, plain)


@pytest.mark.parametrize("size", [1e-36, 1e37])
def test_buckets_do_not_depend_on_the_size_of_vectors(size):
    torch.manual_seed(0)
    query, value = made((1, 1, 97, 64), (1, 1, 97, DV), dtype=torch.float32, grad=False)
    alike = torch.zeros(1, 1, 97, 64)  # the same logits for all, so that only the buckets count
    found = [lsh_attention(alike, value, buckets=8, rounds=1, chunk=97, key=query * factor) for factor in (1.0, size)]
    assert torch.equal(*found)


def test_the_backward_pass_keeps_no_pairs():
    kept = []

    def pack(tensor):
        kept.append(tensor.numel())
        return tensor

    sizes = []
    for length in (512, 1024):
        kept.clear()
        query, value = made((1, 2, length, 16), (1, 2, length, 16), dtype=torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            lsh_attention(query, value, Causal(), buckets=8, chunk=64, rounds=4)
        assert max(kept) <= 2 * length * 16
        sizes.append(sum(kept))
    assert sizes[1] <= 2.01 * sizes[0]


def test_fewer_heads_of_values():
    query, value = made((B, 6, L, D), (B, 2, L, DV))
    hashes = torch.randint(0, 3, (B, 6, 2, L))
    found = lsh_attention(query, value, hashes=hashes, chunk=4)
    each = value[:, [0, 0, 0, 1, 1, 1]]
    agree(found, dense(query, each, visible(hashes, 4, False)), (query, value))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    query, value = made((B, H, L, D), (B, H, L, DV), dtype=dtype, grad=False)
    hashes = torch.randint(0, 3, (B, H, 2, L))
    found = lsh_attention(query, value, hashes=hashes, chunk=4)
    exact = dense(query.double(), value.double(), visible(hashes, 4, False))
    assert found.dtype == dtype
    bound = torch.finfo(dtype).eps / 2 * exact.abs() + 1e-5
    assert ((found.double() - exact).abs() <= bound).all()


@looped("norm", [0.0, 1e-30, 1e25, 3e37])
def test_extreme_norms_stay_finite(norm):
    query, value = made((B, H, L, D), (B, H, L, DV), dtype=torch.float32, grad=False)
    query = (norm * query / query.norm(dim=-1, keepdim=True)).requires_grad_()
    out = lsh_attention(query, value, Causal(), buckets=4, chunk=4)
    out.sum().backward()
    assert out.isfinite().all() and query.grad.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_reaches_its_readers_alone(bad):
    query, value = made((1, 1, L, D), (1, 1, L, DV), grad=False)
    hashes = torch.randint(0, 4, (1, 1, 2, L))
    value[0, 0, 5] = bad
    found = lsh_attention(query, value, hashes=hashes, chunk=4)
    seen = visible(hashes, 4, False)
    reads = seen[0, 0, :, 5] | ((torch.arange(L) == 5) & ~seen[0, 0, 5].any())
    value[0, 0, 5] = 0
    torch.testing.assert_close(found[0, 0, ~reads], dense(query, value, seen)[0, 0, ~reads], **EXACT)
    assert found[0, 0, reads].isnan().all() and reads.any() and not reads.all()


@pytest.mark.parametrize("shape", [(0, H, L, D), (B, H, 0, D), (B, H, 1, D)])
def test_few_tokens_or_none(shape):
    query, value = made(shape, (*shape[:3], DV))
    out = lsh_attention(query, value, Causal())
    out.sum().backward()
    assert out.shape == value.shape and query.grad.shape == shape
    torch.testing.assert_close(out, value)  # who is alone reads itself


def test_second_derivatives_are_refused():
    query, value = made((1, 1, L, D), (1, 1, L, DV))
    grad = torch.autograd.grad(lsh_attention(query, value).square().sum(), query, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@looped(
    ("numbers", "error", "words"),
    [
        ({"buckets": 7}, ValueError, "buckets must be even, got 7"),
        ({"buckets": 0}, ValueError, "buckets must be at least 2, got 0"),
        ({"buckets": 4.0}, TypeError, "buckets must be an int"),
        ({"rounds": 0}, ValueError, "rounds must be at least 1, got 0"),
        ({"chunk": 0}, ValueError, "chunk must be at least 1, got 0"),
    ],
)
def test_numbers_that_make_no_sense(numbers, error, words):
    query, value = made((B, H, L, D), (B, H, L, DV), grad=False)
    for call in (lambda: lsh_attention(query, value, **numbers), lambda: ReformerConfig(**numbers)):
        with pytest.raises(error, match=re.escape(words)):
            call()


def test_what_does_not_fit_is_refused():
    query, value = made((B, H, L, D), (B, H, L, DV), grad=False)
    with pytest.raises(ValueError, match=r"hashes: expected shape \(B, H, R, L\) = \(2, 3, R, 37\), got \(2, 3, 37\)"):
        lsh_attention(query, value, hashes=torch.zeros(B, H, L, dtype=torch.int64))
    with pytest.raises(TypeError, match="hashes: expected integers"):
        lsh_attention(query, value, hashes=torch.zeros(B, H, 1, L))
    with pytest.raises(ValueError, match=r"lsh_attention takes Causal\(\), Padding"):
        lsh_attention(query, value, Window(3, 3))
    with pytest.raises(ValueError, match=r"key has length \(axis 2\) 37, expected query's 5"):
        lsh_attention(query[:, :, :5], value, key=query)
    with pytest.raises(ValueError, match="buckets: None takes their number from the length"):
        module(buckets=None)(query[:, :, -1:], query, value, Causal())
    with pytest.raises(TypeError, match="redraw must be a bool, got 1"):
        ReformerConfig(redraw=1)

"""Nystrom attention against its formula, built from lists of tokens, and the promises of its parts.

B batch, Hq/Hkv query/kv heads, Lq/Lk lengths, m landmarks, D key width, Dv value width.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import problems
import saccade
from looped import looped
from problems import assert_close
from recording import Largest
from saccade.variants import HeadSizes, NystromConfig, nystrom_attention
from saccade.variants.nystrom import _edges, pseudo_inverse
from slowly import slow_but


def segments(tokens, most):
    """Means (m, D) of tokens (n, D): the first n % m segments that come due get one token more (Bresenham)."""
    n = len(tokens)
    m = min(most, n)
    groups = [[] for _ in range(m)]
    for t in range(n):
        groups[t * m // n].append(tokens[t])
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    return torch.stack([torch.stack(group).mean(0) for group in groups])


def inverse(A, iterations):
    if iterations is None:
        return torch.linalg.pinv(A)
    one = torch.eye(len(A), dtype=A.dtype)
    Z = A.T / (torch.linalg.matrix_norm(A, 1) * A.sum(1).max().detach())
    for _ in range(iterations):
        Z = Z @ (13 * one - A @ Z @ (15 * one - A @ Z @ (7 * one - A @ Z))) / 4
    return Z


def alone(query, key, value, weight=None, *, landmarks, iterations=6, scale=None):
    """The formula for one item and head: (Lq, D), (Lk, D), (Lk, Dv), weight (k,)."""
    scale = query.shape[1] ** -0.5 if scale is None else scale
    q, k = segments(query, landmarks), segments(key, landmarks)
    soft = [torch.softmax(scale * a @ b.T, -1) for a, b in ((query, k), (q, k), (q, key))]
    out = soft[0] @ inverse(soft[1], iterations) @ soft[2] @ value
    if weight is not None:
        half = len(weight) // 2
        rows = [
            sum(weight[d + half] * value[i + d] for d in range(-half, half + 1) if 0 <= i + d < len(value))
            for i in range(len(value))
        ]
        out = out + torch.stack(rows)
    return out


def whole(t, weight=None, **options):
    """The formula for every item and head, in float64."""
    q, k, v = (t[name].double() for name in ("query", "key", "value"))
    group = q.shape[1] // k.shape[1]
    weights = [None] * q.shape[1] if weight is None else weight[:, 0].double()
    items = [
        torch.stack(
            [alone(q[b, h], k[b, h // group], v[b, h // group], weights[h], **options) for h in range(q.shape[1])]
        )
        for b in range(q.shape[0])
    ]
    return torch.stack(items)


def call(t, mask=None, **options):
    return nystrom_attention(t["query"], t["key"], t["value"], mask, **options)


def kernel(width=3, heads=6, dtype=torch.float64):
    return torch.randn(heads, 1, width, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(dtype)


# --- the formula ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("rows", "keys", "landmarks", "width", "scale"),
    [
        (13, 13, 4, None, None),
        (13, 13, 5, 3, 0.3),
        (11, 13, 4, None, None),
        (3, 13, 7, None, None),
        (12, 12, 4, 29, 1.1),
    ],
)
def test_the_formula_and_its_gradients(rows, keys, landmarks, width, scale, dtype):
    t = problems.tensors(rows=rows, keys=keys, dtype=dtype)
    weight = {} if width is None else {"weight": kernel(width, dtype=dtype)}
    mine, theirs = (problems.leaves(t | weight) for _ in range(2))
    options = dict(landmarks=landmarks, scale=scale)
    out = call(mine, convolution=mine.get("weight"), **options)
    want = whole(theirs, theirs.get("weight"), **options)
    assert out.dtype == dtype
    # The pseudo-inverse multiplies rounding by at most its norm, twice over; its polynomial's coefficients sum to 9.
    assert_close(out, want, terms=4096)
    cotangent = torch.randn(want.shape, dtype=torch.float64)
    for got, expected in zip(
        torch.autograd.grad(out, list(mine.values()), cotangent.to(dtype)),
        torch.autograd.grad(want, list(theirs.values()), cotangent),
        strict=True,
    ):
        assert_close(got, expected, terms=2**15)


@pytest.mark.slow
def test_gradients_by_finite_differences():
    t = problems.leaves(problems.tensors(1, 2, 1, 5, 5, 2, 1) | {"weight": kernel(3, 2)})
    mask = saccade.Padding([4], queries=[4])

    def function(q, k, v, w):
        return nystrom_attention(q, k, v, mask, landmarks=3, iterations=2, convolution=w)

    assert torch.autograd.gradcheck(function, tuple(t.values()))


@looped(("rows", "keys"), [(13, 13), (11, 13), (13, 11)])
@looped("landmarks", [13, 64])
def test_a_landmark_for_each_token_is_exact_attention(rows, keys, landmarks):
    """A pinv(A) A = A, for any A."""
    t = problems.tensors(rows=rows, keys=keys)
    leaves, others = problems.leaves(t), problems.leaves(t)
    out = call(leaves, landmarks=landmarks, iterations=None)
    want = saccade.attention(*others.values())
    condition = torch.linalg.cond(saccade.attention_weights(t["query"], t["key"])).max().item()
    bound = 64 * torch.finfo(torch.float64).eps * condition
    torch.testing.assert_close(out, want, rtol=0.0, atol=bound)
    for got, expected in zip(
        torch.autograd.grad(out.sum(), list(leaves.values())),
        torch.autograd.grad(want.sum(), list(others.values())),
        strict=True,
    ):
        # The derivative holds A's inverse twice.
        torch.testing.assert_close(got, expected, rtol=0.0, atol=bound * condition)


def test_enough_iterations_are_exact_attention_too():
    t = problems.tensors(rows=13)
    want = saccade.attention(*t.values())
    errors = [(call(t, landmarks=13, iterations=n) - want).abs().max().item() for n in (2, 6, 10, 14, 24)]
    assert all(late < early for early, late in itertools.pairwise(errors))
    assert errors[-1] < 1e-11 < errors[0]


def test_more_landmarks_come_closer():
    """On tokens that change slowly, means stand for what they are made of."""
    place = torch.linspace(0, 1, 240, dtype=torch.float64)[:, None] * torch.arange(1, 6)
    t = {name: torch.sin(place + shift).expand(1, 1, -1, -1) for shift, name in enumerate(("query", "key", "value"))}
    exact = saccade.attention(*t.values())
    errors = [(call(t, landmarks=m, iterations=None) - exact).abs().max().item() for m in (2, 4, 8, 16)]
    assert all(more > 10 * less for more, less in itertools.pairwise(errors))


# --- the pseudo-inverse -----------------------------------------------------------------------------------------------


def test_convergence_is_of_order_three():
    """Each eigenvalue x of A Z goes to x (13 - x (15 - x (7 - x))) / 4, so 1 - x goes to (1 - x)^3 (4 - x) / 4."""
    values = torch.tensor([0.9, 0.5, 0.05, 1e-4], dtype=torch.float64)
    matrix = torch.diag(values)[None, None]
    expected = values.square() / values.max()
    for n in range(12):
        got = torch.diagonal(matrix @ pseudo_inverse(matrix, n), dim1=-2, dim2=-1)[0, 0]
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            expected * (13 - expected * (15 - expected * (7 - expected))) / 4,
            1 - (1 - expected) ** 3 * (4 - expected) / 4,
        )
        expected = expected * (13 - expected * (15 - expected * (7 - expected))) / 4


@pytest.mark.parametrize("shape", [(5, 5), (7, 4), (4, 7)])
def test_the_iteration_goes_to_the_pseudo_inverse(shape):
    """Moore and Penrose's four conditions, of wide and tall matrices too."""
    A = torch.softmax(3 * torch.randn(2, 3, *shape, dtype=torch.float64), -1)
    Z = pseudo_inverse(A, 20)
    for left, right in ((A @ Z @ A, A), (Z @ A @ Z, Z), ((A @ Z).mT, A @ Z), ((Z @ A).mT, Z @ A)):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


def test_each_matrix_begins_by_its_own_norm():
    """A batch mate with a far greater norm changes no bit: the published code divides by the batch's greatest."""
    flat = torch.full((1, 1, 5, 5), 0.2, dtype=torch.float64) + 0.1 * torch.eye(5, dtype=torch.float64)
    steep = torch.zeros(1, 1, 5, 5, dtype=torch.float64)
    steep[..., 0] = 1.0
    both = pseudo_inverse(torch.cat((flat, steep)), 3)
    assert torch.equal(both[:1], pseudo_inverse(flat, 3))
    heads = pseudo_inverse(torch.cat((flat, steep), 1), 3)
    assert torch.equal(heads[:, :1], pseudo_inverse(flat, 3))


def test_batch_mates_change_no_bit():
    t = problems.tensors(3, 6, 3, 31, 31, 5, 7, dtype=torch.float32)
    t["query"][0] *= 9
    weight = kernel(5, dtype=torch.float32)
    for mask, own in ((None, None), (saccade.Padding([31, 9, 20], [31, 9, 20]), saccade.Padding([9], [9]))):
        out = call(t, mask, landmarks=8, convolution=weight)
        one = call({n: x[1:2] for n, x in t.items()}, own, landmarks=8, convolution=weight)
        assert torch.equal(out[1:2], one)


# --- landmarks and padding --------------------------------------------------------------------------------------------


@looped("count", [1, 2, 7, 13, 64])
def test_segments_share_the_tokens_out(count):
    numbers = torch.arange(0, 130)[:, None]
    edges = _edges(numbers, count)
    sizes = edges.diff(dim=1)
    assert edges[:, 0].eq(0).all() and edges[:, -1].eq(numbers[:, 0]).all()
    for n, row in zip(numbers[:, 0].tolist(), sizes, strict=True):
        used = row[: min(n, count)]
        assert row[min(n, count) :].eq(0).all()
        assert n == 0 or (used.min() >= 1 and used.max() - used.min() <= 1)


@pytest.mark.parametrize("bad", slow_but([0.0, math.nan, math.inf], math.nan))
@pytest.mark.parametrize(
    "places",
    [range(6), range(7, 13), [0, 1, 4, 5, 9, 11], [3, 9, 10], [8]],
    ids=["right", "left", "holes", "three", "one"],
)
def test_a_padded_item_gives_what_it_gives_alone(places, bad):
    places, n = list(places), len(places)
    t, weight = problems.tensors(rows=13), kernel(5)
    kept = torch.ones(2, 13, dtype=torch.bool)
    kept[1] = False
    kept[1, places] = True
    padded = {name: x.clone() for name, x in t.items()}
    for name, x in padded.items():
        x[1] = bad
        x[1][:, places] = t[name][1, :, :n]
    mine, theirs = problems.leaves(padded | {"weight": weight}), problems.leaves(t | {"weight": weight})
    out = call(mine, saccade.Padding(kept, kept), landmarks=4, convolution=mine["weight"])
    short = {name: theirs[name][1:, :, :n] for name in t}
    first = whole({name: theirs[name][:1] for name in t}, theirs["weight"], landmarks=4)
    second = whole(short, theirs["weight"], landmarks=4)
    assert_close(out[0], first[0], terms=4096)
    assert_close(out[1][:, places], second[0], terms=4096)
    assert (out[1][:, ~kept[1]] == 0).all()
    upstream = torch.ones_like(out)
    upstream[1][:, ~kept[1]] = bad
    got = torch.autograd.grad(out, list(mine.values()), upstream)
    expected = torch.autograd.grad(first.sum() + second.sum(), list(theirs.values()))
    for name, one, other in zip(mine, got, expected, strict=True):
        if name != "weight":
            assert (one[1][:, ~kept[1]] == 0).all()
            one = torch.stack((one[0], F.pad(one[1][:, places], (0, 0, 0, 13 - n))))
        assert_close(one, other, terms=2**15)


def test_two_sequences_have_landmarks_of_their_own():
    """Padding of keys alone, in a batch of contexts."""
    t = problems.tensors(rows=11)
    out = call(t, saccade.Padding([13, 6]), landmarks=4)
    want = whole({n: x[1:, :, : 6 if n != "query" else None] for n, x in t.items()}, landmarks=4)
    assert_close(out[1:], want, terms=4096)


def test_an_item_without_tokens_is_zero():
    t = problems.leaves(problems.tensors(rows=13))
    for mask in (saccade.Padding([0, 13]), saccade.Padding([0, 13], [0, 13]), saccade.Padding([5, 13], [0, 13])):
        out = call(t, mask, landmarks=4, convolution=kernel())
        assert (out[0] == 0).all() and (out[1] != 0).any()
        assert all((g[0] == 0).all() for g in torch.autograd.grad(out.sum(), list(t.values())))


@looped("sizes", [(0, 7, 7), (2, 0, 0), (2, 5, 0), (2, 0, 7)])
@looped("iterations", [6, None])
def test_empty_sizes(sizes, iterations):
    batch, rows, keys = sizes
    weight = None if (rows, keys) == (0, 7) else kernel()
    t = problems.leaves(problems.tensors(batch, 6, 3, rows, keys))
    out = call(t, convolution=weight, iterations=iterations)
    assert out.shape == (batch, 6, rows, 7) and (out == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), list(t.values())))


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e3, 1e8, 1e17])
def test_extreme_norms_stay_finite(size):
    """Rows that are one-hot, several of them the same: A is singular."""
    t = problems.leaves(problems.tensors(rows=61, keys=61, dtype=torch.float32))
    out = nystrom_attention(t["query"] * size, t["key"] * size, t["value"], landmarks=16)
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), list(t.values())))


def test_equal_tokens():
    """A is of rank one: every entry is 1 / m."""
    t = {name: x[:, :, :1].expand(-1, -1, 37, -1) for name, x in problems.tensors().items()}
    assert_close(call(t, landmarks=8), saccade.attention(*t.values()), terms=4096)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_float32_within(dtype):
    t = problems.tensors(rows=13, dtype=dtype)
    out = call(t, landmarks=4, convolution=kernel(dtype=torch.float32))
    assert out.dtype == dtype
    wide = call({n: x.float() for n, x in t.items()}, landmarks=4, convolution=kernel(dtype=torch.float32))
    assert torch.equal(out, wide.to(dtype))
    with torch.autocast("cpu", dtype):
        mixed = call({n: x.float() for n, x in t.items()}, landmarks=4, convolution=kernel(dtype=torch.float32))
    assert torch.equal(mixed, out)


def test_nothing_is_length_times_length():
    """Not even length times landmarks: what is largest grows with the length alone and is some value's size."""
    sizes = []
    for length in (1021, 2042):
        t = problems.leaves(problems.tensors(1, 2, 2, length, length, 4, 4, dtype=torch.float32))
        with Largest() as largest:
            call(t, landmarks=64, convolution=kernel(3, 2, torch.float32)).sum().backward()
        sizes.append(largest.numel)
    assert sizes[1] < 2.2 * sizes[0]
    assert sizes[1] < 2 * 2042 * 64


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_with_the_reason():
    t = problems.tensors(rows=13)
    with pytest.raises(
        ValueError, match="mask: Nystrom attention cannot be causal, since its landmarks are means over"
    ):
        call(t, saccade.Causal() & saccade.Padding([13, 4]))
    with pytest.raises(ValueError, match=r"takes Padding\(\.\.\.\), since a pair is never formed.*got Window"):
        call(t, saccade.Window(3, 3))
    with pytest.raises(ValueError, match="landmarks must be at least 1, got 0"):
        call(t, landmarks=0)
    with pytest.raises(ValueError, match="iterations must be at least 0, got -1"):
        call(t, iterations=-1)
    with pytest.raises(
        ValueError, match=r"convolution must be \(Hq, 1, width\) with Hq = 6 and an odd width.*\(6, 1, 4\)"
    ):
        call(t, convolution=kernel(4))
    with pytest.raises(TypeError, match="convolution is torch.float64, expected query's dtype torch.float32"):
        call({n: x.float() for n, x in t.items()}, convolution=kernel())
    with pytest.raises(ValueError, match="as many keys as queries, got 11 queries and 13 keys"):
        call(problems.tensors(rows=11), convolution=kernel())
    with pytest.raises(ValueError, match="scale must be finite, got inf"):
        call(t, scale=math.inf)


def test_configurations_that_make_no_sense():
    with pytest.raises(ValueError, match="landmarks must be at least 1, got 0"):
        NystromConfig(landmarks=0)
    with pytest.raises(TypeError, match=r"iterations must be an int, got 2\.0"):
        NystromConfig(iterations=2.0)
    with pytest.raises(ValueError, match="convolution: must be odd, so that it has a middle, got 4"):
        NystromConfig(convolution=4)


def test_the_module_begins_as_the_approximation():
    t = problems.tensors(rows=13)
    module = NystromConfig(landmarks=4, iterations=3, convolution=5).build(HeadSizes(30, 6, 3, 5, 7)).double()
    assert_close(module(*t.values(), scale=0.2), whole(t, landmarks=4, iterations=3, scale=0.2), terms=4096)
    with torch.no_grad():
        module.convolution.copy_(kernel(5))
    assert_close(module(*t.values()), whole(t, kernel(5), landmarks=4, iterations=3), terms=4096)
    assert not list(NystromConfig(convolution=None).build(HeadSizes(30, 6, 3, 5, 7)).parameters())

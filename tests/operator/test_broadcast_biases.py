"""A bias tensor of every shape that broadcasts, with entries that are not finite: each result and each derivative.

Each problem has one truth, the oracle's. With c the cotangents of the results and t the directions of the leaves, the
gradient of <J^T c, t> by c is J t, what forward mode gives, and by the leaves it is the second derivative both of
backward over backward and of forward over backward.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import oracle
import problems
import saccade
from problems import NATIVE, assert_close
from saccade.operator._backends import flex
from saccade.operator._checks import make_call
from slowly import slow_but

B, HQ, HKV, LQ, LK, D, DV = 2, 2, 1, 5, 7, 3, 2
FULL = (B, HQ, LQ, LK)
SHAPES = [
    tuple(size if whole else 1 for size, whole in zip(sizes, axes, strict=True))
    for sizes in (FULL, FULL[2:])
    for axes in itertools.product((False, True), repeat=len(sizes))
]
# Of four axes, whole or of size 1, an even number is whole: every three of them meet in each way there is. The other
# shapes say no more of any three: with -m slow.
EVEN = [shape for shape in SHAPES if sum(size > 1 for size in shape) % 2 == (len(shape) == 2)]
every_shape = pytest.mark.parametrize(
    "shapes", [EVEN, pytest.param([s for s in SHAPES if s not in EVEN], marks=pytest.mark.slow)], ids=["even", "odd"]
)
KINDS = ("-inf and a NaN value", "a NaN value", "a NaN key", "nan", "+inf", "all -inf and NaN")
every_kind = pytest.mark.parametrize("kind", KINDS)
# Of every kind is what takes the most time with -m slow alone: these three have a NaN in key and value, and -inf.
SOME = ("-inf and a NaN value", "a NaN key", "all -inf and NaN")
some_kinds = pytest.mark.parametrize("kind", slow_but(KINDS, *SOME))


@functools.cache
def tensors(shape, kind):
    """query, key, value and bias; what is poisoned stands in item 0 and, but for one kind, is seen by some query."""
    named = problems.tensors(B, HQ, HKV, LQ, LK, D, DV, dtype=torch.float64, seed=3)
    named["bias"] = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    corner = (0,) * len(shape)
    if "inf" in kind or kind == "nan":
        named["bias"][corner if "all" not in kind else ...] = float(kind.split()[1 if "all" in kind else 0])
    if "value" in kind or "all" in kind:
        named["value"][0, 0, 2] = math.nan
    if "key" in kind or "all" in kind:
        named["key"][0, 0, 3] = math.nan
    return named


def drawn(like):
    draw = torch.Generator().manual_seed(7)
    return [torch.randn(x.shape, dtype=torch.float64, generator=draw) for x in like]


def derivatives(out, lse, leaves):
    """Results, gradients, and those of <gradients, t> by leaves and cotangents, which are 0 on empty rows' lse."""
    c_out, c_lse = (c.to(out.dtype) for c in drawn((out, lse)))
    cotangents = [c_out.requires_grad_(), torch.where(lse == -math.inf, 0.0, c_lse).detach().requires_grad_()]
    first = problems.pull((out, lse), leaves, cotangents, create_graph=True)
    second = problems.pull(first, [*leaves.values(), *cotangents], [t.to(out.dtype) for t in drawn(first)])
    return [x.detach() for x in (out, lse, *first)], second


@functools.cache
def truth(shape, kind):
    leaves = problems.leaves(tensors(shape, kind))
    found = oracle.attend(leaves["query"], leaves["key"], leaves["value"], bias=leaves["bias"])
    return derivatives(found.out, found.lse, leaves), found.weights.detach()


def assert_all(got, want, what, *, poisoned=False):
    """Equal where the truth is finite and, if `poisoned`, not finite where it is NaN."""
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        at = f"{what}, number {number}"
        sound = torch.isfinite(other)
        assert one.shape == other.shape, at
        assert torch.isfinite(one[sound]).all() and not (poisoned and torch.isfinite(one[other.isnan()]).any()), at
        assert torch.equal(one[other == -math.inf], other[other == -math.inf].to(one.dtype)), at
        try:
            assert_close(torch.where(sound, one, 0.0), torch.where(sound, other, 0.0))
        except AssertionError as error:
            raise AssertionError(at) from error


@some_kinds
@every_shape
def test_results_and_derivatives(kind, exact, shapes):
    for shape in shapes:
        leaves = problems.leaves({n: t.to(problems.DTYPE) for n, t in tensors(shape, kind).items()})
        out, lse = problems.Problem(leaves).ours(backend=exact)
        (results, second), _ = truth(shape, kind)
        got, got_second = derivatives(out, lse, leaves)
        assert_all(got, results, f"{shape}: results and gradients", poisoned=True)
        assert_all(got_second, second, f"{shape}: second derivatives")


@some_kinds
@every_shape
def test_forward_mode_and_torch_func(kind, small_tiles, shapes):
    for shape in shapes:
        named = tensors(shape, kind)
        (results, second), _ = truth(shape, kind)

        def call(*given, names=tuple(named)):
            return problems.Problem(dict(zip(names, given, strict=True))).ours(backend="chunked")

        primals, tangents = tuple(named.values()), tuple(drawn(named.values()))

        def pulled(*given, call=call, results=results):
            c_out, c_lse = drawn(results[:2])
            return torch.func.vjp(call, *given)[1]((c_out, torch.where(results[1] == -math.inf, 0.0, c_lse)))

        _, pushed = torch.func.jvp(call, primals, tangents)
        assert_all(pushed, second[4:], f"{shape}: forward mode")
        _, twice = torch.func.jvp(pulled, primals, tangents)
        assert_all(twice, second[:4], f"{shape}: forward over backward")
        batched = torch.func.vmap(call)(*(torch.stack([x, x]) for x in primals))
        for item in (0, 1):
            assert_all([x[item] for x in batched], results[:2], f"{shape}: vmap", poisoned=True)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@every_shape
def test_attention_weights(kind, dtype, shapes):
    for shape in shapes:
        named, (_, want) = {n: t.to(dtype) for n, t in tensors(shape, kind).items()}, truth(shape, kind)
        for rows, keys in ((None, None), ([4, 0], [0, 6, 3])):
            got = saccade.attention_weights(named["query"], named["key"], bias=named["bias"], rows=rows, keys=keys)
            part = want if rows is None else want[:, :, rows][..., keys]
            assert_all([got], [part], f"{shape}: weights", poisoned=True)


@every_kind
@pytest.mark.parametrize("backend", ["reference", "chunked", NATIVE])
@every_shape
def test_statistics(kind, backend, shapes):
    for shape in shapes:
        named, ((results, _), weights) = tensors(shape, kind), truth(shape, kind)
        query, key, bias = (named[n].float() for n in ("query", "key", "bias"))
        got = saccade.statistics(query, key, bias=bias, top=1, backend=backend)
        seen = (named["bias"] != -math.inf).expand(FULL)
        assert torch.equal(got.keys_seen.expand(FULL[:3]), seen.sum(-1)), shape
        found = [got.lse, got.largest, got.top_weights[..., 0], got.received]
        want = [results[1], weights.amax(-1), weights.amax(-1), weights.sum(2)]
        assert_all(found, want, f"{shape}: statistics", poisoned=True)


@pytest.mark.parametrize("kind", ["-inf", "nan"])
@every_shape
def test_fused_kernels_of_pytorch(kind, shapes):
    for shape in shapes:
        named, ((results, _), _) = tensors(shape, kind), truth(shape, kind)
        assert_all([problems.Problem(named).out(backend="sdpa")], results[:1], f"{shape}: sdpa")
        single = {n: t.float() for n, t in named.items()}
        call = make_call(**single, mask=None, scale=None, softcap=None, sink=None, dropout=0.0, needs_lse=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # eager flex_attention warns that it is not compiled
            assert_all(flex.attend(call, flex_attention), results[:2], f"{shape}: flex")


@every_kind
@every_shape
def test_parts_of_the_keys_merge_to_the_whole(kind, shapes):
    for shape in shapes:
        named, ((results, _), _) = tensors(shape, kind), truth(shape, kind)
        parts = []
        for keys in (slice(0, 1), slice(1, 3), slice(3, 7)):
            part = named | {n: named[n][:, :, keys] for n in ("key", "value")}
            part["bias"] = named["bias"][..., keys] if shape[-1] > 1 else named["bias"]
            parts.append(problems.Problem(part).ours())
        assert_all(saccade.merge(parts), results[:2], f"{shape}: merge", poisoned=True)


def test_rows_switched_off_among_more_keys_than_one_block():
    # Products are filled up to blocks of 16: 33 keys take three, a column of one key only one.
    named = problems.tensors(1, 1, 1, 33, 33, 4, 4, dtype=torch.float64)
    named["bias"] = torch.zeros(1, 1, 33, 1, dtype=torch.float64)
    named["bias"][0, 0, 0] = -math.inf
    problem, leaves = problems.Problem(named), problems.leaves(named)
    out, want = problem.out(leaves), problem.truth(leaves).out
    assert_close(out, want)
    cotangents = [torch.ones_like(out)]
    assert_all(problems.pull([out], leaves, cotangents), problems.pull([want], leaves, cotangents), "gradients")

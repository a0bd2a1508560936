"""dtypes: what comes out, how far it is from float64 compared with plain PyTorch, autocast, mixtures."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import oracle
import problems
import saccade
from looped import looped
from problems import assert_close
from saccade.operator._backends.native._kernels import BF16_SETS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@looped("dtype", [torch.float64, *DTYPES])
@looped("name", ["wide_causal", "everything", "alibi"])
def test_output_and_gradient_dtypes(dtype, name, backend):
    problem = problems.CASES[name]()
    leaves = problems.leaves({k: t.to(dtype) for k, t in problem.tensors.items()})
    if backend == "native" and dtype == torch.float64:
        with pytest.raises(ValueError, match="(?s)native.*float64"):
            problem.ours(leaves, backend)
        return
    out, lse = problem.ours(leaves, backend)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    found = torch.autograd.grad(out.sum(), list(leaves.values()))
    assert all(g.dtype == dtype and g.isfinite().all() for g in found)


def plain(query, key, value, mask):
    """Attention as anyone would write it in PyTorch, in the inputs' dtype."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = query @ key.mT * query.shape[-1] ** -0.5
    return torch.softmax(logits.masked_fill(~mask, -torch.inf), -1) @ value


def fused(query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def errors(call, named, cotangent, truth):
    """Largest error of the output and of each gradient."""
    leaves = problems.leaves(named)
    out = call(*leaves.values())
    found = [out, *torch.autograd.grad(out, list(leaves.values()), cotangent.to(out.dtype))]
    return [(one.double() - other).abs().max().item() for one, other in zip(found, truth, strict=True)]


@every_dtype
@pytest.mark.parametrize("spread", [1.0, 4.0], ids=["mild logits", "sharp logits"])
def test_error_is_at_most_twice_plain_pytorchs(dtype, spread, backend):
    named = problems.tensors(1, 4, 2, 97, 101, 32, 31, dtype=dtype, seed=61)
    named["query"] = named["query"] * spread
    mask = torch.ones(97, 101).tril(4).bool()
    exact = problems.leaves({k: t.double() for k, t in named.items()})
    want = plain(*exact.values(), mask)
    cotangent = torch.randn(want.shape, dtype=torch.float64).to(dtype).double()
    truth = [want.detach(), *torch.autograd.grad(want, list(exact.values()), cotangent)]
    assert_close(
        oracle.attend(*(t[:, :, :5] for t in exact.values())).out,
        plain(*(t[:, :, :5] for t in exact.values()), torch.ones(5, 5).bool()),
    )

    def ours(query, key, value):
        return saccade.attention(query, key, value, saccade.Causal(), backend=backend)

    got = errors(ours, named, cotangent, truth)
    allowed = errors(lambda *x: plain(*x, mask), named, cotangent, truth)
    for mine, theirs in zip(got, allowed, strict=True):
        assert mine <= 2 * theirs, f"{got} against plain PyTorch's {allowed}"


@every_dtype
def test_output_error_is_that_of_rounding_the_result(dtype, exact):
    # Accumulated in float32 at least: half a unit of dtype for the result, and float32's own error of a sum of
    # 101 weights and 32 products a logit. Processors with products of bfloat16 round the weights to it as well.
    named = problems.tensors(1, 4, 2, 97, 101, 32, 31, dtype=dtype, seed=67)
    out = saccade.attention(*named.values(), backend=exact).double()
    want = oracle.attend(*named.values()).out
    size = named["value"].double().abs().max()
    half_units = torch.finfo(dtype).eps / 2 * want.abs()
    if exact == "native" and dtype == torch.bfloat16 and saccade.explain(*named.values()).instructions in BF16_SETS:
        half_units = half_units + torch.finfo(dtype).eps / 2 * size
    assert ((out - want).abs() <= half_units + 8 * 128 * 2**-24 * size).all()


@every_dtype
def test_log_sum_exp_error(dtype, exact):
    named = problems.tensors(1, 4, 2, 97, 101, 32, 31, dtype=dtype, seed=71)
    _, lse = saccade.attention_with_lse(*named.values(), backend=exact)
    # in float32 from the same inputs, whatever their dtype
    assert_close(lse, oracle.attend(*named.values()).lse)


def test_float16_does_not_overflow_where_float32_would_not(backend):
    # logits of 300 * 300 * 32: beyond 65504; the softmax is one-hot at the query's own index
    query = torch.zeros(1, 1, 7, 32, dtype=torch.float16)
    query[0, 0, torch.arange(7), torch.arange(7)] = 300.0
    value = torch.randn(1, 1, 7, 5, dtype=torch.float16)
    out, lse = saccade.attention_with_lse(query, query, value, scale=32.0, backend=backend)
    assert torch.equal(out, value)
    assert_close(lse, torch.full((1, 1, 7), 300.0 * 300 * 32))


@looped("inputs", ["fff", "bbb", "fbf", "bff", "fhb", "ddd", "fdd"])
def test_autocast_casts_as_sdpa_does(inputs, backend):
    named = problems.tensors(heads=3)
    of = {"f": torch.float32, "b": torch.bfloat16, "h": torch.float16, "d": torch.float64}
    given = [t.to(of[c]) for t, c in zip(named.values(), inputs, strict=True)]
    with torch.autocast("cpu", torch.bfloat16):
        try:
            theirs = F.scaled_dot_product_attention(*given)
        except RuntimeError:
            with pytest.raises((ValueError, TypeError), match="dtype"):
                saccade.attention(*given, backend=backend)
            return
        if backend == "native" and theirs.dtype == torch.float64:
            with pytest.raises(ValueError, match="(?s)native.*float64"):
                saccade.attention(*given, backend=backend)
            return
        out = saccade.attention(*given, backend=backend)
    assert out.dtype == theirs.dtype
    unit = torch.finfo(theirs.dtype).eps
    rounded = oracle.attend(*(t.to(theirs.dtype) for t in given)).out
    # half a unit for the result and, at most, one for weights in that dtype
    assert (out.double() - rounded).abs().max() <= 4 * unit * named["value"].abs().max()


def test_autocast_gradients_reach_the_original_dtypes(backend):
    leaves = problems.leaves({k: t.float() for k, t in problems.tensors().items()})
    with torch.autocast("cpu", torch.bfloat16):
        out = saccade.attention(*leaves.values(), saccade.Causal(), backend=backend)
    assert out.dtype == torch.bfloat16
    found = torch.autograd.grad(out.float().sum(), list(leaves.values()))
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in found)


def test_autocast_with_sink_bias_and_backward_inside(backend):
    problem = problems.CASES["everything"]()
    leaves = problems.leaves({k: t.float() for k, t in problem.tensors.items()})
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = problem.ours(leaves, backend)
        found = torch.autograd.grad(out.float().sum(), list(leaves.values()))
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in found)


def test_autocast_switched_off_changes_nothing(backend):
    named = {k: t.float() for k, t in problems.tensors().items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert saccade.attention(*named.values(), backend=backend).dtype == torch.float32


@looped("odd", ["query", "key", "value"])
def test_mixed_dtypes_are_refused(odd, backend):
    named = {k: t.float() for k, t in problems.tensors().items()}
    named[odd] = named[odd].bfloat16()
    with pytest.raises((ValueError, TypeError), match="(?s)dtype.*(bfloat16|float32)"):
        saccade.attention(*named.values(), backend=backend)


@looped("dtype", [torch.int64, torch.bool, torch.complex64, torch.uint8])
def test_other_dtypes_are_refused(dtype, backend):
    named = {k: t.to(dtype) for k, t in problems.tensors().items()}
    with pytest.raises(TypeError, match=f"(?s)query.*{str(dtype).split('.')[1]}"):
        saccade.attention(*named.values(), backend=backend)

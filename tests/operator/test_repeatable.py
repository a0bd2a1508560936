"""Same input, same bits; whatever the batch mates, their order and the number of threads."""

from __future__ import annotations

import pytest
import torch

import problems
import saccade
from looped import looped
from problems import CASES, NATIVE

DTYPES = [torch.float32, torch.bfloat16]
every_dtype = looped("dtype", DTYPES)

# Sizes on both sides of where a matrix library changes its kernel: one query, odd ones, and several real tiles.
SIZES = {
    "one query": {"rows": 1, "keys": 67, "width": 16, "value_width": 16},
    "one key": {"rows": 19, "keys": 1, "width": 8, "value_width": 8},
    "odd": {"rows": 29, "keys": 31, "width": 7, "value_width": 11},
    "usual": {"rows": 61, "keys": 61, "width": 64, "value_width": 64},
    "tiles": {"rows": 263, "keys": 269, "width": 16, "value_width": 16},
}
every_size = looped("size", SIZES)
every_backend = looped("backend", ["auto", "reference", "chunked", NATIVE])
exact_backends = looped("exact", ["reference", "chunked", NATIVE])


def draw(size, dtype, batch=3, heads=2, kv_heads=1):
    return problems.tensors(batch, heads, kv_heads, **SIZES[size], dtype=dtype, seed=73)


def everything(named, backend, mask=None, **options):
    """Output, lse and gradients; the cotangent depends on its place in the item alone.

    `auto` is asked for the output alone: a differentiable lse would rule out half of what it may choose.
    """
    leaves = problems.leaves(named)
    call = saccade.attention if backend == "auto" else saccade.attention_with_lse
    results = call(*leaves.values(), mask, backend=backend, **options)
    results = [results] if backend == "auto" else list(results)
    cotangent = torch.randn(results[0].shape[1:], generator=torch.Generator().manual_seed(79)).to(results[0].dtype)
    cotangents = [cotangent.expand(results[0].shape), *(torch.ones_like(x) for x in results[1:])]
    return [*(x.detach() for x in results), *torch.autograd.grad(results, list(leaves.values()), cotangents)]


def assert_same_bits(got, want):
    for n, (one, other) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(one, other), f"result {n} differs by {(one - other).abs().max().item()}"


@pytest.mark.slow
@every_dtype
@every_size
@every_backend
def test_twice_the_same(size, dtype, backend):
    named = draw(size, dtype)
    assert_same_bits(everything(named, backend, saccade.Causal()), everything(named, backend, saccade.Causal()))


@pytest.mark.slow
@every_dtype
@every_size
@looped("masked", [False, True])
@every_backend
def test_batch_mates_do_not_matter(size, dtype, masked, backend):
    named = draw(size, dtype)
    mask = saccade.Causal() if masked else None
    whole = everything(named, backend, mask)
    for b in range(3):
        alone = everything({k: t[b : b + 1] for k, t in named.items()}, backend, mask)
        assert_same_bits(alone, [x[b : b + 1] for x in whole])


@pytest.mark.slow
@every_dtype
@every_size
@every_backend
def test_order_in_the_batch_does_not_matter(size, dtype, backend):
    named, order = draw(size, dtype), [2, 0, 1]
    whole = everything(named, backend)
    assert_same_bits(everything({k: t[order] for k, t in named.items()}, backend), [x[order] for x in whole])


@pytest.mark.slow
@looped("size", ["one query", "odd", "tiles"])
@exact_backends
def test_batch_mates_with_other_lengths_do_not_matter(size, exact):
    named = draw(size, torch.float32)
    keys = SIZES[size]["keys"]
    lengths = torch.tensor([keys, keys // 2, 0])
    whole = everything(named, exact, saccade.Padding(lengths))
    for b in range(3):
        one = {k: t[b : b + 1] for k, t in named.items()}
        alone = everything(one, exact, saccade.Padding(lengths[b : b + 1]))
        assert_same_bits(alone, [x[b : b + 1] for x in whole])


@looped("batch", [1, 2, 5, 17])
@every_backend
def test_large_batches_are_the_same_items(batch, backend):
    named = draw("odd", torch.float32, batch=17)
    whole = everything(named, backend, saccade.Causal())
    part = everything({k: t[:batch] for k, t in named.items()}, backend, saccade.Causal())
    assert_same_bits(part, [x[:batch] for x in whole])


@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_auto_and_single_items_without_gradients(backend):
    for size in SIZES:
        named = draw(size, torch.float32)
        with torch.no_grad():
            whole = saccade.attention(*named.values(), backend=backend)
            alone = [saccade.attention(*(t[b : b + 1] for t in named.values()), backend=backend) for b in range(3)]
        assert torch.equal(torch.cat(alone), whole), size


@pytest.mark.slow
@every_dtype
@every_size
@exact_backends
def test_threads_do_not_matter(size, dtype, exact, threads):
    named = draw(size, dtype)
    found = []
    for n in (1, 2):
        threads(n)
        found.append(everything(named, exact, saccade.Causal(), softcap=3.0))
    assert_same_bits(*found)


@every_size
def test_threads_do_not_matter_to_auto(size, threads):
    """But for one query on PyTorch's kernel, which may answer with other last bits: then `explain` has said so."""
    named = draw(size, torch.float32)
    plan = saccade.explain(*named.values())
    if size == "one query" and plan.backend == "sdpa":
        assert "threads" in "".join(plan.lacks)
        return
    found = []
    for n in (1, 2):
        threads(n)
        found.append(everything(named, "auto"))
    assert_same_bits(*found)


@looped("name", ["everything", "alibi", "relative_both_ways", "bias_matrix", "sink_with_empty_rows"])
@every_backend
def test_gradients_of_shared_parameters_are_repeatable(name, backend, threads):
    problem = CASES[name]()
    found = []
    for n in (1, 2, 2):
        threads(n)
        leaves = problems.leaves({k: t.float() for k, t in problem.tensors.items()})
        out, lse = problem.ours(leaves, backend)
        total = out.sum() + torch.where(lse == -torch.inf, 0.0, lse).sum()
        found.append(torch.autograd.grad(total, list(leaves.values())))
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])

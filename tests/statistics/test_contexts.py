"""Wherever a call is made: under autograd, autocast, inference mode, torch.func; with any strides and dtype."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from dataclasses import fields

import pytest
import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor

import dense_statistics
import problems
import saccade
from looped import looped
from problems import NATIVE


def tensors_of(statistics):
    found = [getattr(statistics, field.name) for field in fields(statistics)]
    while found:
        thing = found.pop()
        if isinstance(thing, dict):
            found += thing.values()
        elif isinstance(thing, Tensor):
            yield thing


def same(left, right):
    pairs = list(zip(tensors_of(left), tensors_of(right), strict=True))
    assert len(pairs) > 30
    return all(torch.equal(a, b) for a, b in pairs)


def run(named, backend="auto", **more):
    options = {
        "value": named["value"],
        "bias": named.get("bias"),
        "sink": named.get("sink"),
        "top": 2,
        "histograms": True,
    }
    return saccade.statistics(named["query"], named["key"], saccade.Causal(), backend=backend, **options | more)


def drawn(**more):
    named = problems.tensors(**more)
    draw = torch.Generator().manual_seed(3)
    bias, sink = torch.randn(11, 13, generator=draw), torch.randn(6, generator=draw)
    return named | {"bias": bias.to(named["query"].dtype), "sink": sink.to(named["query"].dtype)}


def test_nothing_has_a_graph_and_nothing_given_is_changed(backend):
    named = drawn()
    before = {name: tensor.clone() for name, tensor in named.items()}
    leaves = problems.leaves(named)
    got = run(leaves, backend)
    assert same(got, run(named, backend))
    assert not any(tensor.requires_grad for tensor in tensors_of(got))
    assert all(torch.equal(named[name], before[name]) and leaves[name].grad is None for name in named)
    assert torch.is_grad_enabled()


def test_inference_mode(backend):
    named = drawn()
    with torch.inference_mode():
        got = run({name: tensor.clone() for name, tensor in named.items()}, backend)
    assert same(got, run(named, backend))


def test_forward_mode_tangents_are_left_behind():
    named = drawn()
    with fwd.dual_level():
        dual = {name: fwd.make_dual(tensor, torch.ones_like(tensor)) for name, tensor in named.items()}
        got = run(dual)
        assert all(fwd.unpack_dual(tensor).tangent is None for tensor in tensors_of(got))
    assert same(got, run(named))


def test_inside_of_torch_func():
    named, seen = drawn(), []

    def loss(query):
        seen.append(run(named | {"query": query}))
        return saccade.attention(query, named["key"], named["value"]).sum()

    torch.func.grad(loss)(named["query"])
    assert same(seen[0], run(named))


@looped("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype, backend):
    named = drawn(dtype=dtype)
    got, wide = run(named, backend), {name: tensor.double() for name, tensor in named.items()}
    assert got.entropy.dtype == got.received.dtype == got.heads["query"]["norm"].dtype == torch.float32
    seen = saccade.Causal().dense(11, 13)
    judge = dense_statistics.Dense(wide["query"], wide["key"], seen, bias=wide["bias"], sink=wide["sink"])
    off = dense_statistics.bound(judge, wide["query"], wide["key"], torch.float32)
    torch.testing.assert_close(got.entropy.double(), judge.entropy, rtol=0, atol=5 * off)
    torch.testing.assert_close(got.received.double(), judge.received, rtol=0, atol=11 * off)
    torch.testing.assert_close(got.mass["sink"].double(), judge.sink, rtol=0, atol=off)


def test_float64_gives_float64():
    got = run(drawn(dtype=torch.float64))
    floating = {tensor.dtype for tensor in tensors_of(got) if tensor.is_floating_point()}
    assert floating == {torch.float64}


def test_autocast_casts_as_it_does_for_attention():
    named = drawn(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(named)
    cast = {name: named[name].bfloat16() for name in ("query", "key", "value")}
    assert same(got, run(named | cast))
    assert not torch.equal(got.entropy, run(named).entropy)


def test_any_strides(backend):
    named = drawn()
    odd = dict(named)
    for name in ("query", "key", "value"):
        batch, heads, length, width = named[name].shape
        memory = torch.full((batch, length, heads, 2 * width), float("nan"), dtype=named[name].dtype)
        memory[..., ::2] = named[name].transpose(1, 2)
        odd[name] = memory[..., ::2].transpose(1, 2)
        assert odd[name].stride(-1) == 2
    want, got = run(named, backend), run(odd, backend)
    for name in ("lse", "entropy", "distance", "received"):
        tiny = torch.finfo(got.lse.dtype).eps
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=64 * tiny, atol=64 * tiny)
    assert torch.equal(got.heads["query"]["max"], want.heads["query"]["max"])


@pytest.mark.parametrize("backend", ["chunked", NATIVE])
def test_same_input_same_bits_whatever_the_threads(backend, threads):
    named = drawn(rows=257, keys=263, dtype=torch.float32)
    named["bias"] = None
    found = []
    for count in (1, 2, 3):
        threads(count)
        found.append(run(named, backend))
    assert same(found[0], found[1]) and same(found[0], found[2])


def test_backends_agree():
    """All in float32, so that all take the call: the judge's tolerance, twice."""
    named = drawn(dtype=torch.float32)
    got = [run(named, backend) for backend in ("reference", "chunked", "auto")]
    wide = {name: tensor.double() for name, tensor in named.items()}
    seen = saccade.Causal().dense(11, 13)
    judge = dense_statistics.Dense(wide["query"], wide["key"], seen, bias=wide["bias"], sink=wide["sink"])
    off = 2 * dense_statistics.bound(judge, wide["query"], wide["key"], torch.float32)
    for other in got[1:]:
        for name in ("lse", "entropy", "largest", "received"):
            torch.testing.assert_close(getattr(other, name), getattr(got[0], name), rtol=0, atol=11 * off)
        assert torch.equal(other.largest_at, got[0].largest_at)
        assert torch.equal(other.top_keys, got[0].top_keys)
        assert torch.equal(other.heads["query"]["counts"], got[0].heads["query"]["counts"])


def test_the_biases_own_placement_is_used_where_the_mask_has_none():
    named = problems.tensors()
    placed = saccade.ALiBi(torch.ones(6, dtype=torch.float64)).at(5)
    got = saccade.statistics(named["query"], named["key"], bias=placed)
    same_place = saccade.statistics(
        named["query"], named["key"], saccade.Window(None, None).at(5), bias=saccade.ALiBi(placed.parameter)
    )
    assert torch.equal(got.distance, same_place.distance)
    assert not torch.equal(got.distance, saccade.statistics(named["query"], named["key"]).distance)


def test_one_mask_serves_calls_of_several_sizes():
    mask = saccade.Causal() & saccade.Padding([7, 13])
    for rows, keys in ((11, 13), (13, 17), (11, 13), (11, 17)):
        named = problems.tensors(rows=rows, keys=keys)
        got = saccade.statistics(named["query"], named["key"], mask)
        fresh = saccade.statistics(named["query"], named["key"], saccade.Causal() & saccade.Padding([7, 13]))
        assert same(got, fresh)
        assert torch.equal(got.keys_seen.expand(2, 6, rows), mask.dense(rows, keys).sum(-1).expand(2, 6, rows))


def test_what_is_remembered_of_a_mask_goes_with_it():
    named = problems.tensors()
    mask = saccade.Causal() & saccade.Padding([7, 11])
    saccade.statistics(named["query"], named["key"], mask)
    known, unknown = (one._remembered("visibility", (11, 13)) for one in (mask, copy.deepcopy(mask)))
    assert known is not None and unknown is None
    assert mask.at(0)._remembered("visibility", (11, 13)) is None
    kept = weakref.ref(known.seen)
    del known
    del mask
    gc.collect()
    assert kept() is None


def test_what_a_mask_shows_is_not_remembered_where_a_bias_hides_more():
    named, mask = problems.tensors(), saccade.Causal()
    saccade.statistics(named["query"], named["key"], mask)
    bias = torch.zeros(11, 13, dtype=named["query"].dtype)
    bias[:, 0] = -torch.inf
    got = saccade.statistics(named["query"], named["key"], mask, bias=bias)
    assert (got.keys_seen.flatten() == torch.arange(2, 13)).all()
    assert (got.mass["first"] > 0).all()  # key 1 is the first now
    assert (got.received[..., 0] == 0).all()


def test_threads_share_nothing_but_masks():
    named, mask = drawn(dtype=torch.float32), saccade.Causal()
    found = []

    def work():
        found.extend(saccade.statistics(named["query"], named["key"], mask, top=2).entropy for _ in range(5))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    want = saccade.statistics(named["query"], named["key"], saccade.Causal()).entropy
    assert len(found) == 15 and all(torch.equal(want, entropy) for entropy in found)


def test_a_compiled_function_is_left_where_it_calls_and_taken_up_after():
    named, mask, graphs = drawn(dtype=torch.float32), saccade.Causal(), []

    def backend(graph, example):
        graphs.append([node.name for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    @torch.compile(backend=backend)
    def layer(query, key):
        found = saccade.statistics(query * 2, key, mask, top=2)
        return found, query + 1

    torch._dynamo.reset()
    try:
        for _ in range(2):
            got, after = layer(named["query"], named["key"])
    finally:
        torch._dynamo.reset()
    assert same(got, saccade.statistics(named["query"] * 2, named["key"], mask, top=2))
    assert torch.equal(after, named["query"] + 1)
    assert graphs == [["mul"], ["add"]]  # before it and after it, and nothing of what it does itself


def test_in_one_graph_it_is_refused_with_a_reason():
    named = drawn(dtype=torch.float32)
    compiled = torch.compile(lambda query: run(named | {"query": query}).entropy, fullgraph=True, backend="eager")
    try:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="saccade.statistics looks at the values of tensors"):
            compiled(named["query"])
    finally:
        torch._dynamo.reset()


@looped("mask", [None, saccade.Causal(), saccade.Documents(torch.arange(13) // 5)])
def test_a_default_device_changes_nothing(mask, backend):
    named = problems.tensors(rows=13)
    want = saccade.statistics(named["query"], named["key"], mask, histograms=True, backend=backend)
    with torch.device("meta"):
        fresh = None if mask is None else mask.at(0)  # nothing is remembered of it
        got = saccade.statistics(named["query"], named["key"], fresh, histograms=True, backend=backend)
    assert same(got, want)

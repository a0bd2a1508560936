"""Any sequence of steps, rollbacks and reorderings, against the parallel forward of each item alone."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from looped import looped
from nn.cache.decoding import BIASES, KINDS, LONGEST, MASKS, Decoding
from saccade.nn.cache import ContextLayer, GrowingLayer, KVCache, StaticLayer, WindowLayer


@st.composite
def moves(draw, most):
    """("step", counts, rows, side) | ("rollback", counts) | ("reorder", items); counts are cut to what fits."""
    found = []
    for _ in range(draw(st.integers(1, most))):
        kind = draw(st.sampled_from(["step", "step", "step", "rollback", "reorder"]))
        counts = draw(
            st.one_of(st.integers(0, 9).map(lambda n: [n] * 3), st.lists(st.integers(0, 9), min_size=3, max_size=3))
        )
        if kind == "step":
            found.append((kind, counts, draw(st.integers(0, 2)), draw(st.sampled_from(["left", "right", "middle"]))))
        else:
            found.append((kind, [n % 3 for n in counts] if kind == "reorder" else counts))
    return found


def play(run: Decoding, sequence) -> None:
    top = [0, 0, 0]
    for move, counts, *rest in sequence:
        if move == "reorder":
            if sum(run.lengths):
                run.reorder(counts)
                top = [top[b] for b in counts]
        elif move == "rollback":
            counts = [min(n, can_forget(run, b, top[b])) for b, n in enumerate(counts)]
            run.rollback(counts if len(set(counts)) > 1 else counts[0])
        else:
            more, side = rest
            counts = [min(n, LONGEST - have) for n, have in zip(counts, run.lengths, strict=True)]
            run.step(counts, rows=max(counts) + more, side=side)
        top = [max(pair) for pair in zip(top, run.lengths, strict=True)]


def can_forget(run, item, top):
    length, cache = run.lengths[item], run.cache
    if isinstance(cache, WindowLayer) and top > cache.sinks + cache.window + cache.slack:
        return max(0, length - (top - cache.slack))
    return length


FIXTURES = [HealthCheck.function_scoped_fixture]  # what they set once, they need to set once


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=7, suppress_health_check=FIXTURES)
@given(sequence=moves(5))
def test_any_sequence(kind, sequence):
    play(Decoding(KINDS[kind](), "documents", "alibi"), sequence)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, suppress_health_check=FIXTURES)
@given(sequence=moves(12), mask=st.sampled_from(list(MASKS)), bias=st.sampled_from(list(BIASES)))
def test_any_longer_sequence(kind, sequence, mask, bias):
    play(Decoding(KINDS[kind](), mask, bias), sequence)


@looped("kind", KINDS)
def test_reorder(kind):
    run = Decoding(KINDS[kind](), "causal")
    run.step([6, 2, 9], side="left")
    run.reorder([2, 0, 2])  # one beam dies, another splits
    run.step([1, 1, 1])
    run.reorder([1, 1, 1, 0, 2])  # five items
    assert run.lengths == [7, 7, 7, 10, 10]
    run.step([1, 3, 0, 1, 1])
    run.reorder([3])  # one
    assert run.cache.length == 11
    run.step([2])


@looped("kind", KINDS)
def test_reset_takes_another_batch(kind):
    run = Decoding(KINDS[kind](), "causal")
    run.step([5, 9, 1])
    run.cache.reset()
    assert run.cache.length == 0
    other = Decoding(run.cache, "causal", batch=2, seed=1)
    other.step([8, 8])
    other.step([1, 1])


@pytest.mark.parametrize("kind", ["growing", "static", "static tensors"])
def test_rolled_back_tokens_are_replaced(kind):
    run = Decoding(KINDS[kind](), "causal", "relative")
    run.step([8, 3, 5], side="left")
    run.rollback([4, 0, 5])
    run.step([2, 2, 2])
    run.rollback(2)
    assert run.lengths == [4, 3, 0]
    run.step([1, 1, 1])
    run.rollback([5, 4, 1])
    assert run.cache.length == 0
    run.step([3, 3, 3])


@pytest.mark.parametrize("sinks", [0, 2])
def test_a_ring_takes_back_as_much_as_its_slack(sinks):
    run = Decoding(WindowLayer(4, sinks=sinks, slack=3), "causal")
    run.step([sinks + 7] * 3)
    run.rollback(sinks + 6)  # nothing has been overwritten
    run.step([sinks + 11] * 3)
    run.rollback(1)
    run.rollback([2, 1, 0])
    with pytest.raises(ValueError, match="rollback: 1 tokens, but a ring of slack 3 .* can take back at most 0 now"):
        run.cache.rollback(1)
    with pytest.raises(ValueError, match="rollback: 2 tokens, but a ring of slack 3 .* can take back at most 1 now"):
        run.cache.rollback(torch.tensor([0, 2, 0]))
    assert run.cache.length.tolist() == run.lengths  # refused is refused whole
    run.step([1, 1, 1])
    run.step([2, 3, 5], side="left")


def test_all_layers_go_together():
    cache = KVCache([GrowingLayer(), StaticLayer(LONGEST), GrowingLayer()])
    runs = [Decoding(layer, seed=n) for n, layer in enumerate(cache)]
    context = torch.randn(3, 2, 4, 5)
    cache.contexts[1].get(lambda: (context, context + 1))
    for run in runs:
        run.step([6, 2, 4])
    assert len(cache) == 3 and cache.length.tolist() == [6, 2, 4]
    cache.reorder(torch.tensor([2, 2, 0, 1]))
    assert cache.length.tolist() == [4, 4, 6, 2]
    torch.testing.assert_close(cache.contexts[1].get(lambda: 1 / 0)[1], context[[2, 2, 0, 1]] + 1)
    cache.rollback(torch.tensor([0, 4, 1, 2]))
    for run in runs:
        run.tokens = [run.tokens[2], [], run.tokens[0][:5], []]
        run.step([1, 1, 1, 1])
    assert cache.length.tolist() == [5, 1, 6, 1]
    cache.reset()
    assert cache.length == 0 and cache.contexts[1].nbytes == 0


def test_a_rollback_that_one_layer_refuses_changes_none():
    cache = KVCache([GrowingLayer(), WindowLayer(3)])
    for layer in cache:
        Decoding(layer).step([9] * 3)
    with pytest.raises(ValueError, match="slack 0"):
        cache.rollback(2)
    assert [layer.length for layer in cache] == [9, 9]


def test_a_context_is_projected_once():
    layer, key, value = ContextLayer(), torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 5)
    assert layer.get(lambda: (key, value), 2)[0] is key
    assert layer.get(lambda: 1 / 0)[1] is value
    layer.reorder(torch.tensor([0, 1]))
    assert layer.get(lambda: 1 / 0)[1] is value  # nothing to copy
    layer.reorder(torch.tensor([1]))
    torch.testing.assert_close(layer.get(lambda: 1 / 0)[1], value[1:])
    with pytest.raises(ValueError, match="cache: it holds a context for a batch of 1, but queries for 2 came"):
        layer.get(lambda: 1 / 0, 2)
    layer.reset()
    with pytest.raises(ValueError, match="a context for a batch of 2, but queries for 3"):
        layer.get(lambda: (key, value), 3)
    assert layer.get(lambda: (value, key))[0] is value  # what was refused is not kept

"""Decoding step by step equals the parallel forward, for every kind of cache, at every step."""

from __future__ import annotations

import pytest

from looped import looped
from nn.cache.decoding import BIASES, KINDS, MASKS, Decoding
from slowly import alternate, slow_but

# Uniform chunks: one by one past two turns of every ring; a prompt, then ones; across the wrap; longer than the ring.
CHUNKS = {
    "ones": [1] * 19,
    "prompt": [11, 1, 1, 1, 1, 1],
    "across": [4, 3, 2, 3, 4, 1, 3],
    "longer": [2, 13, 1, 10, 9, 1],
    "with nothing": [3, 0, 1, 0, 8],
}
# Item by item: (counts, side of the padding)
UNEVEN = {
    "right": [([7, 2, 4], "right"), ([1, 1, 1], "right"), ([3, 1, 2], "right"), ([1, 1, 1], "right")],
    "left": [([7, 2, 4], "left"), ([1, 1, 1], "left"), ([2, 4, 1], "left"), ([1, 1, 1], "left")],
    "finished": [([3, 5, 2], "left"), ([1, 0, 1], "right"), ([0, 0, 1], "right"), ([1, 1, 0], "left")],
    "long": [([2, 9, 12], "right"), ([13, 1, 8], "left"), ([6, 11, 7], "middle"), ([1, 0, 1], "right")],
    "same": [([3, 3, 3], "middle"), ([1, 1, 1], "left"), ([9, 9, 9], "left"), ([2, 2, 2], "right")],
}


def decode(run, chunks):
    for number, count in enumerate(chunks):
        run.step([count] * 3)
        assert run.cache.length == sum(chunks[: number + 1])


def decode_uneven(run, steps, more=0):
    for counts, side in steps:
        run.step(counts, rows=max(counts) + more, side=side)
        length = run.cache.length
        assert ([length] * 3 if isinstance(length, int) else length.tolist()) == run.lengths


@looped("kind", KINDS)
@looped("chunks", CHUNKS)
def test_uniform(kind, chunks):
    decode(Decoding(KINDS[kind]()), CHUNKS[chunks])


@looped("kind", KINDS)
@looped("steps", UNEVEN)
def test_lengths_of_their_own(kind, steps):
    decode_uneven(Decoding(KINDS[kind]()), UNEVEN[steps], more=2 if steps == "same" else 0)


@pytest.mark.parametrize(("kind", "mask", "uneven"), alternate([*KINDS], [*MASKS], [False, True]))
def test_masks(kind, mask, uneven):
    run = Decoding(KINDS[kind](), mask)
    if uneven:
        decode_uneven(run, UNEVEN["long"])
    else:
        decode(run, [7, 1, 1, 3, 12, 1])


@pytest.mark.parametrize(("kind", "bias"), alternate([*KINDS], [name for name in BIASES if name != "no bias"]))
@pytest.mark.parametrize("mask", slow_but(["causal", "none"], "causal"))
def test_biases(kind, bias, mask):
    decode(Decoding(KINDS[kind](), mask, bias), [7, 1, 1, 3, 12, 1])
    decode_uneven(Decoding(KINDS[kind](), mask, bias), UNEVEN["long"])
    decode_uneven(Decoding(KINDS[kind](), mask, bias), UNEVEN["left"][:3])

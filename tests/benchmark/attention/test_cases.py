"""Operations and bytes of a case are those that one counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from looped import looped
from saccade.benchmark.attention import Case, CaseInputs

CASE = Case(7, 13, "causal", "forward", "float32", batch=3, heads=6, kv_heads=2, width=5, value_width=11)


def test_operations_are_counted_pair_by_pair():
    # Rows stand at positions 6 to 12 and see as many keys and one: 7 + 8 + ... + 13.
    pairs = 3 * sum(range(7, 14))
    assert CASE.pairs == pairs
    assert CASE.flops == 2 * (5 + 11) * pairs * 6
    assert CASE.work == pairs / (3 * 7 * 13)


@looped(("stage", "times"), [("recorded", 1), ("backward", 2.5), ("forward+backward", 3.5), ("decode", 1)])
def test_stages_do_multiples_of_a_forward(stage, times):
    assert replace(CASE, stage=stage).flops == times * CASE.flops


def test_a_full_forward_is_four_times_what_the_design_says():
    case = Case(64, 64, heads=8, kv_heads=8, width=16, value_width=16)
    assert case.flops == 4 * 8 * 64 * 64 * 16


@looped(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2), ("float64", 8)])
def test_bytes(dtype, size):
    case = replace(CASE, dtype=dtype)
    keys = 3 * 2 * 13
    assert case.bytes_read == size * keys * (5 + 11)


def test_decoding_counts_the_keys_that_are_seen():
    decode = Case(1, 101, "window:10", "decode", heads=2, kv_heads=2, width=3, value_width=3)
    assert decode.bytes_read == 10 * 2 * 6 * 4
    assert decode.amount == decode.bytes_read
    several = Case(4, 101, "window:10", "decode", heads=2, kv_heads=2, width=3, value_width=3)
    assert several.bytes_read == 13 * 2 * 6 * 4
    padded = Case(1, 100, "padding:half", "decode", batch=2, heads=1, kv_heads=1, width=1, value_width=1)
    assert padded.bytes_read == (25 + 75) * 2 * 4


def test_labels_say_what_is_unusual():
    assert CASE.label == "forward float32 causal B=3 H=6/2 Lq=7 Lk=13 D=5/11"
    assert Case(64, 64).label == "forward float32 full H=8 L=64 D=64"


@looped(
    ("change", "words"),
    [
        ({"heads": 0}, "heads must be at least 1, got 0"),
        ({"kv_heads": 4}, "kv_heads must divide heads, got 4 and 6"),
        ({"stage": "sideways"}, "stage must be one of forward, recorded, backward"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, float64; got 'int8'"),
        ({"length_q": 14}, "length_q must be at most length_k, got 14 and 13"),
        ({"mask": "casual"}, "mask: expected full"),
    ],
)
def test_what_is_no_case_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        replace(CASE, **change)


def test_inputs_have_the_shapes_of_the_case_and_are_the_same_each_time():
    inputs = CaseInputs.make(replace(CASE, dtype="bfloat16", stage="backward"))
    assert inputs.query.shape == (3, 6, 7, 5)
    assert inputs.key.shape == (3, 2, 13, 5)
    assert inputs.value.shape == (3, 2, 13, 11)
    assert inputs.upstream.shape == (3, 6, 7, 11)
    assert {leaf.dtype for leaf in inputs.leaves} == {torch.bfloat16}
    assert all(leaf.requires_grad for leaf in inputs.leaves)
    again = CaseInputs.make(replace(CASE, dtype="bfloat16"))
    assert torch.equal(again.key, inputs.key)
    assert not any(leaf.requires_grad for leaf in again.leaves)

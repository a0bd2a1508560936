"""Contenders: their names, what they would form, and what is told of the machine they run on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from saccade.benchmark.attention import (
    Case,
    CaseInputs,
    DenseAttention,
    FlexAttention,
    SdpaAttention,
)
from saccade.benchmark.attention.machine import describe, last_level_cache

CASE = Case(40, 40, "causal", batch=2, heads=6, kv_heads=3)


@pytest.mark.parametrize(
    ("mask", "dense_bytes"),
    [("full", 0), ("causal", 0), ("window:5", 5), ("padding:half", 2 * 5), ("causal+alibi", 6 * 4), ("bias", 6 * 4)],
)
def test_sdpa_forms_a_dense_mask_only_where_it_must(mask, dense_bytes, monkeypatch):
    case = replace(CASE, mask=mask)
    assert SdpaAttention().needs(case) == 40 * 40 * dense_bytes
    given = {}

    def seen(*tensors, **options):
        given.update(options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", seen)
    SdpaAttention().forward(CaseInputs.make(case))()
    assert given["is_causal"] == (mask == "causal")
    assert (given["attn_mask"] is None) == (dense_bytes == 0)


def test_sdpas_causal_means_another_thing_where_lengths_differ():
    case = replace(CASE, length_q=7)
    assert SdpaAttention().needs(case) == 7 * 40 * 5


def test_dense_needs_more_where_gradients_are_wanted():
    logits = 2 * 6 * 40 * 40 * 4
    assert DenseAttention().needs(CASE) == 3 * logits
    assert DenseAttention().needs(replace(CASE, stage="backward")) == 6 * logits


def test_flex_needs_its_block_mask():
    assert FlexAttention().needs(CASE) == 40 * 40 * 2
    assert FlexAttention().needs(replace(CASE, mask="padding:half")) == 40 * 40 * 2 * 2
    assert FlexAttention().needs(replace(CASE, mask="full")) == 0


def test_the_machine_is_described():
    told = describe("9.8.7", 3)
    assert told["saccade"] == "9.8.7"
    assert told["threads"] == 3
    assert told["torch"] == torch.__version__
    assert told["processor"]
    assert told["memory"] is None or told["memory"] > 2**20


def test_the_last_level_cache_is_the_largest(tmp_path):
    for index, size in enumerate(("48K", "2048K", "33M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert last_level_cache(tmp_path) == 33 * 2**20
    assert last_level_cache(tmp_path / "nowhere") is None

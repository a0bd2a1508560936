"""Contenders: their names, what they would form, and what is told of the machine they run on."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from looped import looped
from saccade.benchmark.attention import (
    Budget,
    Case,
    CaseInputs,
    DenseAttention,
    Entry,
    FlexAttention,
    MeasurementSettings,
    SaccadeAttention,
    SdpaAttention,
    measure,
)
from saccade.benchmark.attention.machine import describe, last_level_cache
from saccade.benchmark.attention.naming import named, others
from saccade.benchmark.attention.runtimes import OnnxRuntimeAttention

CASE = Case(40, 40, "causal", batch=2, heads=6, kv_heads=3)


@looped(
    "contender",
    [SaccadeAttention("auto"), SaccadeAttention("native", "avx2"), *others().values()],
)
def test_a_name_leads_back_to_its_contender(contender):
    again = named(contender.name)
    assert type(again) is type(contender)
    assert vars(again) == vars(contender)


def test_no_name_is_nobody():
    with pytest.raises(ValueError, match="no contender has the name ''"):
        named("")


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


RUNTIMES = {"onnxruntime": ("onnx", "onnxruntime"), "openvino": ("openvino",)}


@pytest.mark.slow  # imports a runtime
@pytest.mark.parametrize("word", RUNTIMES)
@looped("mask", ["full", "causal", "window:5", "causal+alibi"])
@looped("kv_heads", [6, 3])
def test_runtimes_compute_attention(word, mask, kv_heads):
    for module in RUNTIMES[word]:
        pytest.importorskip(module)
    runtime, case = others()[word], replace(CASE, mask=mask, kv_heads=kv_heads, width=13, value_width=7)
    row = measure("", [Entry(case, runtime)], MeasurementSettings(2, Budget(0.0, 1, 1))).rows[0]
    if word == "openvino" and kv_heads < 6:
        assert (row.status, row.note) == ("none", "it takes no grouped heads")
    else:
        assert (row.status, row.note) == ("measured", "")


@looped("word", RUNTIMES)
def test_runtimes_say_what_is_missing(word, monkeypatch):
    for module in RUNTIMES[word]:
        monkeypatch.setitem(sys.modules, module, None)
    row = measure("", [Entry(CASE, others()[word])], MeasurementSettings(1, Budget(0.0, 1, 1))).rows[0]
    assert (row.status, row.note) == ("none", f"not installed ({RUNTIMES[word][0]})")


@looped(
    ("more", "words"),
    [({"dtype": "bfloat16"}, "its attention is float32 here"), ({"stage": "backward"}, "it has no backward")],
)
def test_runtimes_say_what_they_cannot(more, words):
    with pytest.raises(ValueError, match=words):
        OnnxRuntimeAttention.operands(CaseInputs.make(replace(CASE, **more)))


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

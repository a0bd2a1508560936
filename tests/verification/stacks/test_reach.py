"""Reach: pairs that are wrong by construction are named with their layer, head and path; right layers are silent."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from stacks.dense import VOCABULARY, Dense
from stacks.layered import Attention, Layered, causal, probed, window
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

import saccade


def heads_of(model, **more):
    return probed("reach", model, causal=True, **more)


@pytest.mark.parametrize("kernel", ["sdpa", "by hand"])
def test_right_windows_in_turn_are_silent(kernel):
    assert not heads_of(Layered(Attention(window(5), kernel=kernel), Attention(causal, kernel=kernel)), window=5)


@pytest.mark.parametrize("width", [4, 6])
def test_a_window_that_is_off_by_one(width):
    [finding] = heads_of(Layered(Attention(window(5)), Attention(window(width), kernel="by hand")), window=5)
    assert f"{width} keys are seen, not 5" in finding.message
    query = min(width, 5)
    assert finding.where == f"layers.1: layer 1, head 0, query {query}, key 0"
    assert len(finding.example[0]) == query + 1


def test_a_window_that_the_fast_path_drops():
    [finding] = heads_of(Layered(Attention(causal), Attention(window(5), fast=causal)), window=5)
    assert finding.evidence["paths"] == ["without attention_mask"]
    assert finding.where.startswith("layers.")
    assert "query 5 sees key 0" in finding.message


def test_a_pair_of_one_head_that_is_hidden_and_should_not():
    def pairs(length):
        allowed = causal(length).repeat(3, 1, 1)
        allowed[2, 7:8, 3] = False
        return allowed

    model = Layered(Attention(window(5)), Attention(pairs))
    model.config = SimpleNamespace(layer_types=["sliding_attention", "full_attention"], sliding_window=5)
    [finding] = heads_of(model)
    assert finding.where == "layers.1: layer 1, head 2, query 7, key 3"
    assert "does not see" in finding.message


def test_chunks():
    def pairs(length):
        chunk = torch.arange(length) // 4
        return causal(length) & (chunk[:, None] == chunk)

    config = SimpleNamespace(layer_types=["chunked_attention"], attention_chunk_size=4)
    right, wrong = Layered(Attention(pairs)), Layered(Attention(window(4)))
    right.config = wrong.config = config
    assert not heads_of(right)
    [finding] = heads_of(wrong)
    assert (finding.evidence["argument"], len(finding.example[0])) == ("config.attention_chunk_size", 5)


def test_paths_that_differ_without_any_promise():
    [finding] = heads_of(Layered(Attention(window(5), fast=window(7))))
    assert "query 5 does not see key 0 as the batch is made, and sees it without attention_mask" in finding.message


def test_sinks_that_have_no_part_in_the_softmax():
    model = Layered(Attention(causal), Attention(causal))
    model.layers[1].sinks = nn.Parameter(torch.zeros(3))
    [finding] = heads_of(model)
    assert finding.where == "layers.1.sinks: layer 1, head 0"


def mistral(width):
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(
        vocab_size=47, hidden_size=24, intermediate_size=24, num_hidden_layers=1, num_attention_heads=3,
        num_key_value_heads=3, head_dim=8, sliding_window=width, max_position_embeddings=8192,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return transformers, model


@pytest.mark.parametrize("width", [5, 4096])
def test_a_kernel_that_leaves_the_mask_out(width):
    transformers, model = mistral(width)

    def kernel(module, query, key, value, attention_mask, **_):
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("without_window", kernel)
    assert not probed("reach", model)
    model.set_attn_implementation("without_window")
    [finding] = probed("reach", model)
    assert finding.where.startswith("model.layers.0.self_attn: layer 0")
    assert ("narrowed" in finding.message) == (width == 4096)
    assert model.config.sliding_window == width


def test_what_could_not_be_observed_is_said():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(47, 47)

        def forward(self, input_ids):
            return self.embed(input_ids).cumsum(1)

    report = saccade.verify_stack(Hidden(), causal=True)
    outcome = {outcome.name: outcome for outcome in report.outcomes}["reach"]
    assert (outcome.status, outcome.measured) == ("n/a", False)
    assert "could be observed" in outcome.reason


@pytest.mark.parametrize("reach", [7, 8])
def test_both_ways_to_count_a_bidirectional_window(reach):
    """Fails where of the two, with and without the query's own key, one is an error."""

    class Both(Dense):
        def pairs(self, length, attention_mask):
            places = torch.arange(length)
            allowed = (places[:, None] - places).abs() <= reach
            return allowed if attention_mask is None else allowed & attention_mask[:, None, None].bool()

    report = saccade.verify_stack(Both(), causal=False, window=8)
    assert {outcome.name: outcome.status for outcome in report.outcomes}["reach"] == "passed", report


def test_a_layer_of_local_and_global_heads():
    """Fails where all heads of a layer must have one pattern."""

    class Mixed(Dense):
        def pairs(self, length, attention_mask):
            places = torch.arange(length)
            near = places[:, None] - places < 8
            return super().pairs(length, attention_mask) & (near | torch.tensor([True, False, True])[:, None, None])

    report = saccade.verify_stack(Mixed(), causal=True, window=8)
    assert {outcome.name: outcome.status for outcome in report.outcomes}["reach"] == "passed", report


def test_a_width_that_a_layer_has_copied():
    """Fails where the configuration's window is narrowed and the layer's copy is not: a right one is accused."""

    class Copied(transformers.PreTrainedModel):
        config_class = transformers.MistralConfig

        def __init__(self, config):
            super().__init__(config)
            self.inner = Dense(window=config.sliding_window)

        def forward(self, input_ids, attention_mask=None, position_ids=None):
            return CausalLMOutput(logits=self.inner(input_ids, attention_mask, position_ids))

    config = transformers.MistralConfig(vocab_size=VOCABULARY, hidden_size=24, sliding_window=2048)
    report = saccade.verify_stack(Copied(config), causal=True)
    assert not report.errors, report
    assert {outcome.name: outcome.status for outcome in report.outcomes}["causality"] == "passed"

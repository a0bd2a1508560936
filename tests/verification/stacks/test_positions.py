"""Positions: rotations of one side, positions that are counted another way, and scaling that is not in force."""

from __future__ import annotations

import pytest
import torch
from stacks.layered import Attention, Layered, causal, probed
from torch import nn

import saccade


class Rotary(Attention):
    """With the buffer by which rotary positions are known."""

    def __init__(self, pairs):
        super().__init__(pairs)
        self.register_buffer("inv_freq", 100.0 ** -(torch.arange(4) / 4))


class QueriesAlone(Rotary):
    def rotated(self, x, position_ids, what):
        return super().rotated(x, position_ids, what) if what == "query" else x


def positions(model):
    return probed("positions", model, causal=True)


def test_right_rotations_are_silent():
    assert not positions(Layered(Rotary(causal), Rotary(causal)))


def test_queries_alone_are_rotated():
    [finding] = positions(Layered(Rotary(causal), QueriesAlone(causal)))
    assert "differences alone" in finding.message
    assert len(finding.example[0]) == 2


def test_an_absolute_table_is_no_fault():
    class Absolute(Layered):
        def __init__(self, *layers):
            super().__init__(*layers)
            self.position_table = nn.Embedding(64, 47)

        def forward(self, input_ids, attention_mask=None, position_ids=None):
            out = super().forward(input_ids, attention_mask, position_ids)
            positions = torch.arange(out.shape[1]) if position_ids is None else position_ids
            return out + self.position_table(positions)

    assert not positions(Absolute(Rotary(causal)))


def test_positions_given_are_read_another_way_than_they_are_counted():
    class Reversed(Layered):
        def forward(self, input_ids, attention_mask=None, position_ids=None):
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1]).expand(input_ids.shape) * 2
            return super().forward(input_ids, attention_mask, position_ids)

    [finding] = positions(Reversed(Attention(causal)))
    assert finding.where == "position_ids"


def llama(**rope):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=47, hidden_size=24, intermediate_size=24, num_hidden_layers=1, num_attention_heads=3,
        head_dim=8, max_position_embeddings=64, rope_parameters={"rope_theta": 100.0, **rope},
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


SCALED = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 4.0}, SCALED])
def test_scaling_that_is_in_force(rope):
    assert not positions(llama(**rope))


def test_scaling_that_was_given_too_late():
    model = llama(rope_type="default")
    model.config.rope_parameters = {"rope_theta": 100.0, **SCALED}
    [finding] = positions(model)
    assert (finding.severity, finding.where) == ("error", "model.rotary_emb.inv_freq")
    assert "'llama3' is not in force" in finding.message


def test_frequencies_in_half_precision_are_a_warning():
    [finding] = positions(llama(rope_type="default").bfloat16().float())
    assert finding.severity == "warning"


@pytest.mark.slow
def test_rows_are_not_compared_where_the_longest_sets_their_frequencies():
    """Fails where a short row beside one that leaves the original context is to be the same as alone."""
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = transformers.LlamaConfig(
        vocab_size=53,
        hidden_size=24,
        intermediate_size=37,
        num_hidden_layers=1,
        num_attention_heads=3,
        max_position_embeddings=64,
        rope_parameters={**rope, "factor": 4.0, "original_max_position_embeddings": 16},
    )
    report = saccade.verify_stack(transformers.LlamaForCausalLM(config))
    assert report.ok, report

"""Rotary positions against transformers' modules on the same inputs: Llama, GPT-NeoX, GPT-J, and its scalings.

transformers computes angles in float32, we in float64, so results differ by what that rounding is worth.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from looped import looped
from saccade.positions import LinearScaling, Rotary, YaRNScaling

POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [31, 32, 33, 34, 35, 36, 37], [0, 1, 0, 1, 2, 3, 211]])


def model(name):
    pytest.importorskip("transformers")
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def assert_same_turning(got, want, x, factor=1.0):
    # An angle of up to 211 radians, from a power, a product and the factor: 4 roundings, times the pair's length.
    eps = torch.finfo(torch.float32).eps
    bound = (4 * eps * 211 + 4 * eps) * 2 * x.abs().max() * factor
    assert (got - want).abs().max() <= bound
    assert (x - want).abs().max() > 100 * bound


def inputs(width):
    return torch.randn(3, 5, 7, width), torch.randn(3, 2, 7, width)


SCALINGS = {
    "default": (None, {"rope_type": "default"}),
    "linear": (LinearScaling(4.0), {"rope_type": "linear", "factor": 4.0}),
    "yarn": (
        YaRNScaling(8.0, 64),
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    ),
    "yarn, other factor": (
        YaRNScaling(8.0, 64, 16.0, 2.0, attention_factor=0.9),
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 0.9,
        },
    ),
}


@looped("name", SCALINGS)
def test_llama(name):
    scaling, parameters = SCALINGS[name]
    llama = model("llama")
    config = llama.LlamaConfig(
        hidden_size=5 * 14,
        num_attention_heads=5,
        head_dim=14,
        max_position_embeddings=512,
        rope_parameters={**parameters, "rope_theta": 5000.0},
    )
    query, key = inputs(14)
    cos, sin = llama.LlamaRotaryEmbedding(config)(query, POSITIONS)
    wants = llama.apply_rotary_pos_emb(query, key, cos, sin)
    rotary = Rotary(14, 5000.0, scaling=scaling)
    for x, want in zip((query, key), wants, strict=True):
        assert_same_turning(rotary(x, POSITIONS), want, x, 1.0 if scaling is None else scaling.attention)
        torch.testing.assert_close(rotary(x[:2], torch.tensor([0, 31])), rotary(x, POSITIONS)[:2], rtol=0, atol=0)


def test_gpt_neox_turns_a_part():
    neox = model("gpt_neox")
    config = neox.GPTNeoXConfig(
        hidden_size=5 * 24,
        num_attention_heads=5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    )
    query, key = inputs(24)
    cos, sin = neox.GPTNeoXRotaryEmbedding(config)(query, POSITIONS)
    wants = neox.apply_rotary_pos_emb(query, key, cos, sin)
    for x, want in zip((query, key), wants, strict=True):
        assert_same_turning(Rotary(24, turned=6)(x, POSITIONS), want, x)


@pytest.mark.parametrize("turned", [14, 6])
def test_gpt_j_turns_neighbours(turned):
    gptj = model("gptj")
    table = gptj.create_sinusoidal_positions(256, turned)
    sin, cos = table[POSITIONS].split(turned // 2, -1)
    for x in inputs(14):
        by_token = x.transpose(1, 2)  # theirs is (B, L, H, D)
        part = gptj.apply_rotary_pos_emb(by_token[..., :turned], sin, cos)
        want = torch.cat((part, by_token[..., turned:]), -1).transpose(1, 2)
        assert_same_turning(Rotary(14, turned=turned, layout="interleaved")(x, POSITIONS), want, x)

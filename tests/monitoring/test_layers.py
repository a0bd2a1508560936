"""Models with modern parts: attention is shown as it is, and of other layers is said what they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import saccade
from saccade.monitoring import load
from saccade.monitoring._layers import sentences

transformers = pytest.importorskip("transformers")

IDS = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(1))
SIZES = dict(
    vocab_size=97, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=24, max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
MLA = dict(
    q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, n_routed_experts=4, n_group=1,
    topk_group=1, first_k_dense_replace=1, num_key_value_heads=4, head_dim=4,
)  # fmt: skip
# The kind, its settings, the layers with attention, and what the others are.
MODELS = {
    "Qwen3Next": (dict(layer_types=["linear_attention"] * 3 + ["full_attention"]), [3], "Qwen3NextGatedDeltaNet"),
    "Jamba": (dict(attn_layer_period=3, attn_layer_offset=1), [1], "JambaMambaMixer"),
    "Llama4Text": (dict(attention_chunk_size=5), [0, 1, 2, 3], ""),
    "GptOss": (dict(sliding_window=5), [0, 1, 2, 3], ""),
    "DeepseekV3": (MLA, [0, 1, 2, 3], ""),
}


def model_of(kind, more):
    torch.manual_seed(0)
    known = {**SIZES, **EXPERTS, **more}
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**known)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("sinks"):
                parameter.normal_(std=0.3)
    model.set_attn_implementation("eager")  # which alone returns weights
    return model


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_modern_parts(kind, tmp_path):
    more, shown, mixer = MODELS[kind]
    model = model_of(kind, more)
    with saccade.watch(model, keep=True) as watched:
        out = model(IDS, output_attentions=True)
    assert [call.path for call in watched.calls] == [f"layers.{layer}.self_attn" for layer in shown]
    assert not watched.unobserved
    weights = [layer for layer in out.attentions if layer is not None]
    for call, theirs in zip(watched.calls, weights, strict=True):
        torch.testing.assert_close(watched.weights(call.name), theirs, rtol=1e-4, atol=2e-6)
    others = [layer for layer in range(4) if layer not in shown]
    assert watched.without_attention == {f"layers.{layer}": mixer for layer in others}
    watched.save(tmp_path / "run.safetensors")
    again = load(tmp_path / "run.safetensors")
    assert again.without_attention == watched.without_attention and str(again) == str(watched)
    assert ("Without attention weights:" in str(watched)) == bool(others)
    assert all(sentence in watched._repr_html_() for sentence in sentences(watched.without_attention))


class Block(nn.Module):
    def __init__(self, mixer):
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(8), mixer

    def forward(self, x):
        mixed = self.mixer(self.norm(x))
        return x + (mixed[0] if isinstance(mixed, tuple) else mixed)


class Mixed(nn.Module):
    """Attention in some layers, under one name with what others have."""

    def __init__(self, mixers):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, mixers))

    def forward(self, x, first=0):
        for block in self.blocks[first:]:
            x = block(x)
        return x


class Attending(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.slow
def test_layers_that_did_not_run_or_may_hide_calls_are_left_out():
    compiled = torch.compile(nn.Sequential(nn.Linear(8, 8)), backend="eager")
    model = Mixed([nn.GRU(8, 8), Attending(), nn.Linear(8, 8), compiled, nn.GRU(8, 8)])
    with torch.no_grad(), saccade.watch(model) as watched:
        model(torch.randn(2, 5, 8), first=1)
    assert watched.without_attention == {"blocks.2": "Linear", "blocks.4": "GRU"}
    with torch.no_grad(), saccade.watch(model, layers=[0]) as watched:  # attention that was not chosen is attention
        model(torch.randn(2, 5, 8))
    assert list(watched.without_attention) == ["blocks.0", "blocks.2", "blocks.4"]
    whole = torch.compile(model, backend="eager")
    with torch.no_grad(), saccade.watch(whole) as watched:
        whole(torch.randn(2, 5, 8))
    assert not watched.without_attention


def test_a_model_without_any_attention_says_what_it_is():
    model = Mixed([nn.GRU(8, 8), nn.GRU(8, 8), nn.GRU(8, 8), nn.Linear(8, 8)])
    with torch.no_grad(), saccade.watch(model) as watched:
        model(torch.randn(2, 5, 8))
    assert "the model called no attention" in str(watched)
    assert "layers 0 to 2 of blocks are GRU" in str(watched) and "layer 3 of blocks is Linear" in str(watched)


def test_sentences():
    layers = {f"a.{n}": "Mixer" for n in (0, 1, 3, 5, 6, 7)} | {"a.2": "Other", "0": "Mixer"}
    assert sentences(layers) == [
        "layers 0, 1, 3 and 5 to 7 of a are Mixer",
        "layer 2 of a is Other",
        "layer 0 of the model is Mixer",
    ]

"""Forms of attention of published models that are right: each was taken for a fault, beside the fault it looks like."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from saccade import verify
from saccade.verification import Undecided

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def checked(model, *checks):
    torch.manual_seed(5)
    return [finding.message for finding in verify(model.eval(), isolated=False, checks=list(checks)).errors]


def gemma2():
    torch.manual_seed(5)
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=5))


@pytest.mark.slow
def test_layers_with_a_window_alternate_with_layers_without():
    assert gemma2().config.layer_types == ["sliding_attention", "full_attention"]
    assert not checked(gemma2(), "causal-blindness")


@pytest.mark.slow
def test_a_configured_window_that_no_layer_has_is_an_error(monkeypatch):
    file = transformers.models.gemma2.modeling_gemma2
    monkeypatch.setattr(file, "create_sliding_window_causal_mask", file.create_causal_mask)
    (message,) = checked(gemma2(), "causal-blindness")
    assert "asks for a window of 4 inputs before its own: it is longer by 28" in message


@pytest.mark.parametrize("kind", ["XLM", "Flaubert"])
def test_masked_models_whose_class_ends_in_lm_head_model(kind):
    config = getattr(transformers, f"{kind}Config")(n_words=61, emb_dim=32, n_layers=2, n_heads=4, pad_index=0)
    model = getattr(transformers, f"{kind}WithLMHeadModel")(config)
    assert not checked(model, "causal-leak")


def test_xlnet_reads_both_sides():
    config = transformers.XLNetConfig(vocab_size=61, d_model=32, n_layer=2, n_head=4, d_inner=37)
    assert not checked(transformers.XLNetLMHeadModel(config), "causal-leak")


@pytest.mark.slow
def test_an_encoder_of_images_beside_a_decoder_says_nothing_of_the_text():
    """GIT's image encoder says `is_causal = False`, and its decoder nothing."""
    images = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.GitConfig(
        **SIZES | {"num_hidden_layers": 1}, vision_config=images | {"image_size": 16, "patch_size": 8}
    )
    assert not checked(transformers.GitForCausalLM(config), "causal-blindness", "causal-leak")


class Sees(transformers.BertForMaskedLM):
    def forward(self, input_ids=None, pixel_values=None, **more):
        if pixel_values is None:
            raise ValueError("no image")
        return super().forward(input_ids, **more)


def test_a_model_that_needs_an_image_is_not_accused():
    config = transformers.BertConfig(**{name: SIZES[name] for name in SIZES if name != "num_key_value_heads"})
    with pytest.raises(Undecided, match=r"with token numbers alone \(ValueError: no image\): it takes pixel_values"):
        checked(Sees(config), "mixing")


def test_a_model_of_outputs_of_its_own_number_is_not_accused():
    """Perceiver gives as many outputs as it has positions; its body cannot be called with tokens."""
    sizes = {"d_model": 8, "d_latents": 8, "num_latents": 3, "num_self_attends_per_block": 1, "qk_channels": 8}
    heads = {"num_self_attention_heads": 2, "num_cross_attention_heads": 2, "v_channels": 8}
    config = transformers.PerceiverConfig(**sizes, **heads, vocab_size=61, max_position_embeddings=24)
    with pytest.raises(Undecided, match="PerceiverForMaskedLM gives neither logits nor a last_hidden_state for each"):
        checked(transformers.PerceiverForMaskedLM(config), "mixing")


@pytest.mark.slow
def test_queries_that_go_through_a_router_keep_their_positions():
    sizes = {name: value for name, value in SIZES.items() if name != "num_attention_heads"} | {"num_hidden_layers": 1}
    torch.manual_seed(0)
    model = transformers.JetMoeForCausalLM(transformers.JetMoeConfig(**sizes, kv_channels=8))
    assert not checked(model, "causal-blindness")


class Routed(nn.Module):
    """Causal attention whose queries are scattered to an order of their own and put back."""

    def __init__(self, strict):
        super().__init__()
        self.qkv, self.strict = nn.Linear(24, 72), strict

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        order = torch.arange(x.shape[1] - 1, -1, -1)
        q = torch.zeros_like(q).index_add(1, order, q[:, order])
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(0 if self.strict else 1)
        return (q @ k.mT / 24**0.5).masked_fill(hidden, -1e9).softmax(-1) @ v


@pytest.mark.parametrize("strict", [False, True])
def test_rows_put_back_at_an_index_are_followed(strict):
    torch.manual_seed(5)
    found = checked(Routed(strict), "causal-blindness")
    assert bool(found) == strict and all("its own position" in one for one in found)


@pytest.mark.slow
def test_debertas_scale_counts_the_relative_terms():
    config = transformers.DebertaV2Config(
        **{name: value for name, value in SIZES.items() if "key_value" not in name},
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=8,
        share_att_key=True,
    )
    torch.manual_seed(5)
    assert not checked(transformers.DebertaV2ForMaskedLM(config), "scale")


@pytest.mark.slow
def test_a_sink_after_a_shift_of_the_rows_is_a_sink():
    config = transformers.GptOssConfig(**SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    torch.manual_seed(5)
    assert not checked(transformers.GptOssForCausalLM(config), "softmax", "dtype and device")


def test_a_jump_is_no_wrong_gradient():
    """A router that chooses another expert between two points, where rounding inside allows no closer ones."""

    class Jumps(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.gate = nn.Linear(24, 72), nn.Parameter(torch.randn(24))
            self.at = self.gate.double().sum().item() + 1e-5

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            weights = (q @ k.mT / 24**0.5).softmax(-1, dtype=torch.float32).to(x.dtype)
            return weights @ v * (1 + (self.gate.sum() > self.at).to(x.dtype)) + x * self.gate

    torch.manual_seed(5)
    assert not checked(Jumps(), "gradients")


class Indexed(nn.Module):
    """Heads that choose keys together, which is no attention, beside attention with or without a softmax."""

    def __init__(self, softmax):
        super().__init__()
        self.qkv, self.index, self.gate, self.softmax = nn.Linear(24, 72), nn.Linear(24, 24), nn.Linear(24, 3), softmax

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        heads = self.index(x).unflatten(-1, (3, 8))  # (B, L, 3, 8)
        scores = torch.relu(heads @ k[..., None, :8].transpose(1, 2).mT)  # (B, L, 3, L)
        chosen = (self.gate(x)[:, :, None] @ scores).squeeze(2)  # (B, L, L)
        weights = q @ k.mT / 24**0.5
        weights = weights.softmax(-1) if self.softmax else weights.sigmoid()
        return weights @ v + 0 * chosen.sum(-1, keepdim=True)


@pytest.mark.parametrize("softmax", [True, False])
def test_an_index_of_keys_is_no_attention_without_a_softmax(softmax):
    torch.manual_seed(5)
    assert bool(checked(Indexed(softmax), "softmax")) != softmax

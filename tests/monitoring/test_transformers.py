"""Hugging Face models of every attention implementation, against the weights that their eager attention returns."""

from __future__ import annotations

import pytest
import torch

import saccade
from attention_numbers import check

transformers = pytest.importorskip("transformers")

B, L, LAYERS, H = 3, 11, 2, 4
SMALL = {
    "hidden_size": 20,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": H,
    "intermediate_size": 17,
    "vocab_size": 23,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
IDS = torch.randint(1, 23, (B, L), generator=torch.Generator().manual_seed(1))
LENGTHS = torch.tensor([7, 11, 3])
RIGHT = (torch.arange(L) < LENGTHS[:, None]).long()
LEFT = RIGHT.flip(1)


def model_of(kind, implementation, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **more}, attn_implementation=implementation)
    return getattr(transformers, f"{kind}Model")(config).eval()


def grouped(kind, implementation):
    more = {"num_key_value_heads": 2, "head_dim": 6}
    more |= {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 6} if kind == "Gemma2" else {}
    more |= {"sliding_window": 4} if kind in ("Mistral", "Gemma2") else {}
    return model_of(kind, implementation, **more)


MODELS = {
    "Bert": (lambda implementation: model_of("Bert", implementation), RIGHT, "encoder.layer.{}.attention.self"),
    "Llama": (lambda implementation: grouped("Llama", implementation), LEFT, "layers.{}.self_attn"),
    "Mistral": (lambda implementation: grouped("Mistral", implementation), LEFT, "layers.{}.self_attn"),
    "Gemma2": (lambda implementation: grouped("Gemma2", implementation), RIGHT, "layers.{}.self_attn"),
}


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_every_implementation(name, implementation):
    make, real, path = MODELS[name]
    if name == "Gemma2" and implementation == "sdpa":
        pytest.skip("transformers' sdpa ignores the soft cap")
    weights = make("eager")(IDS, attention_mask=real, output_attentions=True).attentions
    model = make(implementation)
    plain = model(IDS, attention_mask=real).last_hidden_state
    with saccade.watch(model, keep=True) as seen:
        again = model(IDS, attention_mask=real).last_hidden_state
    assert torch.equal(plain, again)
    assert not seen.unobserved
    assert [call.name for call in seen.calls] == [path.format(layer) for layer in range(LAYERS)]
    assert [call.layer for call in seen.calls] == list(range(LAYERS))
    for call, one in zip(seen.calls, weights, strict=True):
        assert implementation in call.source
        check(seen, call.name, one.double(), counted=real[:, None].bool(), tolerance=2e-4)
        found = seen.weights(call.name)
        rows = real.bool()
        torch.testing.assert_close(found.transpose(1, 2)[rows], one.transpose(1, 2)[rows], atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_generation_makes_a_step_of_each_forward():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, head_dim=6)
    model = transformers.LlamaForCausalLM(config).eval()
    options = {"attention_mask": LEFT, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = model.generate(IDS, **options)
    with saccade.watch(model) as seen:
        assert torch.equal(model.generate(IDS, **options), plain)
    assert seen.steps == 5
    for call in seen.calls:
        assert seen.aggregates[call.name][0]["entropy"].count == int(LEFT.sum()) + 4 * B


@torch.no_grad()
def test_an_encoder_that_generate_runs_by_itself_is_seen():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=23, d_model=20, d_kv=5, d_ff=17, num_layers=2, num_heads=H, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    with saccade.watch(model) as seen:
        model.generate(IDS, max_new_tokens=3, do_sample=False, eos_token_id=None)
    paths = [call.path for call in seen.calls]
    assert len(paths) == 6 and not seen.unobserved
    assert sum(path.startswith("encoder") for path in paths) == 2
    assert sum("EncDecAttention" in path for path in paths) == 2
    assert seen.steps == 4


def test_gradients_through_eager_and_sdpa_are_alike():
    found = {}
    for implementation in ("eager", "sdpa"):
        model, told = grouped("Llama", implementation), []
        with saccade.watch(model, gradients=True, on_gradients=told.append):
            model(IDS).last_hidden_state.pow(3).sum().backward()
        found[implementation] = told
    assert len(found["eager"]) == LAYERS
    for one, other in zip(found["eager"], found["sdpa"], strict=True):
        assert one.name == other.name
        assert one.gradients["key"].shape == (2,) and one.gradients["query"].shape == (H,)
        for what in ("query", "key", "value", "out"):
            torch.testing.assert_close(one.gradients[what], other.gradients[what], rtol=1e-3, atol=1e-5)


def test_gradient_checkpointing_of_transformers():
    model = grouped("Llama", "sdpa").train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    with saccade.watch(model) as seen:
        model(IDS).last_hidden_state.sum().backward()
    assert seen.steps == 1 and len(seen.calls) == LAYERS
    assert seen.aggregates[seen.calls[0].name][0]["logits.max"].count == 1


def test_what_transformers_hands_out_is_restored():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    model = grouped("Llama", "sdpa")
    with pytest.raises(LookupError), saccade.watch(model):
        model(IDS)
        raise LookupError
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before


def test_an_attention_that_asks_for_something_unknown_is_named():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def strange(module, query, key, value, attention_mask, **kwargs):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("strange", strange)
    AttentionMaskInterface.register("strange", sdpa_mask)
    try:
        model = grouped("Llama", "strange")
        with saccade.watch(model) as seen:
            model(IDS, cu_seq_lens_q=torch.tensor([0, L]))
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop("strange")
    assert not seen.calls
    assert len(seen.unobserved) == LAYERS
    assert all("strange" in name and "cu_seq_lens_k" in missed.reason for name, missed in seen.unobserved.items())

"""Llama, Mistral, Qwen and SmolLM against transformers' own, on tiny random checkpoints."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from published import (
    assert_agrees,
    assert_round_trip,
    assert_same_gradients,
    transformers,
    without_rounding,
    written,
)
from saccade import Window, models
from saccade.positions import Llama3Scaling
from saccade.variants import LongformerConfig

SIZES = dict(
    vocab_size=101,
    hidden_size=42,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    intermediate_size=53,
    max_position_embeddings=64,
    head_dim=10,
    pad_token_id=100,
    tie_word_embeddings=False,
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 300.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
}
CASES = [
    ("LlamaForCausalLM", {}),
    ("LlamaModel", {"num_key_value_heads": 6, "head_dim": 14, "num_hidden_layers": 1, "rms_norm_eps": 1e-3}),
    ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("LlamaForSequenceClassification", {"num_labels": 5, "hidden_act": "gelu"}),
    ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}}),
    ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0}}),
    ("MistralForCausalLM", {"sliding_window": 4, "num_key_value_heads": 3}),
    ("MistralForCausalLM", {"sliding_window": None}),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1, "head_dim": 14}),
    ("Qwen2ForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 14}),
    ("Qwen3ForCausalLM", {"attention_bias": True}),
    (
        "Qwen3ForSequenceClassification",
        {
            "num_labels": 3,
            "use_sliding_window": True,
            "sliding_window": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2, "head_dim": 14, "attention_bias": True, "mlp_bias": True}),
    ("SmolLM3ForCausalLM", {"use_sliding_window": True, "sliding_window": 3, "no_rope_layers": [1, 0, 0]}),
]


def config(name: str, **changes: object):
    kind = next(kind for kind in ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3") if name.startswith(kind))
    sizes = {key: value for key, value in {**SIZES, **changes}.items() if value is not None or key == "sliding_window"}
    made = getattr(transformers(), f"{kind}Config")(**sizes)
    made.pad_token_id = 100
    return made


def batch(side: str = "right") -> dict[str, Tensor]:
    """Three texts of 5, 13 and 9 tokens."""
    generator = torch.Generator().manual_seed(1)
    real = torch.arange(13) < torch.tensor([[5], [13], [9]])
    real = real if side == "right" else real.flip(1)
    ids = torch.randint(0, 100, (3, 13), generator=generator).masked_fill(~real, 100)
    return {"input_ids": ids, "attention_mask": real.long()}


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_outputs_and_files_are_those_of_transformers(tmp_path, name, changes):
    theirs = written(tmp_path / "a", name, config(name, **changes))
    inputs = batch()
    assert_agrees(without_rounding(theirs), tmp_path / "a", inputs, real=inputs["attention_mask"].bool())
    assert_round_trip(theirs.float(), tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("rope", [LLAMA3, YARN, {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3, "beta_slow": 0.5}])
def test_stretched_frequencies_are_those_of_transformers(tmp_path, rope):
    theirs = written(tmp_path, "LlamaForCausalLM", config("Llama", rope_parameters=rope, num_hidden_layers=1))
    rotary = theirs.model.rotary_emb
    model = models.load(tmp_path)
    ours = model.decoder.positions._waves._frequencies("cpu")
    assert torch.allclose(ours.float(), rotary.inv_freq, rtol=1e-6)
    assert not torch.allclose(ours, ours[1] ** torch.arange(5))  # each pair is stretched in its own way
    real = batch()["attention_mask"].bool()
    assert_agrees(theirs, tmp_path, batch(), real=real, dtypes=(torch.float32,))
    without_rounding(theirs.double()).model.rotary_emb.inv_freq = ours
    assert_agrees(theirs, tmp_path, batch(), real=real, dtypes=(torch.float64,))


def test_a_window_that_config_json_does_not_name(tmp_path):
    written(tmp_path, "MistralForCausalLM", config("Mistral", sliding_window=4))
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    del values["sliding_window"]
    path.write_text(json.dumps(values))
    expected = transformers().AutoConfig.from_pretrained(tmp_path).sliding_window
    assert {block.attention.config.window for block in models.load(tmp_path).decoder.blocks} == {
        Window(expected - 1, 0)
    }


def test_older_folders_have_rope_theta_and_rope_scaling(tmp_path):
    written(tmp_path, "LlamaForCausalLM", config("Llama", rope_parameters=LLAMA3))
    before = models.load(tmp_path)
    values = dict(before.settings.values)
    rope = dict(values.pop("rope_parameters"))
    values["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    values["rope_scaling"] = rope
    (tmp_path / "config.json").write_text(json.dumps(values))
    after = models.load(tmp_path)
    assert after.decoder.config == before.decoder.config
    assert after.decoder.config.attention.positions.scaling == Llama3Scaling(4.0, 32)


def test_gradients_of_all_weights(tmp_path):
    theirs = written(tmp_path, "Qwen3ForCausalLM", config("Qwen3", attention_bias=True))
    inputs, real = batch(), batch()["attention_mask"].bool()
    read = torch.randn(int(real.sum()), 101, dtype=torch.float64)  # the published loss is computed in float32
    ours = models.load(tmp_path, dtype=torch.float64)
    assert_same_gradients(without_rounding(theirs), ours, inputs, lambda out: (out.logits[real] * read).sum())


MIXED = dict(use_sliding_window=True, sliding_window=3, no_rope_layers=[1, 0, 1], head_dim=14)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_equals_alone_and_cached_equals_parallel(tmp_path, side):
    written(tmp_path, "SmolLM3ForCausalLM", config("SmolLM3", **MIXED))
    model, inputs = models.load(tmp_path, dtype=torch.float64), batch(side)
    with torch.no_grad():
        together = model(**inputs)
        for item, real in enumerate(inputs["attention_mask"].bool()):
            ids = inputs["input_ids"][item, real][None]
            alone = model(ids)
            assert torch.allclose(together.logits[item, real], alone.logits[0], atol=1e-12)
            cache = model.cache()
            pieces = [model(piece, cache=cache).logits for piece in (ids[:, :3], *ids[:, 3:].split(1, 1))]
            assert torch.allclose(torch.cat(pieces, 1), alone.logits, atol=1e-12)
    assert not together.logits[~inputs["attention_mask"].bool()].any()


def test_a_window_over_everything_is_exact_attention(tmp_path):
    written(tmp_path, "LlamaForCausalLM", config("Llama"))
    exact = models.load(tmp_path)
    windowed = models.load(tmp_path, mechanism=LongformerConfig(window=64, global_tokens=()))
    assert torch.allclose(exact(**batch()).logits, windowed(**batch()).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "longrope"}}, "rope_type: expected one of 'default', 'linear', .*, got 'longrope'"),
        (
            {"rope_scaling": {"type": "yarn", "truncate": False}},
            "truncate: expected True: other values",
        ),
        ({"rope_scaling": [2.0]}, "rope_scaling: expected an object, got"),
        ({"hidden_act": "gelu_new"}, "hidden_act: expected one of 'silu', .*, got 'gelu_new'"),
        ({"sliding_window": 4}, "sliding_window: expected null, since Llama has no windows, got 4"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected one of .* for each of 3 layers, got"),
    ],
)
def test_settings_that_are_not_computed(tmp_path, changes, message):
    written(tmp_path, "LlamaForCausalLM", config("Llama"))
    values = json.loads((tmp_path / "config.json").read_text())
    values.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
    with pytest.raises(ValueError, match=message):
        models.load(tmp_path)


def test_dynamic_frequencies_end_at_the_original_length(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0}
    written(tmp_path, "LlamaForCausalLM", config("Llama", rope_parameters=rope))
    model = models.load(tmp_path)
    with pytest.raises(ValueError, match="input_ids: 65 tokens are more than the model's 64 positions"):
        model(torch.zeros(1, 65, dtype=torch.int64))

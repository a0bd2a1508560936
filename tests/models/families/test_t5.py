"""T5 against transformers' own, on tiny random checkpoints."""

from __future__ import annotations

import json

import pytest
import torch

from published import (
    assert_agrees,
    assert_round_trip,
    assert_same_gradients,
    padded_on_the_left,
    sources_and_targets,
    transformers,
    written,
)
from saccade import models
from saccade.models.decoding.step import TargetStep
from saccade.variants import LongformerConfig

SIZES = dict(
    vocab_size=101,
    d_model=26,
    d_kv=7,
    d_ff=31,
    num_layers=2,
    num_decoder_layers=3,
    num_heads=3,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=11,
    decoder_start_token_id=0,
)
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


@pytest.fixture(autouse=True)
def norms_in_their_dtype(monkeypatch):
    """transformers takes mean squares in float32, whatever the dtype; in float64 that would be all that is compared."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    transformers()
    from transformers.models.mt5.modeling_mt5 import MT5LayerNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    for norm in (T5LayerNorm, MT5LayerNorm):
        monkeypatch.setattr(norm, "forward", forward)


def write(folder, name="T5ForConditionalGeneration", own_head=False, **changes):
    """A checkpoint; with `own_head` in the form of version 1.1, whose head is not the embedding."""
    kind = "MT5Config" if name.startswith("MT5") else "T5Config"
    theirs = written(folder, name, getattr(transformers(), kind)(**{**SIZES, **changes}))
    if own_head:
        theirs.lm_head.weight = torch.nn.Parameter(torch.randn(101, 26))
        theirs.save_pretrained(folder)
    return theirs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "own_head", "changes"),
    [
        ("T5Model", False, {}),
        ("T5ForConditionalGeneration", False, {"num_layers": 1, "num_decoder_layers": 1, "layer_norm_epsilon": 1e-3}),
        ("T5ForConditionalGeneration", True, GATED),
        ("T5ForConditionalGeneration", False, {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False}),
        ("MT5ForConditionalGeneration", True, {}),
        ("MT5ForConditionalGeneration", False, {"initializer_factor": 0.3}),
    ],
)
def test_outputs_and_files_are_those_of_transformers(tmp_path, name, own_head, changes):
    theirs = write(tmp_path / "a", name, own_head, **changes)
    inputs = sources_and_targets()
    real = inputs["attention_mask"].bool(), inputs["decoder_attention_mask"].bool()
    assert_agrees(theirs, tmp_path / "a", inputs, real=real)
    assert_round_trip(theirs.float(), tmp_path / "a", tmp_path / "b")


def test_the_encoder_alone(tmp_path):
    theirs = write(tmp_path / "a", "T5EncoderModel")
    inputs = {name: x for name, x in sources_and_targets().items() if not name.startswith("decoder")}
    assert_agrees(theirs, tmp_path / "a", inputs, real=inputs["attention_mask"].bool())
    assert_round_trip(theirs.float(), tmp_path / "a", tmp_path / "b")
    write(tmp_path / "whole")
    part, whole = models.load(tmp_path / "whole", head="encoder"), models.load(tmp_path / "whole")
    assert torch.equal(part(**inputs).last_hidden_state, whole.encode(**inputs).last_hidden_state)


@pytest.mark.parametrize("names", [None, []])
def test_an_encoder_without_its_name_in_the_settings(tmp_path, names):
    """The body of the kind is tried, which it is not; the error says by which setting, and the cure works."""
    write(tmp_path, "T5EncoderModel")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": names}))
    with pytest.raises(ValueError, match=r"architectures: none in config.json, so the body; give head= for another"):
        models.load(tmp_path)
    assert models.load(tmp_path, head="encoder").request.head == "encoder"


def test_gradients_of_all_weights_from_labels_alone(tmp_path):
    theirs = write(tmp_path)
    inputs = sources_and_targets()
    labels = inputs["decoder_input_ids"].masked_fill(inputs["decoder_attention_mask"] == 0, -100)
    labels[0, 2] = -100
    ours = models.load(tmp_path, dtype=torch.float64)
    inputs = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "labels": labels}
    assert_same_gradients(theirs, ours, inputs, lambda out: out.loss)
    assert torch.allclose(theirs(**inputs).loss, ours(**inputs).loss, rtol=1e-10)


def test_padding_on_either_side_equals_alone(tmp_path):
    write(tmp_path)
    model = models.load(tmp_path, dtype=torch.float64)
    inputs = sources_and_targets()
    sources, targets = (inputs[name].sum(1).tolist() for name in ("attention_mask", "decoder_attention_mask"))
    left = padded_on_the_left(inputs)
    on_the_right, on_the_left = model(**inputs), model(**left)
    for item, (source, target) in enumerate(zip(sources, targets, strict=True)):
        alone = model(inputs["input_ids"][[item], :source], None, inputs["decoder_input_ids"][[item], :target])
        assert torch.allclose(on_the_right.logits[item, :target], alone.logits[0], atol=1e-12)
        assert torch.allclose(on_the_left.logits[item, 7 - target :], alone.logits[0], atol=1e-12)


def test_cached_equals_parallel_with_several_targets_of_each_source(tmp_path):
    write(tmp_path)
    model = models.load(tmp_path, dtype=torch.float64)
    inputs = sources_and_targets()
    memory = model.encode(inputs["input_ids"], inputs["attention_mask"])
    targets = torch.randint(2, 101, (6, 9))
    twice = {name: inputs[name].repeat_interleave(2, 0) for name in ("input_ids", "attention_mask")}
    whole = model(**twice, decoder_input_ids=targets).logits
    cache = model.cache()
    with torch.no_grad():
        parts = [
            model(decoder_input_ids=part, memory=memory, cache=cache).logits for part in targets.split([4, 1, 1, 3], 1)
        ]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-12)
    assert cache.contexts[0].nbytes == 2 * 3 * 3 * 11 * 7 * 8  # keys and values of 3 sources, not of 6 targets


@torch.no_grad()
def test_a_step_begins_with_any_sources(tmp_path):
    write(tmp_path)
    model, inputs = models.load(tmp_path, dtype=torch.float64), sources_and_targets()
    chosen, ids = torch.tensor([2, 0, 2]), torch.tensor([[0, 7], [0, 9], [0, 5]])
    step = TargetStep(model, model.encode(inputs["input_ids"], inputs["attention_mask"]))
    step.reorder(chosen)
    whole = model(inputs["input_ids"][chosen], inputs["attention_mask"][chosen], ids).logits
    assert torch.allclose(step.step(ids), whole[:, -1], atol=1e-12)


def test_a_window_over_everything_is_exact_attention(tmp_path):
    write(tmp_path)
    exact, windowed = models.load(tmp_path), models.load(tmp_path, mechanism=LongformerConfig(64, global_tokens=()))
    inputs = sources_and_targets()
    assert torch.allclose(exact(**inputs).logits, windowed(**inputs).logits, atol=1e-5)

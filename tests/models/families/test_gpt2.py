"""GPT-2 and GPT-Neo against transformers' own, on tiny random checkpoints."""

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
from saccade import models
from saccade.variants import LongformerConfig

GPT2 = dict(vocab_size=101, n_embd=42, n_layer=3, n_head=7, n_positions=31, pad_token_id=100)
NEO = dict(
    vocab_size=101,
    hidden_size=42,
    num_layers=3,
    num_heads=7,
    attention_types=[[["global", "local"], 1], [["local"], 1]],
    window_size=3,
    max_position_embeddings=31,
    pad_token_id=100,
)
CASES = [
    ("GPT2LMHeadModel", {}),
    ("GPT2LMHeadModel", {"tie_word_embeddings": False, "n_inner": 53, "activation_function": "relu"}),
    ("GPT2Model", {"n_layer": 1, "scale_attn_weights": False, "layer_norm_epsilon": 1e-3}),
    ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    ("GPT2Model", {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}),
    ("GPT2ForSequenceClassification", {"num_labels": 5}),
    ("GPTNeoForCausalLM", {}),
    ("GPTNeoForCausalLM", {"tie_word_embeddings": False, "intermediate_size": 53, "activation_function": "gelu"}),
    ("GPTNeoModel", {"attention_types": [[["local"], 3]], "window_size": 1}),
    ("GPTNeoForSequenceClassification", {"num_labels": 5, "attention_types": [[["global"], 3]]}),
]


def config(name: str, **changes: object):
    kind, sizes = ("GPTNeoConfig", NEO) if name.startswith("GPTNeo") else ("GPT2Config", GPT2)
    return getattr(transformers(), kind)(**{**sizes, **changes}, bos_token_id=1, eos_token_id=2)


def batch(side: str = "right") -> dict[str, Tensor]:
    """Three texts of 5, 13 and 9 tokens."""
    generator = torch.Generator().manual_seed(1)
    real = torch.arange(13) < torch.tensor([[5], [13], [9]])
    real = real if side == "right" else real.flip(1)
    ids = torch.randint(3, 100, (3, 13), generator=generator).masked_fill(~real, 100)
    return {"input_ids": ids, "attention_mask": real.long()}


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_outputs_and_files_are_those_of_transformers(tmp_path, name, changes):
    theirs = written(tmp_path / "a", name, config(name, **changes))
    assert_agrees(without_rounding(theirs), tmp_path / "a", batch(), real=batch()["attention_mask"].bool())
    assert_round_trip(theirs.float(), tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "GPTNeoForCausalLM"])
def test_gradients_of_all_weights(tmp_path, name):
    theirs = written(tmp_path, name, config(name))
    real = batch()["attention_mask"].bool()
    read = torch.randn(int(real.sum()), 101, dtype=torch.float64)
    ours = models.load(tmp_path, dtype=torch.float64)
    assert_same_gradients(without_rounding(theirs), ours, batch(), lambda out: (out.logits[real] * read).sum())


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "GPTNeoForCausalLM"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_equals_alone_and_cached_equals_parallel(tmp_path, name, side):
    written(tmp_path, name, config(name))
    model, inputs = models.load(tmp_path, dtype=torch.float64), batch(side)
    with torch.no_grad():
        together = model(**inputs)
        for item, real in enumerate(inputs["attention_mask"].bool()):
            ids = inputs["input_ids"][item, real][None]
            alone, cache = model(ids), model.cache()
            assert torch.allclose(together.logits[item, real], alone.logits[0], atol=1e-12)
            pieces = [model(piece, cache=cache).logits for piece in (ids[:, :3], *ids[:, 3:].split(1, 1))]
            assert torch.allclose(torch.cat(pieces, 1), alone.logits, atol=1e-12)


def test_a_window_over_everything_is_exact_attention(tmp_path):
    written(tmp_path, "GPT2LMHeadModel", config("GPT2"))
    exact = models.load(tmp_path)
    windowed = models.load(tmp_path, mechanism=LongformerConfig(window=64, global_tokens=()))
    assert torch.allclose(exact(**batch()).logits, windowed(**batch()).logits, atol=1e-5)


def test_the_body_of_a_language_model_with_a_head_of_its_own(tmp_path):
    written(tmp_path, "GPT2LMHeadModel", config("GPT2", tie_word_embeddings=False))
    model = models.load(tmp_path, head="none")
    assert model.report.unused == ("lm_head.weight",)
    assert model(**batch()).logits is None


@pytest.mark.parametrize("name", ["GPT2", "GPTNeo"])
@pytest.mark.parametrize("head", ["ForTokenClassification", "ForQuestionAnswering", "DoubleHeadsModel"])
def test_the_body_without_the_head_of_another_task(tmp_path, name, head):
    if name + head == "GPTNeoDoubleHeadsModel":
        return
    theirs = written(tmp_path, name + head, config(name))
    model = models.load(tmp_path, head="none")
    assert model.report.unused
    with torch.no_grad():
        expected = theirs.transformer(**batch()).last_hidden_state[1]
    assert torch.allclose(model(**batch()).last_hidden_state[1], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["GPT2ForSequenceClassification", "GPTNeoForSequenceClassification"])
@pytest.mark.parametrize("pad", [100, 2])
def test_a_classifier_reads_the_last_token_that_is_no_padding(tmp_path, name, pad):
    """Without a mask too, and where texts end with the padding token."""
    theirs = written(tmp_path, name, config(name, pad_token_id=pad))
    model, inputs = models.load(tmp_path), batch()
    ids = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, pad)
    ids[1, -1], ids[2, :9] = pad, pad
    for given in ({"input_ids": ids}, {**inputs, "input_ids": ids}):
        with torch.no_grad():
            assert torch.allclose(model(**given).logits, theirs(**given).logits, atol=1e-5)


def test_padding_that_a_classifier_would_read_is_refused(tmp_path):
    """transformers looks for `pad_token_id` alone, and classifies by a token of any other padding."""
    written(tmp_path, "GPT2ForSequenceClassification", config("GPT2", pad_token_id=7))
    model, inputs = models.load(tmp_path), batch()
    filled = [inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, pad) for pad in (7, 8)]
    model(filled[0], inputs["attention_mask"])
    with pytest.raises(ValueError, match="input_ids: the padding of item . is not pad_token_id, 7"):
        model(filled[1], inputs["attention_mask"])
    model(filled[1].flip(1), inputs["attention_mask"].flip(1))  # before the text it is not read


@pytest.mark.parametrize("types", [[[["global", "local"], 1]], [[["global", "far"], 1], [["local"], 1]], "local", [3]])
def test_attention_types_that_fit_no_layers(tmp_path, types):
    written(tmp_path, "GPTNeoForCausalLM", config("GPTNeo"))
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "attention_types": types}))
    with pytest.raises(ValueError, match="attention_types: expected .* with 3 of 'global' and 'local' in all, got"):
        models.load(tmp_path)

"""BART against transformers' own, on tiny random checkpoints."""

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
from saccade.variants import LongformerConfig

SIZES = dict(
    vocab_size=101,
    d_model=42,
    encoder_layers=2,
    decoder_layers=3,
    encoder_attention_heads=7,
    decoder_attention_heads=3,
    encoder_ffn_dim=53,
    decoder_ffn_dim=31,
    max_position_embeddings=17,
    pad_token_id=1,
)


def write(folder, name, **changes: object):
    theirs = written(folder, name, transformers().BartConfig(**{**SIZES, **changes}))
    if hasattr(theirs, "final_logits_bias"):
        theirs.final_logits_bias.normal_()
        theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("BartModel", {"scale_embedding": True, "encoder_layers": 1, "decoder_layers": 1}),
        ("BartForConditionalGeneration", {"activation_function": "relu"}),
        ("BartForConditionalGeneration", {"scale_embedding": True, "d_model": 21}),
    ],
)
def test_outputs_and_files_are_those_of_transformers(tmp_path, name, changes):
    theirs = write(tmp_path / "a", name, **changes)
    inputs = sources_and_targets()
    real = inputs["attention_mask"].bool(), inputs["decoder_attention_mask"].bool()
    assert_agrees(theirs, tmp_path / "a", inputs, real=real)
    assert_round_trip(theirs.float(), tmp_path / "a", tmp_path / "b")


def test_a_classifier_of_unnamed_labels_has_three(tmp_path):
    """The configuration's own default, which files of three labels leave out."""
    write(tmp_path, "BartForSequenceClassification")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({n: x for n, x in json.loads(path.read_text()).items() if "label" not in n}))
    assert models.load(tmp_path).label_names == ["LABEL_0", "LABEL_1", "LABEL_2"]


def test_the_body_without_the_head_of_another_task(tmp_path):
    theirs, inputs = write(tmp_path, "BartForQuestionAnswering"), sources_and_targets()
    model = models.load(tmp_path, head="none")
    assert model.report.unused == ("qa_outputs.bias", "qa_outputs.weight")
    with torch.no_grad():
        expected = theirs.model(**inputs).last_hidden_state[0]
    assert torch.allclose(model(**inputs).last_hidden_state[0], expected, atol=1e-5)


def test_a_text_is_classified_by_its_end_token(tmp_path):
    theirs = write(tmp_path / "a", "BartForSequenceClassification", num_labels=5)
    inputs = {name: x for name, x in sources_and_targets().items() if not name.startswith("decoder")}
    inputs["input_ids"][:, 1] = 2  # each text has two end tokens
    ours = assert_agrees(
        theirs,
        tmp_path / "a",
        {**inputs, "labels": torch.tensor([4, 0, 2])},
        fields=("logits", "loss"),
        real=inputs["attention_mask"].bool(),
    )
    assert_round_trip(theirs.float(), tmp_path / "a", tmp_path / "b")
    left = padded_on_the_left(inputs)
    assert torch.allclose(ours(**left).logits, ours(**inputs).logits, atol=1e-12)
    inputs["input_ids"][1] = 3
    with pytest.raises(ValueError, match="input_ids: item 1 has no end token 2"):
        ours(**inputs)


def test_gradients_of_all_weights_from_labels_alone(tmp_path):
    theirs = write(tmp_path, "BartForConditionalGeneration")
    inputs = sources_and_targets()
    labels = inputs["decoder_input_ids"].masked_fill(inputs["decoder_attention_mask"] == 0, -100)
    labels[0, 2] = -100
    ours = models.load(tmp_path, dtype=torch.float64)
    inputs = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "labels": labels}
    assert_same_gradients(theirs, ours, inputs, lambda out: out.loss)
    assert torch.allclose(theirs(**inputs).loss, ours(**inputs).loss, rtol=1e-10)


def test_padding_on_either_side_equals_alone_also_with_a_cache(tmp_path):
    write(tmp_path, "BartForConditionalGeneration")
    model = models.load(tmp_path, dtype=torch.float64)
    inputs = sources_and_targets()
    sources, targets = (inputs[name].sum(1).tolist() for name in ("attention_mask", "decoder_attention_mask"))
    left = padded_on_the_left(inputs)
    on_the_right, on_the_left = model(**inputs), model(**left)
    with torch.no_grad():
        cached = model(**left, cache=model.cache())
    for item, (source, target) in enumerate(zip(sources, targets, strict=True)):
        alone = model(inputs["input_ids"][[item], :source], None, inputs["decoder_input_ids"][[item], :target])
        assert torch.allclose(on_the_right.logits[item, :target], alone.logits[0], atol=1e-12)
        assert torch.allclose(on_the_left.logits[item, 7 - target :], alone.logits[0], atol=1e-12)
        assert torch.allclose(cached.logits[item, 7 - target :], alone.logits[0], atol=1e-12)


def test_a_window_over_everything_is_exact_attention(tmp_path):
    write(tmp_path, "BartForConditionalGeneration")
    exact, windowed = models.load(tmp_path), models.load(tmp_path, mechanism=LongformerConfig(64, global_tokens=()))
    inputs = sources_and_targets()
    inputs["labels"] = torch.randint(101, (3, 7))
    assert torch.allclose(exact(**inputs).logits, windowed(**inputs).logits, atol=1e-5)
    assert torch.allclose(exact(**inputs).loss, windowed(**inputs).loss, atol=1e-5)


def test_the_likeliest_texts_are_those_of_transformers(tmp_path):
    """forced_eos_token_id comes from the checkpoint; lengths are at most the positions there are."""
    theirs = write(tmp_path, "BartForConditionalGeneration")
    inputs = {name: x for name, x in sources_and_targets().items() if not name.startswith("decoder")}
    expected = theirs.generate(**inputs, max_new_tokens=6, do_sample=False)
    model = models.load(tmp_path)
    assert torch.equal(model.generate(**inputs, max_new_tokens=6).ids[:, 0], expected[:, 1:])
    expected = theirs.generate(**inputs, max_new_tokens=6, do_sample=False, repetition_penalty=1.7)
    penalised = model.generate(**inputs, max_new_tokens=6, search=models.Sampling(0.0, repetition_penalty=1.7))
    assert torch.equal(penalised.ids[:, 0], expected[:, 1:])
    assert model.generate(**inputs, constraints=models.Constraints()).lengths.tolist() == [[17]] * 3
    with pytest.raises(ValueError, match="max_new_tokens: 18 after 1 tokens, but the model has 17 positions"):
        model.generate(**inputs, max_new_tokens=18)


def test_other_blocks_are_refused(tmp_path):
    write(tmp_path, "BartForConditionalGeneration")
    config = json.loads((tmp_path / "config.json").read_text())
    for name, value in (("normalize_before", True), ("normalize_embedding", False), ("tie_word_embeddings", False)):
        (tmp_path / "config.json").write_text(json.dumps({**config, name: value}))
        with pytest.raises(ValueError, match=f"{name}: expected {not value}: other values are not supported"):
            models.load(tmp_path)


@pytest.mark.parametrize("kind", ["bart", "marian"])
def test_a_padding_token_outside_the_vocabulary(tmp_path, kind):
    write(tmp_path, "BartForConditionalGeneration")
    config = {**json.loads((tmp_path / "config.json").read_text()), "model_type": kind, "pad_token_id": 101}
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": []}))
    with pytest.raises(ValueError, match="pad_token_id: expected a token's id, from 0 to 100, got 101"):
        models.load(tmp_path)


def test_bad_input(tmp_path):
    write(tmp_path, "BartForConditionalGeneration")
    model, inputs = models.load(tmp_path), sources_and_targets()
    ids, targets = inputs["input_ids"], inputs["decoder_input_ids"]
    memory = model.encode(ids)
    for call, message in (
        (lambda: model(ids), "decoder_input_ids: missing"),
        (lambda: model(decoder_input_ids=targets), "input_ids: give either the sources, or memory="),
        (
            lambda: model(memory=memory, attention_mask=ids, decoder_input_ids=targets),
            "attention_mask: give it to encode",
        ),
        (
            lambda: model(memory=memory, decoder_input_ids=targets[:2]),
            "decoder_input_ids: expected targets of 3 sources, got 2",
        ),
        (lambda: model(ids, decoder_input_ids=targets + 90), "decoder_input_ids: ids must be from 0 to 100"),
        (
            lambda: model(ids, decoder_input_ids=targets.repeat(1, 3)),
            "decoder_input_ids: 21 tokens are more than the model's 17",
        ),
        (lambda: model(ids, decoder_input_ids=targets, labels=ids), r"labels: expected shape \(3, 7\), got \(3, 11\)"),
        (lambda: model(ids, labels=-targets - 101), "labels: ids must be from 0 to 100, got -"),
        (lambda: models.load(tmp_path, head="none").generate(ids), "generate: needs the head 'conditional-generation'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()

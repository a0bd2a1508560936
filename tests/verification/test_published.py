"""Published models, opened by Saccade, are verified: nothing of them is accused, and what they compute is looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest

import saccade
from published import transformers, written
from saccade import models
from saccade.verification import Promise, Undecided
from saccade.verification.checks import CHECKS
from saccade.verification.subject._models import token_subject
from saccade.verification.tracing._trace import measured

PLAIN = dict(
    vocab_size=53,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=37,
    max_position_embeddings=41,
)
GROUPED = dict(PLAIN, num_key_value_heads=1)
PAIRED = dict(
    vocab_size=101,
    d_model=24,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=3,
    decoder_attention_heads=3,
    encoder_ffn_dim=29,
    decoder_ffn_dim=31,
    max_position_embeddings=43,
)
GPT_2 = dict(vocab_size=53, n_embd=24, n_layer=2, n_head=3, n_positions=41, bos_token_id=0, eos_token_id=0)
T5 = dict(vocab_size=53, d_model=30, d_kv=7, d_ff=37, num_layers=2, num_heads=3)
GPT_NEO = dict(
    vocab_size=53,
    hidden_size=24,
    num_layers=2,
    num_heads=3,
    attention_types=[[["global", "local"], 1]],
    window_size=5,
    max_position_embeddings=41,
    intermediate_size=37,
    bos_token_id=0,
    eos_token_id=0,
)
DISTILBERT = dict(vocab_size=53, dim=24, n_layers=2, n_heads=3, hidden_dim=37, max_position_embeddings=41)
VIT = dict(PLAIN, image_size=12, patch_size=4)
WAV2VEC2 = dict(
    PLAIN,
    conv_dim=(8, 8),
    conv_stride=(5, 2),
    conv_kernel=(10, 3),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=3,
)
del VIT["vocab_size"], VIT["max_position_embeddings"], WAV2VEC2["max_position_embeddings"]


def opened(folder, model, config, **settings):
    written(folder, model, getattr(transformers(), f"{config}Config")(**settings))
    return models.load(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "config", "settings"),
    [
        ("GPT2LMHeadModel", "GPT2", GPT_2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("BertModel", "Bert", PLAIN),
                ("GPTNeoForCausalLM", "GPTNeo", GPT_NEO),
                ("T5Model", "T5", {**T5, "num_layers": 1}),
                ("RobertaModel", "Roberta", {**PLAIN, "pad_token_id": 1}),
                ("DistilBertModel", "DistilBert", DISTILBERT),
                ("ElectraModel", "Electra", {**PLAIN, "embedding_size": 13}),
                (
                    "EsmModel",
                    "Esm",
                    {**PLAIN, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"},
                ),
                ("LlamaForCausalLM", "Llama", GROUPED),
                ("MistralForCausalLM", "Mistral", {**GROUPED, "sliding_window": 5}),
                ("Qwen2ForCausalLM", "Qwen2", GROUPED),
                ("Qwen3ForCausalLM", "Qwen3", {**GROUPED, "head_dim": 10}),
                ("T5ForConditionalGeneration", "T5", T5),
                ("BartForConditionalGeneration", "Bart", PAIRED),
                ("MarianMTModel", "Marian", {**PAIRED, "pad_token_id": 100, "decoder_start_token_id": 100}),
                ("ViTModel", "ViT", VIT),
                ("Wav2Vec2Model", "Wav2Vec2", WAV2VEC2),
            ]
        ),
    ],
)
def test_no_error_and_no_warning(tmp_path, model, config, settings):
    report = saccade.verify(opened(tmp_path, model, config, **settings), isolated=False)
    assert [finding for finding in report.findings if finding.severity != "note"] == []
    assert report.ok, str(report)


def test_a_model_that_makes_its_own_decoder_tokens_is_verified_without_its_head(tmp_path):
    model = opened(tmp_path, "BartForSequenceClassification", "Bart", **PAIRED)
    with pytest.raises(Undecided, match='makes its decoder.s tokens .* load the folder with head="none"'):
        token_subject(model)
    subject = token_subject(models.load(tmp_path, head="none"))
    assert subject(subject.inputs(2, 7)).out.shape == (2, 7, PAIRED["d_model"])


@pytest.fixture
def t5(tmp_path):
    return opened(tmp_path, "T5Model", "T5", **T5)


def test_the_encoder_of_a_fixed_source_is_no_attention_of_the_tokens(t5):
    subject = token_subject(t5)
    seen = measured(subject, subject.inputs(2, 7))
    assert [tuple(attention.weights.shape[-2:]) for attention in seen] == [(7, 7), (7, 6)] * 2


@pytest.mark.slow
def test_another_factor_than_the_promised_is_seen(t5):
    report = saccade.verify(t5, promise=Promise(scale=0.5), checks=["scale"], isolated=False)
    (error,) = report.findings
    assert error.message == (
        "Logits are 1 times q.k, where 0.5 is expected (the declared scale), in 4 of 4 attention computations: "
        "they are not scaled at all."
    )


@pytest.mark.slow
def test_a_window_that_its_configuration_does_not_ask_for_is_an_error(tmp_path):
    subject = token_subject(opened(tmp_path, "GPTNeoForCausalLM", "GPTNeo", **GPT_NEO))
    assert subject.reading.windows == {None, 4}
    (check,) = (one for one in CHECKS if one.name == "causal-blindness")
    assert list(check.run(subject)) == []
    told = replace(subject, reading=replace(subject.reading, windows=frozenset((None, 3))))
    (error,) = check.run(told)
    assert "where its configuration asks for a window of 3 inputs before its own: it is longer by 1." in error.message

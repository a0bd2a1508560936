"""ELECTRA against transformers' own, on tiny random checkpoints."""

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
    written,
)
from saccade import models


def config(**changes: object):
    sizes = dict(
        vocab_size=101,
        embedding_size=19,
        hidden_size=42,
        num_hidden_layers=2,
        num_attention_heads=7,
        intermediate_size=53,
        max_position_embeddings=37,
    )
    return transformers().ElectraConfig(**{**sizes, **changes})


def batch() -> dict[str, Tensor]:
    """Three texts of 5, 11 and 9 tokens, padded on the right."""
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.randint(1, 101, (3, 11), generator=generator),
        "attention_mask": (torch.arange(11) < torch.tensor([[5], [11], [9]])).long(),
        "token_type_ids": torch.randint(0, 2, (3, 11), generator=generator),
    }


def test_the_body_without_the_head_of_another_task(tmp_path):
    theirs = written(tmp_path, "ElectraForMultipleChoice", config())
    model = models.load(tmp_path, head="none")
    assert set(model.report.unused) >= {"sequence_summary.summary.weight", "classifier.weight"}
    with torch.no_grad():
        expected = theirs.electra(**batch()).last_hidden_state[1]
    assert torch.allclose(model(**batch()).last_hidden_state[1], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ElectraModel", {}),
        ("ElectraModel", {"embedding_size": 42, "hidden_act": "relu", "num_hidden_layers": 1}),
        ("ElectraForPreTraining", {"hidden_act": "gelu_new"}),
        ("ElectraForMaskedLM", {"hidden_act": "relu", "layer_norm_eps": 1e-3}),
        ("ElectraForMaskedLM", {"tie_word_embeddings": False}),
        ("ElectraForSequenceClassification", {"num_labels": 5, "hidden_act": "silu"}),
        ("ElectraForTokenClassification", {"num_labels": 5}),
        ("ElectraForQuestionAnswering", {"embedding_size": 42}),
    ],
)
def test_outputs_and_files_are_those_of_transformers(tmp_path, name, changes):
    theirs = written(tmp_path / "a", name, config(**changes))
    inputs = batch()
    real = inputs["attention_mask"].bool()
    assert_agrees(theirs, tmp_path / "a", inputs, real=real)
    assert_round_trip(theirs.float(), tmp_path / "a", tmp_path / "b")


def test_gradients_of_all_weights(tmp_path):
    theirs = written(tmp_path, "ElectraForPreTraining", config())
    inputs = batch()
    labels = (inputs["input_ids"] > 50).long()
    ours = models.load(tmp_path, dtype=torch.float64)
    assert_same_gradients(theirs, ours, {**inputs, "labels": labels}, lambda out: out.loss)


def test_heads_that_config_json_does_not_count(tmp_path):
    theirs = written(tmp_path, "ElectraModel", config(num_attention_heads=4, hidden_size=44))
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in values.items() if name != "num_attention_heads"}))
    assert_agrees(theirs, tmp_path, batch(), real=batch()["attention_mask"].bool())

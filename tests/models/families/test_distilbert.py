"""DistilBERT against transformers' own, on tiny random checkpoints."""

from __future__ import annotations

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
    sizes = dict(vocab_size=101, dim=42, n_layers=2, n_heads=7, hidden_dim=53, max_position_embeddings=37)
    return transformers().DistilBertConfig(**{**sizes, **changes})


def batch() -> dict[str, Tensor]:
    """Three texts of 5, 11 and 9 tokens, padded on the right."""
    ids = torch.randint(1, 101, (3, 11), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": (torch.arange(11) < torch.tensor([[5], [11], [9]])).long()}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("DistilBertModel", {"sinusoidal_pos_embds": True}),
        ("DistilBertModel", {"n_layers": 1, "activation": "relu"}),
        ("DistilBertForMaskedLM", {"activation": "gelu_new"}),
        ("DistilBertForMaskedLM", {"tie_word_embeddings": False}),
        ("DistilBertForSequenceClassification", {"num_labels": 5}),
        ("DistilBertForTokenClassification", {"num_labels": 5}),
        ("DistilBertForQuestionAnswering", {}),
    ],
)
def test_outputs_and_files_are_those_of_transformers(tmp_path, name, changes):
    theirs = written(tmp_path / "a", name, config(**changes))
    inputs = batch()
    real = inputs["attention_mask"].bool()
    assert_agrees(theirs, tmp_path / "a", inputs, real=real)
    assert_round_trip(theirs.float(), tmp_path / "a", tmp_path / "b")


def test_gradients_of_all_weights(tmp_path):
    theirs = written(tmp_path, "DistilBertForMaskedLM", config())
    inputs = batch()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    ours = models.load(tmp_path, dtype=torch.float64)
    assert_same_gradients(theirs, ours, {**inputs, "labels": labels}, lambda out: out.loss)


def test_there_is_one_token_type(tmp_path):
    written(tmp_path, "DistilBertModel", config())
    inputs = batch()
    with pytest.raises(ValueError, match="token_type_ids: ids must be from 0 to 0, got 1"):
        models.load(tmp_path)(**inputs, token_type_ids=torch.ones_like(inputs["input_ids"]))

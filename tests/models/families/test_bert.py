"""BERT against transformers' own, on tiny random checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from published import assert_agrees, assert_round_trip, assert_same_gradients, transformers, written
from saccade import models

SIZES = dict(
    vocab_size=101,
    hidden_size=42,
    num_hidden_layers=3,
    num_attention_heads=7,
    intermediate_size=53,
    max_position_embeddings=37,
)


def config(**changes: object):
    return transformers().BertConfig(**{**SIZES, **changes})


def batch(seed: int = 1) -> dict[str, Tensor]:
    """Three texts of 5, 11 and 9 tokens, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 101, (3, 11), generator=generator)
    mask = (torch.arange(11) < torch.tensor([[5], [11], [9]])).long()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "token_type_ids": torch.randint(0, 2, (3, 11), generator=generator),
    }


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("BertModel", {}),
        ("BertModel", {"hidden_act": "relu", "num_hidden_layers": 1, "type_vocab_size": 3}),
        ("BertForMaskedLM", {"hidden_act": "gelu_new"}),
        ("BertForMaskedLM", {"tie_word_embeddings": False}),
        ("BertForSequenceClassification", {"num_labels": 5, "layer_norm_eps": 1e-3}),
        ("BertForTokenClassification", {"num_labels": 5}),
        ("BertForQuestionAnswering", {}),
    ],
)
def test_outputs_and_files_are_those_of_transformers(tmp_path, name, changes):
    theirs = written(tmp_path / "a", name, config(**changes))
    inputs = batch()
    real = inputs["attention_mask"].bool()
    assert_agrees(theirs, tmp_path / "a", inputs, real=real)
    assert_round_trip(theirs.float(), tmp_path / "a", tmp_path / "b")


def test_gradients_of_all_weights(tmp_path):
    theirs = written(tmp_path, "BertForMaskedLM", config())
    inputs = batch()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    ours = models.load(tmp_path, dtype=torch.float64)
    assert_same_gradients(theirs, ours, {**inputs, "labels": labels}, lambda out: out.loss)


def test_an_answer_is_learned_as_of_the_text_alone(tmp_path):
    theirs = written(tmp_path, "BertForQuestionAnswering", config()).double()
    model, inputs = models.load(tmp_path, dtype=torch.float64), batch()
    lengths = inputs["attention_mask"].sum(1).tolist()
    first, last = torch.tensor([1, 3, 2]), torch.tensor([4, 3, 7])
    alone = [
        theirs(
            **{name: x[n : n + 1, :length] for name, x in inputs.items()},
            start_positions=first[n : n + 1],
            end_positions=last[n : n + 1],
        ).loss
        for n, length in enumerate(lengths)
    ]
    loss = model(**inputs, start_positions=first, end_positions=last).loss
    assert torch.allclose(loss, torch.stack(alone).mean(), atol=1e-10)
    last[0] = lengths[0]
    with pytest.raises(ValueError, match=r"end_positions: expected columns of real tokens, got 5, which is padding"):
        model(**inputs, start_positions=first, end_positions=last)

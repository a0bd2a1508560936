"""RoBERTa and XLM-RoBERTa against transformers' own, on tiny random checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from published import (
    assert_agrees,
    assert_padded_equals_alone,
    assert_round_trip,
    assert_same_gradients,
    transformers,
    written,
)
from saccade import models

PAD = 3


def config(kind: str = "Roberta", **changes: object):
    sizes = dict(
        vocab_size=101,
        hidden_size=42,
        num_hidden_layers=2,
        num_attention_heads=7,
        intermediate_size=53,
        max_position_embeddings=37,
        type_vocab_size=1,
        pad_token_id=PAD,
    )
    return getattr(transformers(), f"{kind}Config")(**{**sizes, **changes})


def batch() -> dict[str, Tensor]:
    """Three texts of 5, 11 and 9 tokens, padded on the right; no padding token within a text."""
    ids = torch.randint(PAD + 1, 101, (3, 11), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(11) < torch.tensor([[5], [11], [9]])).long()
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("RobertaModel", {}),
        ("XLMRobertaModel", {"pad_token_id": 1, "hidden_act": "relu", "num_hidden_layers": 1, "type_vocab_size": 2}),
        ("RobertaForMaskedLM", {"hidden_act": "relu", "layer_norm_eps": 1e-3}),
        ("XLMRobertaForMaskedLM", {"tie_word_embeddings": False}),
        ("RobertaForSequenceClassification", {"num_labels": 5}),
        ("RobertaForTokenClassification", {"num_labels": 5, "hidden_act": "gelu_new"}),
        ("RobertaForQuestionAnswering", {}),
    ],
)
def test_outputs_and_files_are_those_of_transformers(tmp_path, name, changes):
    theirs = written(tmp_path / "a", name, config(name.partition("Roberta")[0] + "Roberta", **changes))
    inputs = batch()
    real = inputs["attention_mask"].bool()
    assert_agrees(theirs, tmp_path / "a", inputs, real=real)
    assert_round_trip(theirs.float(), tmp_path / "a", tmp_path / "b")


def test_gradients_of_all_weights(tmp_path):
    theirs = written(tmp_path, "RobertaForMaskedLM", config())
    inputs = batch()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    ours = models.load(tmp_path, dtype=torch.float64)
    assert_same_gradients(theirs, ours, {**inputs, "labels": labels}, lambda out: out.loss)


def test_padding_tokens_within_a_text_take_no_position(tmp_path):
    theirs = written(tmp_path, "RobertaModel", config())
    inputs = batch()
    inputs["input_ids"][:, 2] = PAD
    assert_agrees(theirs, tmp_path, inputs, real=inputs["attention_mask"].bool())
    assert_padded_equals_alone(models.load(tmp_path, dtype=torch.float64), inputs, filler=PAD)


def test_padding_on_the_left_is_that_of_transformers(tmp_path):
    theirs = written(tmp_path, "RobertaModel", config())
    inputs = {name: x.flip(1) for name, x in batch().items()}
    # transformers pools the first column, which is padding here.
    assert_agrees(theirs, tmp_path, inputs, real=inputs["attention_mask"].bool(), fields=["last_hidden_state"])


def test_the_longest_text_leaves_room_for_the_padding_token(tmp_path):
    written(tmp_path, "RobertaModel", config())
    model = models.load(tmp_path)
    assert model.longest == 33
    assert model(torch.full((1, 33), 7)).last_hidden_state.shape == (1, 33, 42)
    with pytest.raises(ValueError, match="34 tokens are more than the model's"):
        model(torch.full((1, 34), 7))

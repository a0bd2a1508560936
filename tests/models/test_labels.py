"""Labels that a model does not learn from are an error, never a loss of None."""

from __future__ import annotations

import pytest
import torch

from models.families import test_bert, test_patchtst, test_t5
from models.families.test_gpt2 import config as gpt_config
from published import transformers, written
from saccade import models

IDS = torch.tensor([[3, 1, 4, 1, 5]])
ANSWER = torch.tensor([2])
NO_HEAD = "the model has no head with a loss for them; give head= when loading"
TEXT = {
    "BertModel": (test_bert.config, {"labels": IDS}, f"labels: {NO_HEAD}"),
    "GPT2Model": (lambda: gpt_config("GPT2Model"), {"labels": IDS}, f"labels: {NO_HEAD}"),
    "T5Model": (lambda: transformers().T5Config(**test_t5.SIZES), {"labels": IDS}, f"labels: {NO_HEAD}"),
    "T5EncoderModel": (lambda: transformers().T5Config(**test_t5.SIZES), {"labels": IDS}, f"labels: {NO_HEAD}"),
    "BertForQuestionAnswering": (
        test_bert.config,
        {"labels": IDS},
        "labels: the head 'question-answering' has no loss",
    ),
    "BertForTokenClassification": (
        test_bert.config,
        {"start_positions": ANSWER},
        "start_positions: the head 'token-classification' has no loss for them",
    ),
}


@pytest.mark.parametrize("name", TEXT)
def test_of_texts(tmp_path, name):
    config, given, message = TEXT[name]
    written(tmp_path, name, config())
    model = models.load(tmp_path)
    with pytest.raises(ValueError, match=message):
        model(IDS, **given)
    if name == "BertForQuestionAnswering":
        with pytest.raises(ValueError, match=r"end_positions: missing; the loss of an answer needs its first"):
            model(IDS, start_positions=ANSWER)
        with pytest.raises(ValueError, match="start_positions: missing"):
            model(IDS, end_positions=ANSWER)


def test_logits_of_some_tokens(tmp_path):
    """They are those of all, in the order of the texts, whether or not padding is computed."""
    written(tmp_path, "BertForMaskedLM", test_bert.config())
    model = models.load(tmp_path, dtype=torch.float64)
    real = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    ids, wanted = IDS.repeat(3, 1), torch.tensor([[0, 1, 1, 0, 0], [1, 0, 0, 0, 1], [0, 1, 0, 0, 0]]).bool()
    whole = model(ids, real).logits
    torch.testing.assert_close(model(ids, real, logits_of=wanted).logits, whole[wanted])
    whole = model(ids).logits
    torch.testing.assert_close(model(ids, logits_of=wanted).logits, whole[wanted])
    with pytest.raises(ValueError, match=r"logits_of: expected bool of shape \(3, 5\), got torch.int64 \(3, 5\)"):
        model(ids, logits_of=wanted.long())
    with pytest.raises(ValueError, match="logits_of: give it without labels"):
        model(ids, logits_of=wanted, labels=ids)
    with pytest.raises(ValueError, match="logits_of: the head None has no logits of tokens"):
        models.load(tmp_path, head="none")(ids, logits_of=wanted)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("PatchTSTForPrediction", "target_values", "target_values: the head 'prediction' has no loss for them"),
        ("PatchTSTForRegression", "future_values", "future_values: the head 'regression' has no loss for them"),
        ("PatchTSTModel", "future_values", f"future_values: {NO_HEAD}"),
    ],
)
def test_of_series(tmp_path, name, given, message):
    written(tmp_path, name, test_patchtst.config())
    with pytest.raises(ValueError, match=message):
        models.load(tmp_path)(**test_patchtst.series(), **{given: torch.zeros(2, 4)})


@pytest.mark.slow
def test_of_graphs():
    for kind, features in (("saccade-gat", {"num_features": 5}), ("saccade-graphormer", {"node_features": 5})):
        model = models.new_graph_model(kind, **features)
        with pytest.raises(ValueError, match=f"labels: {NO_HEAD}"):
            model(torch.randn(3, 5), torch.tensor([[0, 1], [1, 2]]), labels=torch.tensor([0, 1, 0]))

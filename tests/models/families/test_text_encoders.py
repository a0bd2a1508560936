"""What encoders of text have in common, where a family's code may break it; ELECTRA reads its tokens as BERT does."""

from __future__ import annotations

import pytest
import torch

from models.families import test_bert, test_distilbert, test_roberta
from published import assert_padded_equals_alone, written
from saccade import models
from saccade.variants import LongformerConfig


@pytest.mark.parametrize(("name", "family"), [("BertModel", test_bert), ("DistilBertModel", test_distilbert)])
def test_padding_on_either_side_and_packed_rows_equal_alone(tmp_path, name, family):
    """RoBERTa's own test has padding tokens within its texts, too."""
    written(tmp_path, name, family.config())
    assert_padded_equals_alone(models.load(tmp_path, dtype=torch.float64), family.batch())


@pytest.mark.parametrize(("name", "family"), [("BertModel", test_bert), ("RobertaModel", test_roberta)])
def test_a_window_over_everything_is_exact_attention(tmp_path, name, family):
    """With a mechanism a padded batch stays as it is; RoBERTa counts its positions in it."""
    written(tmp_path, name, family.config())
    exact = models.load(tmp_path)
    windowed = models.load(tmp_path, mechanism=LongformerConfig(window=64, global_tokens=()))
    inputs = family.batch()
    assert torch.allclose(exact(**inputs).last_hidden_state, windowed(**inputs).last_hidden_state, atol=1e-5)

"""ESM-2 against transformers' own, on tiny random checkpoints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from published import assert_agrees, assert_round_trip, assert_same_gradients, transformers, written
from saccade import models
from saccade.variants import LongformerConfig

SIZES = dict(
    vocab_size=33,
    mask_token_id=32,
    pad_token_id=1,
    hidden_size=42,
    num_hidden_layers=3,
    num_attention_heads=7,
    intermediate_size=53,
    max_position_embeddings=37,
    position_embedding_type="rotary",
    token_dropout=True,
    emb_layer_norm_before=False,
)


def config(**changes: object):
    return transformers().EsmConfig(**{**SIZES, **changes})


@pytest.fixture(autouse=True)
def _rotary_in_float64(monkeypatch):
    """transformers turns queries and keys in float32 whatever their dtype is; here both libraries do it in theirs."""
    transformers()
    from transformers.models.esm import modeling_esm as theirs

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + theirs.rotate_half(q) * sin, k * cos + theirs.rotate_half(k) * sin

    def waves(self: torch.nn.Module, x: Tensor, position_ids: Tensor, layer_type: None = None):
        angles = position_ids[..., None].double() * self.inv_freq.double()
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    monkeypatch.setattr(theirs, "apply_rotary_pos_emb", turned)
    monkeypatch.setattr(theirs.EsmRotaryEmbedding, "forward", waves)


def batch(seed: int = 1) -> dict[str, Tensor]:
    """Three proteins of 4, 16 and 8 tokens, padded on the right: <cls>, residues, some <mask>, <eos>.

    Shares of masked tokens are exact in float32, in which transformers computes them.
    """
    ids = torch.randint(4, 24, (3, 16), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(16) < torch.tensor([[4], [16], [8]])).long()
    ids[:, 0] = 0
    ids[1, [3, 7, 8]] = ids[2, [5, 6]] = 32
    ids[[0, 1, 2], mask.sum(1) - 1] = 2
    return {"input_ids": ids.where(mask.bool(), 1), "attention_mask": mask}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("EsmModel", {}),
        ("EsmModel", {"emb_layer_norm_before": True, "num_hidden_layers": 1, "token_dropout": False}),
        ("EsmModel", {"position_embedding_type": "absolute", "layer_norm_eps": 1e-3}),
        ("EsmForMaskedLM", {}),
        ("EsmForMaskedLM", {"tie_word_embeddings": False, "rope_theta": 97.0}),
        ("EsmForSequenceClassification", {"num_labels": 5}),
        ("EsmForTokenClassification", {"num_labels": 5, "hidden_size": 26, "num_attention_heads": 1}),
    ],
)
def test_outputs_and_files_are_those_of_transformers(tmp_path, name, changes):
    theirs = written(tmp_path / "a", name, config(**changes))
    inputs = batch()
    real = inputs["attention_mask"].bool()
    assert_agrees(theirs, tmp_path / "a", inputs, real=real)
    assert_round_trip(theirs.float(), tmp_path / "a", tmp_path / "b")


def test_gradients_of_all_weights(tmp_path):
    theirs = written(tmp_path, "EsmForMaskedLM", config())
    inputs = batch()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    ours = models.load(tmp_path, dtype=torch.float64)
    assert_same_gradients(theirs, ours, {**inputs, "labels": labels}, lambda out: out.loss)

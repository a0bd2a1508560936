"""wav2vec 2.0 against transformers' own, on tiny random checkpoints."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor

from published import assert_agrees, assert_round_trip, assert_same_gradients, run_alone, transformers, written
from saccade import models
from saccade.variants import LongformerConfig

SIZES = dict(
    vocab_size=17,
    hidden_size=42,
    num_hidden_layers=3,
    num_attention_heads=7,
    intermediate_size=53,
    conv_dim=[11, 13, 19],
    conv_kernel=[5, 3, 2],
    conv_stride=[3, 2, 1],
    num_feat_extract_layers=3,
    num_conv_pos_embeddings=6,
    num_conv_pos_embedding_groups=3,
    classifier_proj_size=23,
)
LARGE = dict(feat_extract_norm="layer", do_stable_layer_norm=True, conv_bias=True)
LENGTHS = [61, 106, 83]


def config(**changes: object):
    return transformers().Wav2Vec2Config(**{**SIZES, **changes})


def batch(*, masked: bool = True) -> dict[str, Tensor]:
    """Three sounds of 61, 106 and 83 samples: 8, 15 and 12 frames."""
    generator = torch.Generator().manual_seed(1)
    real = torch.arange(106) < torch.tensor(LENGTHS)[:, None]
    values = torch.randn(3, 106, generator=generator) * real
    return {"input_values": values, **({"attention_mask": real.long()} if masked else {})}


def frames() -> Tensor:
    counts = torch.tensor([8, 15, 12])
    return torch.arange(15) < counts[:, None]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Wav2Vec2Model", {}),
        ("Wav2Vec2Model", {**LARGE, "feat_extract_activation": "relu", "num_hidden_layers": 1}),
        ("Wav2Vec2Model", {"num_conv_pos_embeddings": 5, "mask_time_prob": 0.0, "conv_bias": True}),
        ("Wav2Vec2ForCTC", {"hidden_act": "gelu_new", "do_stable_layer_norm": True}),
        ("Wav2Vec2ForCTC", {**LARGE, "layer_norm_eps": 1e-3, "feat_extract_activation": "gelu_new"}),
        ("Wav2Vec2ForSequenceClassification", {"num_labels": 5}),
        ("Wav2Vec2ForSequenceClassification", LARGE),
    ],
)
@pytest.mark.parametrize("masked", [True, False])
def test_outputs_and_files_are_those_of_transformers(tmp_path, name, changes, masked):
    theirs = written(tmp_path / "a", name, config(**changes))
    inputs = batch(masked=masked)
    assert_agrees(theirs, tmp_path / "a", inputs, real=frames() if masked else None)
    if masked:
        assert_round_trip(theirs.float(), tmp_path / "a", tmp_path / "b")

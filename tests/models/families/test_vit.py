"""ViT and DeiT against transformers' own, on tiny random checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from published import assert_agrees, assert_round_trip, assert_same_gradients, transformers, written
from saccade import models
from saccade.variants import LongformerConfig

SIZES = dict(
    hidden_size=42,
    num_hidden_layers=3,
    num_attention_heads=7,
    intermediate_size=53,
    image_size=20,
    patch_size=5,
)


def config(name: str = "ViT", **changes: object):
    return getattr(transformers(), f"{name}Config")(**{**SIZES, **changes})


def images(channels: int = 3, height: int = 20, width: int = 20, batch: int = 2) -> Tensor:
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ViTModel", {}),
        ("ViTModel", {"pooler_output_size": 11, "image_size": 19, "qkv_bias": False, "num_hidden_layers": 1}),
        ("ViTForImageClassification", {"num_labels": 5, "num_channels": 1, "hidden_act": "gelu_new"}),
        ("ViTForImageClassification", {"layer_norm_eps": 1e-3, "hidden_act": "relu", "patch_size": 7}),
        ("DeiTModel", {}),
        ("DeiTForImageClassification", {"num_labels": 5}),
        ("DeiTForImageClassificationWithTeacher", {"num_labels": 3, "qkv_bias": False}),
    ],
)
def test_outputs_and_files_are_those_of_transformers(tmp_path, name, changes):
    settings = config(name[: name.index("T") + 1], **changes)
    theirs = written(tmp_path / "a", name, settings)
    inputs = {"pixel_values": images(settings.num_channels, settings.image_size, settings.image_size)}
    assert_agrees(theirs, tmp_path / "a", inputs)
    assert_round_trip(theirs.float(), tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("name", ["ViTModel", "DeiTModel"])
@pytest.mark.parametrize(("height", "width"), [(35, 17), (10, 40), (24, 24), (7, 5)])
def test_images_of_other_sizes(tmp_path, name, height, width):
    theirs = written(tmp_path, name, config(name[: name.index("T") + 1], num_hidden_layers=1))
    inputs = {"pixel_values": images(3, height, width), "interpolate_pos_encoding": True}
    assert_agrees(theirs, tmp_path, inputs)


def test_gradients_and_loss(tmp_path):
    theirs = written(tmp_path, "ViTForImageClassification", config(num_labels=5))
    ours = models.load(tmp_path, dtype=torch.float64)
    inputs = {"pixel_values": images(3, 15, 30), "labels": torch.tensor([3, 0]), "interpolate_pos_encoding": True}
    assert_same_gradients(theirs, ours, inputs, lambda out: out.loss)
    assert ours.label_names == [f"LABEL_{n}" for n in range(5)]


def test_a_window_over_everything_is_exact_attention(tmp_path):
    written(tmp_path, "DeiTModel", config("DeiT"))
    exact = models.load(tmp_path)
    windowed = models.load(tmp_path, mechanism=LongformerConfig(window=64, global_tokens=()))
    assert torch.allclose(exact(images()).last_hidden_state, windowed(images()).last_hidden_state, atol=1e-5)

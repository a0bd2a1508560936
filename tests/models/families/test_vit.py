"""ViT and DeiT against transformers' own, on tiny random checkpoints."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from published import assert_agrees, assert_round_trip, assert_same_gradients, run_alone, transformers, written
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


@pytest.mark.slow
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


def test_models_of_images_that_are_not_square(tmp_path):
    theirs = written(tmp_path, "ViTModel", config(image_size=[20, 35], num_hidden_layers=1))
    model = assert_agrees(theirs, tmp_path, {"pixel_values": images(3, 20, 35)})
    with torch.no_grad():  # each position says its row and its column
        rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(7.0), indexing="ij")
        model.positions[0, 1:, 0], model.positions[0, 1:, 1] = rows.flatten(), columns.flatten()
    stretched = model._stretched(9, 3)[0, 1:].view(9, 3, 42)
    assert torch.allclose(stretched[:, :1, 0].expand(9, 3), stretched[..., 0])
    assert torch.allclose(stretched[:1, :, 1].expand(9, 3), stretched[..., 1])
    assert (stretched[1:, 0, 0] > stretched[:-1, 0, 0]).all()


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


def test_what_is_wrong_with_a_call_or_its_settings_is_told(tmp_path):
    written(tmp_path, "DeiTForImageClassificationWithTeacher", config("DeiT"))
    model = models.load(tmp_path)
    wrong = [
        (dict(pixel_values=images(1)), ValueError, "pixel_values: expected images of 3 channels, got 1"),
        (dict(pixel_values=images(3, 20, 25)), ValueError, r"expected images of \(20, 20\).* got \(20, 25\)"),
        (dict(pixel_values=images(batch=0)), ValueError, "pixel_values: expected shape"),
        (dict(pixel_values=images()[0]), ValueError, "pixel_values: expected shape"),
        (dict(pixel_values=images().int()), TypeError, "expected a tensor of floats.*got torch.int32"),
        (dict(pixel_values=images(3, 4, 20), interpolate_pos_encoding=True), ValueError, "at least one patch"),
        (dict(pixel_values=images(), labels=torch.zeros(2)), ValueError, "labels: the head .* has no loss"),
    ]
    for given, kind, told in wrong:
        with pytest.raises(kind, match=told):
            model(**given)
    settings = json.loads((tmp_path / "config.json").read_text())
    for change, told in [
        ({"patch_size": 21}, "patch_size: expected at most the image's size"),
        ({"image_size": [20, 20, 20]}, r"image_size: expected a side of pixels, or \[height, width\]"),
        ({"pooler_act": "relu"}, "pooler_act: expected 'tanh'"),
        ({"head_dim": 3}, "head_dim: expected 6"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({**settings, **change}))
        with pytest.raises(ValueError, match=told):
            models.load(tmp_path)


def test_a_body_without_its_head_and_a_new_classifier(tmp_path):
    written(tmp_path, "DeiTForImageClassificationWithTeacher", config("DeiT"))
    body = models.load(tmp_path, head="none")
    assert body(images()).logits is None
    assert body.report.unused == tuple(
        f"{head}.{part}" for head in ("cls_classifier", "distillation_classifier") for part in ("bias", "weight")
    )
    model = models.load(tmp_path, head="image-classification", labels=["cat", "dog", "owl"])
    calls: list[int] = []
    out = model(images(), torch.tensor([2, 0]), observe=lambda layer, call: calls.append(layer))
    assert out.logits.shape == (2, 3)
    assert out.loss.isfinite()
    assert calls == [0, 1, 2]


def test_a_new_classifier_is_saved_with_what_prepares_its_images(tmp_path):
    written(tmp_path / "a", "ViTModel", config())
    (tmp_path / "a" / "preprocessor_config.json").write_text('{"size": 20}')
    model = models.load(tmp_path / "a", head="image-classification", labels=["cat", "dog"])
    assert set(model.report.initialised) == {"head.inner.out.weight", "head.inner.out.bias"}
    assert set(model.report.unused) == {"pooler.dense.weight", "pooler.dense.bias"}
    model.save(tmp_path / "b")
    theirs = transformers().ViTForImageClassification.from_pretrained(tmp_path / "b")
    again, picture = models.load(tmp_path / "b"), np.zeros((9, 31, 3), np.uint8)
    assert again.label_names == list(theirs.config.id2label.values()) == ["cat", "dog"]
    inputs = again.prepare(picture)
    with torch.no_grad():
        assert torch.allclose(theirs(**inputs).logits, again(**inputs).logits, atol=1e-5)


@pytest.mark.slow
def test_its_task_without_transformers(tmp_path):
    """Files of images in, names of labels out, in a process that cannot import transformers."""
    labels = {n: f"kind {n}" for n in range(5)}
    theirs = written(tmp_path, "ViTForImageClassification", config(num_labels=5, id2label=labels))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": 20, "resample": 3}))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 20, 20, 3), np.uint8)
    for n, picture in enumerate(pixels):
        Image.fromarray(picture).save(tmp_path / f"{n}.png")
    inputs = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        expected = [labels[n] for n in theirs(inputs).logits.argmax(-1).tolist()]
    program = """
        model = models.load(folder)
        out = model(**model.prepare([folder / "0.png", folder / "1.png"]))
        result = [model.label_names[n] for n in out.logits.argmax(-1).tolist()]
    """
    assert run_alone(program, tmp_path) == expected

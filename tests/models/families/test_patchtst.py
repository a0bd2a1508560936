"""PatchTST against transformers' own on tiny random checkpoints, and against its formulas in plain PyTorch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from published import (
    TOLERANCE,
    assert_agrees,
    assert_round_trip,
    assert_same_gradients,
    published_gradients,
    transformers,
    written,
)
from saccade import models
from saccade.models.model import published
from saccade.variants import LongformerConfig

SIZES = dict(
    num_input_channels=3,
    context_length=37,
    patch_length=5,
    patch_stride=3,
    num_hidden_layers=2,
    d_model=22,
    num_attention_heads=2,
    ffn_dim=29,
    prediction_length=7,
    num_targets=4,
)
NAMES = {
    "PatchTSTForClassification": {"logits": "prediction_logits"},
    "PatchTSTForRegression": {"logits": "regression_outputs"},
}


def config(**changes: object):
    return transformers().PatchTSTConfig(**{**SIZES, **changes})


def series(seed: int = 1, batch: int = 2) -> dict[str, Tensor]:
    """Series of unlike units, some steps missing."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(batch, 37, 3, generator=generator).cumsum(1) * torch.tensor([1.0, 5.0, 0.2]) + 3
    observed = torch.rand(batch, 37, 3, generator=generator) < 0.8
    return {"past_values": values.where(observed, 0), "past_observed_mask": observed.float()}


def trained(folder, name: str, changes: dict[str, object]):
    """`written`, with running means and variances that are not 0 and 1."""
    theirs = written(folder, name, config(**changes))
    with torch.no_grad():
        for buffer_name, buffer in theirs.named_buffers():
            if buffer_name.endswith("running_mean"):
                buffer.normal_(std=0.3)
            if buffer_name.endswith("running_var"):
                buffer.uniform_(0.5, 2)
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("PatchTSTModel", {}),
        (
            "PatchTSTModel",
            {"norm_type": "layernorm", "pre_norm": False, "use_cls_token": True, "share_embedding": False},
        ),
        ("PatchTSTForPrediction", {}),
        ("PatchTSTForPrediction", {"pooling_type": None, "scaling": "mean", "positional_encoding_type": "random"}),
        (
            "PatchTSTForPrediction",
            {"pooling_type": "max", "scaling": None, "bias": False, "activation_function": "relu"},
        ),
        ("PatchTSTForClassification", {"use_cls_token": True, "pre_norm": False, "num_hidden_layers": 1}),
        ("PatchTSTForClassification", {"patch_stride": 5, "norm_eps": 1e-2}),
        ("PatchTSTForRegression", {"pooling_type": "max", "output_range": [-1, 3], "num_attention_heads": 1}),
        ("PatchTSTForRegression", {"num_input_channels": 1, "share_embedding": False}),
    ],
)
def test_outputs_and_files_are_those_of_transformers(tmp_path, name, changes):
    theirs = trained(tmp_path / "a", name, changes)
    inputs = {key: value[..., : theirs.config.num_input_channels] for key, value in series().items()}
    if name == "PatchTSTForPrediction":
        inputs["future_values"] = torch.randn(2, 7, 3)
    if name == "PatchTSTForClassification":
        inputs["target_values"] = torch.tensor([3, 0])
    assert_agrees(theirs, tmp_path / "a", inputs, names=NAMES.get(name), last_state=False)
    assert_round_trip(theirs.float(), tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("scaling", ["std", "mean"])
def test_values_that_were_not_observed_do_not_scale(tmp_path, scaling):
    """As published they are read all the same; a channel that nobody observed takes the scale of the batch."""
    theirs = trained(tmp_path, "PatchTSTForPrediction", {"scaling": scaling})
    inputs = series()
    inputs["past_values"] = inputs["past_values"].where(inputs["past_observed_mask"] > 0, 3)
    inputs["past_observed_mask"][0, :, 1] = 0
    assert_agrees(theirs, tmp_path, inputs, last_state=False)


def test_gradients_of_all_weights(tmp_path):
    theirs = trained(tmp_path, "PatchTSTForPrediction", {})
    ours = models.load(tmp_path, dtype=torch.float64)
    inputs = {**series(), "future_values": torch.randn(2, 7, 3)}
    assert_same_gradients(theirs, ours, inputs, lambda out: out.loss)


def test_training_sees_the_batch_as_transformers_does(tmp_path):
    """Batch norm: statistics of the batch forward and backward, and what they leave behind."""
    theirs = trained(tmp_path, "PatchTSTForPrediction", {}).double().train()
    ours = models.load(tmp_path, dtype=torch.float64).train()
    inputs = {key: value.double() for key, value in {**series(), "future_values": torch.randn(2, 7, 3)}.items()}
    expected, got = theirs(**inputs), ours(**inputs)
    assert torch.allclose(expected.prediction_outputs, got.prediction_outputs, atol=1e-10)
    expected.loss.backward(), got.loss.backward()
    gradients = published_gradients(ours)
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(parameter.grad, gradients[name], atol=1e-9), name
    kept = published(ours)
    for name, buffer in theirs.named_buffers():
        if "running" in name or "tracked" in name:
            assert torch.allclose(buffer, kept[name], atol=1e-12), name


def stated(w: dict[str, Tensor], values: Tensor, *, heads: int, patch: int, stride: int) -> Tensor:
    """Nie et al. (2023), section 3: a forecast (B, F, C), batch norm first, one projection a channel of all patches."""
    loc = values.mean(1, keepdim=True)
    scale = (values.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    scaled = (values - loc) / scale
    forecasts = []
    for channel in range(values.shape[-1]):
        one = scaled[:, :, channel]
        starts = range((one.shape[1] - patch) % stride, one.shape[1] - patch + 1, stride)
        x = torch.stack([one[:, at : at + patch] for at in starts], 1)
        x = F.linear(x, w["encoder.embedder.input_embedding.weight"], w["encoder.embedder.input_embedding.bias"])
        x = x + w["encoder.positional_encoder.position_enc"]
        for layer in range(2):
            of = {name.removeprefix(f"encoder.layers.{layer}."): tensor for name, tensor in w.items()}

            def norm(x: Tensor, name: str, of: dict[str, Tensor] = of) -> Tensor:
                centred = x - of[f"{name}.batchnorm.running_mean"]
                unit = centred / (of[f"{name}.batchnorm.running_var"] + 1e-5).sqrt()
                return unit * of[f"{name}.batchnorm.weight"] + of[f"{name}.batchnorm.bias"]

            def linear(x: Tensor, name: str, of: dict[str, Tensor] = of) -> Tensor:
                return x @ of[f"{name}.weight"].T + of[f"{name}.bias"]

            normed = norm(x, "norm_sublayer1")
            q, k, v = (linear(normed, f"self_attn.{n}_proj").unflatten(-1, (heads, -1)).movedim(2, 1) for n in "qkv")
            weights = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(-1)
            x = x + linear((weights @ v).movedim(1, 2).flatten(2), "self_attn.out_proj")
            x = x + linear(F.gelu(linear(norm(x, "norm_sublayer3"), "ff.0")), "ff.3")
        projection = f"head.projections.{channel}"
        forecasts.append(x.flatten(1) @ w[f"{projection}.weight"].T + w[f"{projection}.bias"])
    return torch.stack(forecasts, -1) * scale + loc


def test_a_projection_for_each_channel_by_the_formulas(tmp_path):
    """transformers' own forward fails here: its loop puts one channel's forecast in the place of all embeddings."""
    theirs = trained(tmp_path, "PatchTSTForPrediction", {"share_projection": False, "pooling_type": None})
    ours = models.load(tmp_path, dtype=torch.float64)
    values = series()["past_values"].double()
    weights = {name.removeprefix("model."): tensor.double() for name, tensor in theirs.state_dict().items()}
    expected = stated(weights, values, heads=2, patch=5, stride=3)
    got = ours(values).prediction_outputs
    assert torch.allclose(expected, got, rtol=0, atol=TOLERANCE[torch.float64])
    assert_round_trip(theirs, tmp_path, tmp_path / "b")


def test_channels_and_items_do_not_see_each_other(tmp_path):
    trained(tmp_path, "PatchTSTForPrediction", {})
    model = models.load(tmp_path, dtype=torch.float64)
    values = series()["past_values"].double()
    changed = values.clone()
    changed[0, :, 1] = torch.randn(37)
    before, after = model(values).prediction_outputs, model(changed).prediction_outputs
    same = torch.ones(2, 3, dtype=torch.bool)
    same[0, 1] = False
    assert torch.allclose(before.movedim(1, 2)[same], after.movedim(1, 2)[same], atol=1e-12)
    assert not torch.allclose(before[0, :, 1], after[0, :, 1])
    assert torch.allclose(before[1:], model(values[1:]).prediction_outputs, atol=1e-12)
    assert torch.allclose(model(values * 7 + 100).prediction_outputs, before * 7 + 100, atol=1e-3)  # reversible


def test_a_window_over_everything_is_exact_attention(tmp_path):
    trained(tmp_path, "PatchTSTForPrediction", {})
    window = LongformerConfig(window=64, global_tokens=())
    exact, windowed = models.load(tmp_path), models.load(tmp_path, mechanism=window)
    values = series()["past_values"]
    assert torch.allclose(exact(values).prediction_outputs, windowed(values).prediction_outputs, atol=1e-4)


def test_a_new_head_on_a_pretrained_body(tmp_path):
    trained(tmp_path, "PatchTSTForPretraining", {})
    model = models.load(tmp_path, head="prediction")
    assert model(series()["past_values"]).prediction_outputs.shape == (2, 7, 3)
    assert set(model.report.initialised) == {"head.projections.0.weight", "head.projections.0.bias"}
    assert set(model.report.unused) == {"head.linear.weight", "head.linear.bias"}
    models.load(tmp_path, head="none").save(tmp_path / "body")  # its head has the name of a classifier's
    classifier = models.load(tmp_path / "body", head="classification", labels=3)
    assert torch.equal(classifier.places, model.places)
    assert classifier(series()["past_values"]).logits.shape == (2, 3)


def test_targets_are_counted_by_their_own_setting(tmp_path):
    """config.json may name other labels beside them, which transformers' heads do not read."""
    name = "PatchTSTForClassification"
    theirs = trained(tmp_path, name, {"num_targets": 4, "num_labels": 3})
    assert_agrees(theirs, tmp_path, series(), names=NAMES[name], last_state=False)


def test_a_classifier_of_other_labels(tmp_path):
    trained(tmp_path / "a", "PatchTSTModel", {})
    model = models.load(tmp_path / "a", head="classification", labels=["walk", "run", "sit"])
    model.save(tmp_path / "b")
    theirs = transformers().PatchTSTForClassification.from_pretrained(tmp_path / "b")
    assert_agrees(theirs, tmp_path / "b", series(), names=NAMES["PatchTSTForClassification"], last_state=False)
    assert model.label_names == ["walk", "run", "sit"]


def test_bad_input(tmp_path):
    theirs = trained(tmp_path, "PatchTSTForPrediction", {})
    model = models.load(tmp_path)
    values, observed = series()["past_values"], series()["past_observed_mask"]
    holed = values.masked_fill(observed == 0, torch.nan)
    expected = model(values, observed).prediction_outputs
    assert torch.equal(model(holed, observed).prediction_outputs, expected)
    for call, told in [
        (lambda: model(holed), r"past_values: contains NaN .* past_observed_mask"),
        (lambda: model(values[:, :4]), r"past_values: expected .*37 steps of 3 channels, got \(2, 4, 3\)"),
        (lambda: model(values[..., :2]), r"past_values: expected .*37 steps of 3 channels, got \(2, 37, 2\)"),
        (lambda: model(values[:0]), r"past_values: expected .*got \(0, 37, 3\)"),
        (lambda: model(values.double()), r"past_values: .* torch.float32, got torch.float64"),
        (lambda: model(values, observed[:, :5]), r"past_observed_mask: .*got \(2, 5, 3\)"),
        (lambda: model(values, future_values=values), r"future_values: expected shape \(2, 7, 3\), got \(2, 37, 3\)"),
    ]:
        with pytest.raises((ValueError, TypeError), match=told):
            call()
    for changes, told in [
        ({"do_mask_input": True, "architectures": ["PatchTSTModel"]}, r"do_mask_input: expected False"),
        (
            {"do_mask_input": False, "architectures": ["PatchTSTForPrediction"], "loss": "nll"},
            r"loss: expected 'mse': other values are not supported, got 'nll'",
        ),
        ({"loss": "mse", "channel_attention": True}, r"channel_attention: expected False"),
        (
            {"channel_attention": False, "patch_length": 37},
            r"context_length: expected more than the 37 steps of a patch",
        ),
    ]:
        theirs.config.update(changes)
        theirs.config.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=told):
            models.load(tmp_path)


TASK = """
import sys
sys.modules["transformers"] = None
import torch
from saccade import models
model = models.load(sys.argv[1])
with torch.no_grad():
    assert model(torch.randn(2, 37, 3)).prediction_outputs.shape == (2, 7, 3)
model.save(sys.argv[2])
"""


@pytest.mark.slow
def test_its_task_without_transformers(tmp_path):
    theirs = trained(tmp_path / "a", "PatchTSTForPrediction", {})
    command = [sys.executable, "-c", TASK, str(tmp_path / "a"), str(tmp_path / "b")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert_agrees(theirs, tmp_path / "b", series(), last_state=False)

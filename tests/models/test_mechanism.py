"""Language models that read by a mechanism: one argument makes them, a folder keeps them, and they generate.

Shape legend: B batch, L length.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from looped import looped
from saccade.models import DecoderLM, LanguageModel, ModelConfig, Sampling, generate, load, save
from saccade.models.generation import sample_tokens
from saccade.nn import RecurrentLayer
from saccade.variants import MECHANISMS, LinearConfig, LinformerConfig, LongformerConfig, PerformerConfig

SMALL = dict(vocabulary=283, width=32, layers=2, heads=4, hidden=16, context=61)
CAUSAL = [kind for kind in MECHANISMS if kind.traits.causal is True]


def of(kinds):
    return pytest.mark.parametrize("kind", kinds, ids=[kind.name for kind in kinds])


def model_of(kind):
    return DecoderLM(ModelConfig(**SMALL, mechanism=kind.usual(SMALL["context"])))


@of(CAUSAL)
def test_what_is_generated_is_what_the_whole_text_would_give(kind):
    model, prompt = model_of(kind).eval(), [3, 1, 4, 1, 5]
    drawn = list(sample_tokens(model, prompt, 20, Sampling(temperature=0.0)))
    assert len(drawn) == 20
    text = torch.tensor([prompt + drawn])
    with torch.no_grad():
        logits = model(text)[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, text[0, len(prompt) :, None])[:, 0]
    assert (logits.max(1).values - chosen).max() < 1e-4  # the likeliest token, or one that rounding made equal to it


@pytest.mark.slow
@of(CAUSAL)
def test_a_model_learns(kind):
    model = model_of(kind)
    optimizer, text = torch.optim.AdamW(model.parameters(), 3e-3), torch.arange(40).remainder(7)[None]
    losses = []
    for _ in range(12):
        loss = torch.nn.functional.cross_entropy(model(text[:, :-1])[0], text[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@of([kind for kind in MECHANISMS if kind.traits.causal is not True])
def test_what_cannot_be_causal_is_refused_with_its_reason(kind):
    with pytest.raises(ValueError) as refused:
        model_of(kind)
    assert str(refused.value) == f"mechanism: {kind.name!r} cannot be causal, since {kind.traits.causal}"


def test_a_state_does_not_grow():
    model = model_of(LinearConfig).eval()
    cache, sizes = model.cache(), []
    assert all(isinstance(layer, RecurrentLayer) for layer in cache.layers)
    with torch.no_grad():
        for length in (1, 3, 40):
            model(torch.ones(1, length, dtype=torch.int64), cache=cache)
            sizes.append(cache.nbytes)
    assert sizes[0] == sizes[1] == sizes[2] > 0


@of(CAUSAL)
def test_a_folder_gives_the_model_back(kind, lm, tmp_path):
    lm = LanguageModel(model_of(kind).eval(), lm.tokenizer)
    save(lm, tmp_path)
    again = load(tmp_path)
    assert again.model.config == lm.model.config
    buffers = dict(lm.model.named_buffers())
    for name, tensor in again.model.state_dict().items():
        expected = lm.model.state_dict()[name]
        assert torch.equal(tensor, expected if name in buffers else expected.bfloat16().float())
    assert len("".join(generate(again, "abc", 5, Sampling(seed=0)))) >= 1


def test_the_configuration_on_disk():
    config = ModelConfig(**SMALL, mechanism=LongformerConfig(4, (1, 2, 1, 2), (0, 3)))
    values = json.loads(json.dumps(config.to_dict()))
    named = {"name": "longformer", "window": 4, "dilation": [1, 2, 1, 2], "global_tokens": [0, 3]}
    assert values["mechanism"] == named
    assert ModelConfig.from_dict(values) == config
    plain = ModelConfig(**SMALL)
    assert "mechanism" not in plain.to_dict()
    assert ModelConfig.from_dict(plain.to_dict()) == plain


@looped(
    ("mechanism", "message"),
    [
        ({"name": "liner"}, "mechanism: expected one of linear, .*; got 'liner'"),
        ({"name": "linear", "features": 3}, "mechanism: linear has no features"),
        ("linear", "mechanism: expected an object with a name, got 'linear'"),
        ({"name": "linformer", "length": 9, "rank": 2}, "mechanism: 'linformer' cannot be causal, since"),
    ],
)
def test_a_damaged_configuration_is_named(mechanism, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({**ModelConfig(**SMALL).to_dict(), "mechanism": mechanism})


def test_sizes_that_do_not_fit_are_refused_when_the_configuration_is_made():
    with pytest.raises(TypeError, match="mechanism: expected a configuration of saccade.variants or None, got str"):
        ModelConfig(**SMALL, mechanism="linear")
    with pytest.raises(ValueError, match="mechanism: 'linformer' cannot be causal"):
        ModelConfig(**SMALL, mechanism=LinformerConfig(61, 7))
    differential = next(kind for kind in MECHANISMS if kind.name == "differential")()
    with pytest.raises(ValueError, match="positions: .* the head width must be even, got 3"):
        ModelConfig(**{**SMALL, "width": 24}, mechanism=differential)


def test_what_was_drawn_once_is_kept_exactly(lm, tmp_path):
    """Random features in bfloat16 would no longer be orthogonal."""
    lm = LanguageModel(DecoderLM(ModelConfig(**SMALL, mechanism=PerformerConfig())), lm.tokenizer)
    buffers = {name: buffer.clone() for name, buffer in lm.model.state_dict().items() if "mechanism" in name}
    assert buffers
    save(lm, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(stored[name], buffer) for name, buffer in buffers.items())

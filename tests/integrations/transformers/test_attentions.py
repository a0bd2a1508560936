"""`output_attentions=True`: eager's weights, or statistics of them, and nothing where nobody asks."""

from __future__ import annotations

import pytest
import torch

from integrations.transformers.families import BY_NAME, FAMILIES, batch, make, padding, real
from looped import looped
from saccade.integrations.transformers import _attention, register, unregister

NAMES = [family.name for family in FAMILIES]
KINDS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")


@pytest.fixture(autouse=True)
def taken_out_again():
    yield
    unregister()


def asked(name, how, side="right"):
    family = BY_NAME[name]
    given = batch(family, side=side)
    with torch.no_grad():
        out = make(family, how)(**given, output_attentions=True)
    return {kind: out[kind] for kind in KINDS if out.get(kind)}, given


def rows_of(kind, given, length):
    """(2, L) bool: the rows of that kind of attention that are tokens."""
    kept = given.get("decoder_attention_mask" if kind[0] in "dc" else "attention_mask")
    return torch.ones(2, length, dtype=torch.bool) if kept is None else kept.bool()


@pytest.mark.slow
@looped("side", ["right", "left"])
@looped("name", NAMES)
def test_the_weights_are_eagers(name, side):
    register()
    ours, given = asked(name, "saccade", side)
    eager, _ = asked(name, "eager", side)
    assert ours.keys() == eager.keys() and ours
    for kind, layers in eager.items():
        assert len(ours[kind]) == len(layers) == 2
        for one, other in zip(ours[kind], layers, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            kept = rows_of(kind, given, one.shape[2])[:, None, :, None].expand_as(one)
            # Inputs of a layer carry the rounding of the layers below.
            torch.testing.assert_close(one[kept], other[kept], rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_nothing_is_computed_that_nobody_asked_for(name, monkeypatch):
    called = []
    monkeypatch.setattr(_attention, "attention_weights", lambda *a, **k: called.append(a))
    register()
    family = BY_NAME[name]
    out = make(family, "saccade")(**batch(family))
    assert not called and not any(out.get(kind) for kind in KINDS)


def test_a_config_that_asks_is_heard():
    register()
    family = BY_NAME["gpt2"]
    model = make(family, "eager")
    model.config.output_attentions = True
    model.set_attn_implementation("saccade")
    assert len(model(**batch(family)).attentions) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_have_the_dtype_of_the_model(dtype):
    register()
    family = BY_NAME["llama"]
    weights = make(family, "saccade", dtype=dtype)(**batch(family), output_attentions=True).attentions
    assert {w.dtype for w in weights} == {dtype}


@pytest.mark.slow
@looped("side", ["right", "left"])
@looped("name", NAMES)
def test_statistics_are_those_of_eagers_weights(name, side):
    register(attentions="statistics")
    ours, given = asked(name, "saccade", side)
    eager, _ = asked(name, "eager", side)
    assert ours.keys() == eager.keys() and ours
    for kind, layers in eager.items():
        for stats, weights in zip(ours[kind], layers, strict=True):
            compare(stats, weights.double(), kind, given)


def compare(stats, weights, kind, given):
    """Entropy, largest weight and what each key receives, from dense weights (B, Hq, Lq, Lk)."""
    kept = rows_of(kind, given, weights.shape[2])
    rows = kept[:, None].expand(weights.shape[:3])
    # Nothing tells a cross-attention which of its queries are padding: they count, and are what eager makes of them.
    crosses = kind == "cross_attentions"
    assert torch.equal(stats.counted, torch.ones_like(rows) if crosses else rows)
    entropy = -torch.where(weights > 0, weights * weights.clamp(min=1e-300).log(), 0.0).sum(-1)
    torch.testing.assert_close(stats.entropy[rows].double(), entropy[rows], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stats.largest[rows].double(), weights.amax(-1)[rows], rtol=1e-4, atol=1e-5)
    if not crosses:
        received = torch.where(rows[..., None], weights, 0.0).sum(2)
        torch.testing.assert_close(stats.received.double(), received, rtol=1e-4, atol=1e-4)


def test_statistics_form_no_matrix(monkeypatch):
    monkeypatch.setattr(_attention, "attention_weights", lambda *a, **k: pytest.fail("a matrix of weights"))
    register(attentions="statistics")
    family = BY_NAME["mistral"]
    given = {"input_ids": torch.randint(3, 58, (2, 19)), "attention_mask": padding(19, "left")}
    layers = make(family, "saccade")(**given, output_attentions=True).attentions
    assert [stats.entropy.shape for stats in layers] == [(2, 6, 19)] * 2
    assert real(family, given).sum() * 6 == layers[0].counted.sum()

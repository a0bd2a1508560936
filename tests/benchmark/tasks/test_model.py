"""The model around a contender, what contenders keep, and how they are named."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from looped import looped
from saccade.benchmark.tasks import (
    AttentionBlocks,
    Induction,
    ModelShape,
    Recall,
    RecurrentNetwork,
    SequenceModel,
    contender_named,
    refused_contenders,
    usual_contenders,
)
from saccade.benchmark.tasks.catalogue import SIZES
from saccade.benchmark.tasks.model import ShortConvolution, answers
from saccade.variants import MECHANISMS, LinearConfig

E, L, LAYERS = 12, 17, 3
TASK = Induction(symbols=6, length=L)
EVERYONE = list(dict.fromkeys([*usual_contenders(Recall()), *SIZES]))


def reader(name: str = "exact", **shape) -> SequenceModel:
    torch.manual_seed(0)
    return SequenceModel(contender_named(name), TASK, ModelShape(**{"width": E, "layers": LAYERS, **shape}))


def test_a_short_convolution_is_its_formula():
    module, x = ShortConvolution(5, 3), torch.randn(2, 7, 5)
    weight = module.filter.weight[:, 0]
    expected = x.clone()
    for t in range(7):
        for i in range(3):
            if t - 2 + i >= 0:
                expected[:, t] += weight[:, i] * x[:, t - 2 + i]
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("taps", [0, 2])
def test_a_reader_is_its_formula(taps):
    model = reader(taps=taps)
    tokens, asked = torch.randint(7, (5, L)), torch.rand(5, L) < 0.3
    x = model.embedding.weight[tokens] * E**0.5
    x = model.positions(x)
    x = model.near(x) if taps else x
    logits = model.body(x) @ model.embedding.weight.mT
    torch.testing.assert_close(model(tokens, asked), logits[asked])
    assert isinstance(model.near, nn.Identity) == (taps == 0)
    # Nothing but attention, a norm before each layer and one after all, the embedding, and the convolution.
    attention, norms = LAYERS * 4 * E * E, (LAYERS + 1) * E
    assert model.parameter_count() == attention + norms + 7 * E + taps * E


def test_answers_are_the_likeliest_tokens_whatever_the_batch():
    model = reader()
    model.train()
    tokens = torch.randint(7, (11, L))
    asked = F.one_hot(torch.randint(L, (11,)), L).bool()
    found = answers(model, tokens, asked, batch=4)
    assert torch.equal(found, model(tokens, asked).argmax(-1))
    assert model.training


@pytest.mark.slow
@looped("name", EVERYONE)
def test_no_contender_sees_what_comes_later(name):
    torch.manual_seed(1)
    body = contender_named(name).body(16, 2, L).double().eval()
    x = torch.randn(2, L, 16, dtype=torch.float64)
    changed = torch.cat((x[:, :11], torch.randn(2, L - 11, 16, dtype=torch.float64)), 1)
    torch.testing.assert_close(body(x)[:, :11], body(changed)[:, :11])
    assert not torch.allclose(body(x)[:, 11:], body(changed)[:, 11:])


def test_a_window_sees_as_many_tokens_as_it_is_called_after():
    torch.manual_seed(1)
    body, x = contender_named("window:size=4").body(16, 1, L), torch.randn(1, L, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(body(x)[0, 11].sum(), x)
    assert gradient[0].any(-1).nonzero()[:, 0].tolist() == [8, 9, 10, 11]


@pytest.mark.slow
@looped("name", EVERYONE)
def test_every_contender_learns(name):
    """The gradient of the loss reaches every parameter.

    Longformer's for global tokens may have none: its only one is the first token, which sees nothing but itself.
    """
    torch.manual_seed(2)
    model = SequenceModel(contender_named(name), TASK, ModelShape(width=16, layers=2))
    tokens, targets, _ = TASK.draw(8, torch.Generator().manual_seed(0))
    asked = targets >= 0
    F.cross_entropy(model(tokens, asked), targets[asked]).backward()
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), path
        assert parameter.grad.any() or "mechanism.global_" in path, path


def kept_by_a_cache(name: str, width: int, length: int) -> int:
    """Numbers in the cache of a decoder after so many tokens."""
    body = contender_named(name).body(width, LAYERS, length)
    cache = body.cache()
    body(torch.randn(1, length, width), cache=cache)
    return cache.nbytes // 4


@looped("name", ["exact", "exact:head=3", "linear", "linear:head=5", "linear:feature_map=taylor,head=3"])
def test_what_is_remembered_is_what_a_cache_holds(name):
    assert contender_named(name).remembers(E, LAYERS, 7) == kept_by_a_cache(name, E, 7)


def test_what_is_remembered_in_numbers():
    assert contender_named("exact").remembers(E, LAYERS, 7) == LAYERS * 7 * 2 * E
    assert contender_named("exact:head=5").remembers(E, LAYERS, 7) == LAYERS * 7 * (5 + E)
    assert [contender_named("window:size=4").remembers(E, LAYERS, length) for length in (3, 4, 99)] == [
        LAYERS * least * 2 * E for least in (3, 4, 4)
    ]
    for length in (7, 1000):
        assert contender_named("linear:head=5").remembers(E, LAYERS, length) == LAYERS * 5 * (E + 1)
        taylor = 1 + 3 + 6
        assert contender_named("linear:feature_map=taylor,head=3").remembers(E, LAYERS, length) == LAYERS * taylor * (
            E + 1
        )
        assert contender_named("LSTM").remembers(E, LAYERS, length) == LAYERS * 2 * E
        assert contender_named("GRU").remembers(E, LAYERS, length) == LAYERS * E


def test_names():
    assert contender_named("exact") == AttentionBlocks("exact")
    assert contender_named("window:size=5") == AttentionBlocks("window:size=5", window=5)
    assert contender_named("linear") == AttentionBlocks("linear", LinearConfig())
    text = "linear:head=5,feature_map=relu"
    assert contender_named(text) == AttentionBlocks(text, LinearConfig("relu"), head=5)
    assert contender_named("GRU") == RecurrentNetwork("GRU", nn.GRU)
    assert len(set(EVERYONE)) == len(EVERYONE)


def test_everyone_that_can_be_causal_takes_part():
    names = {name.partition(":")[0] for name in usual_contenders(Induction())}
    causal = {config.name for config in MECHANISMS if config.traits.causal is True}
    assert names == causal | {"exact", "window", "LSTM", "GRU"}
    assert set(refused_contenders()) == {config.name for config in MECHANISMS} - causal
    assert {"linformer", "nystrom"} <= set(refused_contenders())


@looped(
    ("name", "message"),
    [
        ("liner", "mechanism: expected one of exact, window:size=N, linear, .*, LSTM, GRU; got 'liner'"),
        ("LSTM:size=3", "mechanism: expected one of .* got 'LSTM:size=3'"),
        ("exact:size=3", "mechanism: exact attention takes only head=...; got 'size=3'"),
        ("window", "mechanism: a window has a size, as in window:size=8; got 'window'"),
        ("window:size=8,block=2", "mechanism: a window has a size"),
        ("window:size=0", "mechanism: size: expected a whole number of at least 1, got '0'"),
        ("linear:head=x", "mechanism: head: expected a whole number of at least 1, got 'x'"),
        ("linear:heads=3", "mechanism: linear takes feature_map=..., normalise=...; got 'heads=3'"),
        ("nystrom", "mechanism: nystrom cannot read in order, since .*"),
    ],
)
def test_names_that_cannot_be_are_refused(name, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        contender_named(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"width": 0}, "width: must be at least 1, got 0"), ({"taps": -1}, "taps: must be at least 0, got -1")],
)
def test_shapes_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ModelShape(**options)

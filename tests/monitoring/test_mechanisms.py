"""Watching models that read by a mechanism: what are no weights of their queries and keys is named, not shown."""

from __future__ import annotations

import pytest
import torch

import saccade
from saccade.nn import AttentionConfig, BlockConfig, Decoder, Encoder
from saccade.variants import MECHANISMS, DifferentialConfig, GatedConfig

WHY = "a mechanism instead of softmax attention, which has no weights of that kind"
SHOWN = ("differential", "gated")


def encoder(config):
    make = Encoder if config is None or config.traits.bidirectional is True else Decoder
    return make(BlockConfig(AttentionConfig(16, 2, mechanism=config), hidden=8), 2)


@pytest.mark.parametrize("kind", [k for k in MECHANISMS if k.name not in SHOWN], ids=lambda kind: kind.name)
def test_mechanisms_without_such_weights_are_named(kind):
    model, x = encoder(kind.usual(40)), torch.randn(2, 40, 16)
    with saccade.watch(model) as watched:
        model(x)
        model(x)
    paths = [f"blocks.{layer}.attention.mechanism" for layer in range(2)]
    counted = {path: (seen.count, seen.reason) for path, seen in watched.unobserved.items()}
    assert counted == dict.fromkeys(paths, (2, WHY))
    assert WHY in str(watched)


@pytest.mark.parametrize("config, maps", [(DifferentialConfig(), 2), (GatedConfig(), 1)], ids=SHOWN)
def test_maps_of_the_operator_are_shown_as_they_are(config, maps):
    model, x, given = encoder(config), torch.randn(2, 11, 16), []
    model.blocks[0].attention.mechanism.register_forward_pre_hook(lambda _, inputs: given.extend(inputs[:2]))
    with saccade.watch(model, keep=True) as watched:
        model(x, saccade.Causal())
    assert not watched.unobserved
    query, key = given
    for number in range(maps):
        name = "blocks.0.attention.mechanism" + (f"#{number + 1}" if number else "")
        expected = saccade.attention_weights(query[:, number::maps], key[:, number::maps], saccade.Causal())
        torch.testing.assert_close(watched.weights(name), expected)


def test_beside_ordinary_attention_the_rest_is_seen():
    model = torch.nn.Sequential(encoder(None), encoder(MECHANISMS[0].usual(9)))
    with saccade.watch(model) as watched:
        model(torch.randn(2, 9, 16))
    assert "2 attention calls a step" in str(watched)
    assert len(watched.unobserved) == 2

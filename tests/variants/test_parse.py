"""Mechanisms as a command line names them."""

from __future__ import annotations

import json

import pytest

from looped import looped
from saccade.variants import (
    MECHANISMS,
    BlockTopKConfig,
    LinearConfig,
    LongformerConfig,
    PerformerConfig,
    ReformerConfig,
    SigmoidConfig,
    parse,
)
from saccade.variants._parse import from_json, to_json


@looped(
    ("text", "config"),
    [
        ("linear", LinearConfig()),
        ("linear:feature_map=taylor", LinearConfig("taylor")),
        ("linear:normalise=False,feature_map=relu", LinearConfig("relu", normalise=False)),
        ("performer:features=34,redraw_every=none", PerformerConfig(34)),
        ("reformer:buckets=8,chunk=8,redraw=false", ReformerConfig(8, chunk=8, redraw=False)),
        ("sigmoid:", SigmoidConfig()),
        ("longformer:window=4,dilation=1+2,global_tokens=0+7", LongformerConfig(4, (1, 2), (0, 7))),
        ("linear:feature_map=elu+1", LinearConfig("elu+1")),
    ],
)
def test_a_name_and_settings_are_a_configuration(text, config):
    assert parse(text) == config


@looped(
    ("text", "message"),
    [
        ("liner", "^mechanism: expected one of linear, .*; got 'liner'$"),
        ("linear:map=relu", "^mechanism: linear takes feature_map=..., normalise=...; got 'map=relu'$"),
        ("linear:feature_map", "^mechanism: linear takes .*; got 'feature_map'$"),
        ("linear:feature_map=cosine", "^mechanism: linear:feature_map=cosine: .*cosine"),
        ("reformer:buckets=7", "^mechanism: reformer:buckets=7: buckets.*7"),
        ("linear:normalise=2", "^mechanism: linear:normalise=2: normalise: expected True or False, got int$"),
        ("linear:feature_map=elu+1,feature_map=relu", "^mechanism: linear:.*: feature_map is given twice$"),
    ],
)
def test_what_cannot_be_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_neither_no_text_nor_no_length_can_be_parsed():
    with pytest.raises(TypeError, match="^mechanism: expected text such as .*, got LinearConfig$"):
        parse(LinearConfig())
    for length in (0, -5):
        with pytest.raises(ValueError, match=f"^length: must be at least 1, got {length}$"):
            parse("linear", length)


def test_fields_left_out_are_usual_for_a_length():
    assert parse("block-topk:k=2", 64) == BlockTopKConfig(BlockTopKConfig.usual(64).block, 2)
    assert parse("block-topk:k=2") == BlockTopKConfig(k=2)


@looped("kind", MECHANISMS)
def test_json_gives_every_configuration_back(kind):
    config = kind.usual(300)
    values = to_json(config)
    assert json.loads(json.dumps(values)) == values
    assert from_json(values, MECHANISMS) == config
    assert parse(kind.name, 300) == config


@looped(
    ("values", "message"),
    [
        ("linear", "^mechanism: expected an object with a name, got 'linear'$"),
        ({}, "^mechanism: expected an object with a name, got {}$"),
        ({"name": "liner"}, "^mechanism: expected one of linear, .*; got 'liner'$"),
        ({"name": "linear", "map": 1}, "^mechanism: linear has no map$"),
        ({"name": "linear", "normalise": 2}, "^mechanism: linear: normalise: expected True or False, got int$"),
        ({"name": "linformer", "length": 5}, "^mechanism: linformer: .*rank"),
    ],
)
def test_json_that_cannot_be_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        from_json(values, MECHANISMS)

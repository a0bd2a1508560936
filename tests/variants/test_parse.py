"""Mechanisms as a command line names them."""

from __future__ import annotations

import pytest

from saccade.variants import LinearConfig, PerformerConfig, ReformerConfig, SigmoidConfig, parse


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("linear", LinearConfig()),
        ("linear:feature_map=taylor", LinearConfig("taylor")),
        ("linear:normalise=False,feature_map=relu", LinearConfig("relu", normalise=False)),
        ("performer:features=34,redraw_every=none", PerformerConfig(34)),
        ("reformer:buckets=8,chunk=8,redraw=false", ReformerConfig(8, chunk=8, redraw=False)),
        ("sigmoid:", SigmoidConfig()),
    ],
)
def test_a_name_and_settings_are_a_configuration(text, config):
    assert parse(text) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("liner", "^mechanism: expected one of linear, .*; got 'liner'$"),
        ("linear:map=relu", "^mechanism: linear takes feature_map=..., normalise=...; got 'map=relu'$"),
        ("linear:feature_map", "^mechanism: linear takes .*; got 'feature_map'$"),
        ("linear:feature_map=cosine", "^mechanism: linear:feature_map=cosine: .*cosine"),
        ("reformer:buckets=7", "^mechanism: reformer:buckets=7: buckets: .*7"),
        ("linear:normalise=2", "^mechanism: linear:normalise=2: normalise: expected True or False, got int$"),
    ],
)
def test_what_cannot_be_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)

"""Position schemes as values: they compare, check themselves, and build what they name."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

from looped import looped
from saccade.positions import (
    AlibiBias,
    AlibiConfig,
    Config,
    LinearScaling,
    NTKScaling,
    Rotary,
    RotaryConfig,
    T5Bias,
    T5Config,
    YaRNScaling,
)

VALUES = [
    RotaryConfig(),
    RotaryConfig(500.0),
    RotaryConfig(layout="interleaved"),
    RotaryConfig(turned=4),
    RotaryConfig(scaling=LinearScaling(2.0)),
    RotaryConfig(scaling=NTKScaling(2.0)),
    RotaryConfig(scaling=YaRNScaling(2.0, 41)),
    AlibiConfig(),
    AlibiConfig(learned=True),
    T5Config(),
    T5Config(buckets=8),
    T5Config(max_distance=64),
    T5Config(bidirectional=False),
]


def test_values_are_told_apart_and_can_be_keys():
    assert len(set(VALUES)) == len(VALUES)
    for value in VALUES:
        again = pickle.loads(pickle.dumps(value))
        assert again == value and hash(again) == hash(value)
        assert isinstance(value, Config)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, 3)


@looped("value", [v for v in VALUES if isinstance(v, RotaryConfig)])
def test_rotary_is_built_as_named(value):
    built = value.build(3, 10)
    assert isinstance(built, Rotary)
    assert built.turned == (10 if value.turned is None else value.turned)
    x = torch.randn(2, 3, 7, 10)
    direct = Rotary(10, value.base, layout=value.layout, turned=value.turned, scaling=value.scaling)
    assert torch.equal(built(x, 5), direct(x, 5))
    if value != RotaryConfig():
        assert not torch.equal(built(x, 5), Rotary(10)(x, 5))


@pytest.mark.parametrize("learned", [False, True])
def test_alibi_is_built_as_named(learned):
    built = AlibiConfig(learned).build(6, 5)
    assert isinstance(built, AlibiBias)
    assert (built.learned, built.slopes.shape) == (learned, (6,))


def test_t5_is_built_as_named():
    built = T5Config(8, 64, False).build(6, 5)
    assert isinstance(built, T5Bias)
    assert (built.table.shape, built.max_distance, built.bidirectional) == ((8, 6), 64, False)


def test_every_build_is_a_module_of_its_own():
    one, other = T5Config().build(6, 5), T5Config().build(6, 5)
    assert one.table is not other.table and not torch.equal(one.table, other.table)


@looped(
    ("call", "error", "message"),
    [
        (lambda: RotaryConfig(1.0), ValueError, "base: must be greater than 1, got 1.0"),
        (lambda: RotaryConfig(None), TypeError, "base: must be a number, got a NoneType"),
        (lambda: RotaryConfig(layout="neox"), ValueError, "layout: must be one of 'half', 'interleaved', got 'neox'"),
        (lambda: RotaryConfig(turned=5), ValueError, "turned: .* even and at least 2, got 5"),
        (lambda: RotaryConfig(scaling="linear"), TypeError, "scaling: must be LinearScaling, .*, got 'linear'"),
        (lambda: RotaryConfig().build(3, 7), ValueError, "width: .* must be even, got 7"),
        (lambda: RotaryConfig(turned=8).build(3, 6), ValueError, "turned: at most all 6 features .*, got 8"),
        (lambda: AlibiConfig("yes"), TypeError, "learned: must be True or False, got 'yes'"),
        (lambda: AlibiConfig().build(0, 6), ValueError, "heads must be at least 1, got 0"),
        (lambda: T5Config(buckets=7), ValueError, "an even number of at least 4 buckets, got 7"),
        (lambda: T5Config(max_distance=3), ValueError, "max_distance must exceed 8, got 3"),
        (lambda: T5Config(bidirectional=None), TypeError, "bidirectional: must be True or False, got None"),
        (lambda: T5Config().build(2.0, 6), TypeError, "heads must be an int, got 2.0"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()

"""Bad input is refused before any work, in words that name the argument, what came and what was expected."""

from __future__ import annotations

import re

import pytest
import torch

import problems
import saccade
from looped import looped
from saccade.operator._backends.native import _statistics


def run(named=None, mask=None, **more):
    named = problems.tensors() if named is None else named
    return saccade.statistics(named["query"], named["key"], mask, **more)


KEYS = torch.ones(13, dtype=torch.bool)
GROUPS = [
    ({"a": KEYS.int()}, TypeError, "groups['a'] must be a boolean tensor (Lk,) or (B, Lk), got a int32 tensor"),
    ({"a": [True] * 13}, TypeError, "groups['a'] must be a boolean tensor (Lk,) or (B, Lk), got a list"),
    ({"a": KEYS[:11]}, ValueError, "groups['a'] must be (Lk,) = (13,) or (B, Lk) = (2, 13), got (11,)"),
    ({"a": KEYS[None]}, ValueError, "got (1, 13)"),
    ({"a": KEYS.expand(2, 6, 13)}, ValueError, "got (2, 6, 13)"),
    (
        {"first": KEYS},
        ValueError,
        "groups: self, previous, next, first, sink are always measured, expected another name, got 'first'",
    ),
    ({"sink": KEYS}, ValueError, "expected another name, got 'sink'"),
    ({3: KEYS}, TypeError, "groups: a name must be a str, got 3 (int)"),
    ([KEYS], TypeError, "groups must be a dict of names and boolean tensors, got a list"),
    ({"a": KEYS.to("meta")}, ValueError, "groups['a'] is on meta, expected query's device cpu"),
]


@looped(("groups", "error", "words"), GROUPS)
def test_groups(groups, error, words, backend):
    with pytest.raises(error, match=re.escape(words)):
        run(groups=groups, backend=backend)


def test_no_groups_are_none():
    assert set(run(groups={}).mass) == {"self", "previous", "next", "first", "sink"}


@pytest.mark.parametrize(
    ("top", "error", "words"),
    [
        (-1, ValueError, "top must be at least 0, got -1"),
        (2.0, TypeError, "top must be an int, got 2.0 (float)"),
        (True, TypeError, "top must be an int, got True (bool)"),
    ],
)
def test_top(top, error, words):
    with pytest.raises(error, match=re.escape(words)):
        run(top=top)


@pytest.mark.parametrize(
    ("histograms", "error", "words"),
    [
        (("query", "lse"), ValueError, "histograms must be names among query, key, value, logits, weights, got 'lse'"),
        ("out", ValueError, "got 'out'"),
        (3, TypeError, "histograms must be names among query, key, value, logits, weights, got 3 (int)"),
    ],
)
def test_histograms(histograms, error, words):
    with pytest.raises(error, match=re.escape(words)):
        run(histograms=histograms)


def test_backends():
    with pytest.raises(ValueError, match="backend must be one of auto, native, chunked, reference; got 'sdpa'"):
        run(backend="sdpa")
    with pytest.raises(ValueError, match="backend 'native' cannot do this call: .*float64"):
        run(backend="native")


def test_a_top_beyond_the_kernels_is_refused_by_them_alone(monkeypatch):
    named = problems.tensors(dtype=torch.float32, keys=37)
    most = _statistics.MOST_TOP
    with pytest.raises(ValueError, match=f"keep at most {most} keys of each row, and top is {most + 1}"):
        run(named, top=most + 1, backend="native")
    assert run(named, top=most + 1).top_keys.shape[-1] == most + 1


CALLS = [
    ({"value": torch.zeros(2, 3, 17, 7)}, ValueError, "value has length (axis 2) 17, expected key's 13"),
    ({"value": torch.zeros(3, 13, 7)}, ValueError, "value must be 4-D"),
    ({"scale": float("nan")}, ValueError, "scale must be finite"),
    ({"softcap": -1.0}, ValueError, "softcap must be positive"),
    ({"sink": torch.zeros(3)}, ValueError, "sink must have shape (Hq,) = (6,), got (3,)"),
    ({"bias": torch.zeros(11, 17)}, ValueError, "bias: shape (11, 17) does not broadcast"),
    ({"mask": torch.zeros(11, 13)}, TypeError, "bias="),
    ({"mask": saccade.Padding([1, 2, 3])}, ValueError, "made for a batch of 3"),
]


@looped(("options", "error", "words"), CALLS)
def test_the_rest_is_refused_as_attention_refuses_it(options, error, words):
    options = {name: x.double() if name == "value" else x for name, x in options.items()}
    with pytest.raises(error, match=re.escape(words)):
        run(**options)


@pytest.mark.parametrize("name", ["query", "key"])
def test_what_is_no_tensor_is_named(name):
    named = problems.tensors()
    with pytest.raises(TypeError, match=f"{name} must be a tensor"):
        run(named | {name: [1.0]})
    with pytest.raises(ValueError, match=f"{name} must be 4-D"):
        run(named | {name: named[name][0]})


def test_a_slice_that_does_not_say_where_its_rows_stand():
    named = problems.tensors(rows=5, keys=7)
    mask = saccade.Padding([13, 7]).slice((4, 9), (0, 7))
    with pytest.raises(ValueError, match=r"without the positions of its queries; pass mask.slice\(..., lengths="):
        run(named, mask)
    assert run(named, saccade.Padding([13, 7]).slice((4, 9), (0, 7), lengths=(13, 13))).counted.any()


def test_vmap_is_refused():
    named = problems.tensors()
    with pytest.raises(ValueError, match=r"query: torch.vmap runs over it"):
        torch.vmap(lambda query: run(named | {"query": query}).entropy)(torch.stack([named["query"]] * 3))

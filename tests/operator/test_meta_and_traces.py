"""Tensors without values, and calls that torch.jit.trace records."""

from __future__ import annotations

import pytest
import torch

import saccade
from looped import looped
from saccade import Causal, Padding, Window

MASKS = [None, Causal(), Window(2, 0), Padding([3, 5]), Causal() & Padding([3, 5])]
TRACING = ("ignore:Converting a tensor", "ignore:`torch.jit", "ignore:Tracer")


@pytest.mark.slow
@looped("mask", MASKS)
@looped("backend", ["auto", "chunked", "reference"])
def test_on_meta_a_call_has_its_shapes(mask, backend):
    query, key = torch.zeros(2, 4, 5, 8, device="meta"), torch.zeros(2, 2, 5, 8, device="meta")
    assert saccade.attention(query, key, key[..., :3], mask, backend=backend).shape == (2, 4, 5, 3)
    out, lse = saccade.attention_with_lse(query, key, key, mask, backend=backend)
    assert (out.shape, lse.shape) == ((2, 4, 5, 8), (2, 4, 5)) and out.device.type == "meta"
    assert saccade.attention_weights(query, key, mask).shape == (2, 4, 5, 5)


def test_on_meta_a_bias_has_no_values_to_look_at():
    query = torch.zeros(2, 4, 5, 8, device="meta")
    assert saccade.attention(query, query, query, bias=torch.ones(5, 5, device="meta")).shape == query.shape


def test_on_meta_there_are_no_statistics():
    query = torch.zeros(2, 4, 5, 8, device="meta")
    with pytest.raises(ValueError, match="query is on meta, where tensors have no values"):
        saccade.statistics(query, query)


def traced(mask, **options):
    example = torch.randn(2, 2, 5, 8)
    return torch.jit.trace(lambda query: saccade.attention(query, query, query, mask, **options), (example,))


@pytest.mark.filterwarnings(*TRACING, "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("mask", [None, Causal(), Padding([3, 5])], ids=repr)
def test_what_pytorch_itself_computes_can_be_traced(mask):
    query = torch.randn(2, 2, 5, 8)
    torch.testing.assert_close(traced(mask)(query), saccade.attention(query, query, query, mask))
    torch.testing.assert_close(saccade.attention(query, query, query, mask, backend="sdpa"), traced(mask)(query))


@pytest.mark.filterwarnings(*TRACING, "ignore::torch.jit.TracerWarning")
def test_what_cannot_be_traced_is_told():
    for make in (lambda: traced(Window(2, 0)), lambda: traced(None, backend="chunked")):
        with pytest.raises(ValueError, match="torch.jit.trace cannot record this call.*torch.compile or torch.export"):
            make()
    query = torch.randn(2, 2, 5, 8)
    expected = saccade.attention(query, query, query, Window(2, 0))
    torch.testing.assert_close(traced(Window(2, 0), backend="reference")(query), expected)

"""The kernel for few rows of a linear layer on every instruction set, against float64; and which calls take it.

Shape legend: R rows, E width, F features.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from native.fuzzing import each_set
from saccade.nn._linear import Linear
from saccade.operator import _products


def layer_of(width, features, bias=True):
    torch.manual_seed(width + features)
    return Linear(width, features, bias)


def counted(monkeypatch):
    """Rows of each call of the kernel."""
    rows, right = [], _products.few_rows
    monkeypatch.setattr(
        _products, "few_rows", lambda x, *rest: rows.append(x.numel() // x.shape[-1]) or right(x, *rest)
    )
    return rows


@pytest.mark.usefixtures("every_other_set")
@pytest.mark.parametrize(("width", "features"), [(211, 157), (1, 32771), (1024, 37), (32, 1031)])
def test_every_number_of_rows(width, features, monkeypatch):
    """Each sum has E roundings of 6e-8 of its terms at most; widths and features that are no whole vectors or tiles."""
    layer, rows = layer_of(width, features, bias=features % 3 > 0), counted(monkeypatch)
    bias = None if layer.bias is None else layer.bias.double()
    for _ in each_set():
        rows.clear()
        for count in range(1, _products.FEW + 1):
            x = torch.randn(count, width)
            with torch.no_grad():
                got, one = layer(x), layer(x[-1:])
            terms = x.double().abs() @ layer.weight.double().abs().T
            expected = F.linear(x.double(), layer.weight.double(), bias)
            assert ((got - expected).abs() <= (width + 1) * 2**-24 * (terms + expected.abs())).all()
            assert torch.equal(got[-1:], one)  # whatever stands beside it
        assert rows == [n for count in range(1, _products.FEW + 1) for n in (count, 1)]


@pytest.mark.usefixtures("every_other_set")
@pytest.mark.parametrize(("width", "features"), [(211, 157), (1037, 2053), (64, 16)])
@pytest.mark.parametrize("block", [512, 37])
def test_sums_run_in_the_order_that_was_asked_for(width, features, block):
    """One multiply-add after the other, against float64 rounded after each (sets without fused ones: near)."""
    torch.manual_seed(width + block)
    weight, bias, x = torch.randn(features, width), torch.randn(features), torch.randn(_products.ORDERED, width)
    total = torch.zeros(len(x), features)
    for first in range(0, width, block):
        part = torch.zeros(len(x), features)
        for k in range(first, min(first + block, width)):
            part = (x[:, k, None].double() * weight[:, k].double() + part.double()).float()
        total = total + part
    turned = weight.t().contiguous().t()
    for name in each_set():
        for count in range(1, len(x) + 1):
            got = _products.few_rows(x[:count], weight, bias, block)
            assert torch.equal(got, _products.few_rows(x[:count], turned, bias, block))
            assert torch.equal(got, (total + bias)[:count]) or name == "baseline"
            assert torch.allclose(got, (total + bias)[:count], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("width", "features"), [(768, 1040), (1037, 1040), (3001, 160)])
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "relu", "silu"])
def test_one_and_two_rows_have_the_bits_that_they_have_among_many(width, features, activation, turned, monkeypatch):
    """With a packed copy, whose sums are oneDNN's; and the kernel is in use wherever oneDNN's order is known."""
    rows = counted(monkeypatch)
    torch.manual_seed(width)
    weight, bias, x = torch.randn(features, width) / 9, torch.randn(features), torch.randn(9, width)
    weight = weight.t().contiguous().t() if turned else weight
    product, other = _products.Product(), torch.randn(9, features)
    product.users = 1
    joined = ("add", other) if activation is None else None
    with torch.no_grad():
        many = product(x, weight, bias, activation, joined)
        for count in (1, 2):
            some = None if joined is None else ("add", other[:count])
            assert torch.equal(product(x[:count], weight, bias, activation, some), many[:count])
    block = product.blocks[weight.shape, weight.stride(), activation]
    assert block in (0, *_products._BLOCKS)
    assert not block or rows[-2:] == [1, 2]


def test_a_weight_that_changes_after_the_trial():
    """Zeros, of which every order gives the same; then other values, and the same shape in another layout of memory."""
    torch.manual_seed(5)
    weight, x, product = torch.zeros(1040, 1037), torch.randn(9, 1037), _products.Product()
    product.users = 1
    with torch.no_grad():
        product(x[:1], weight)
        weight.normal_()
        assert torch.equal(product(x[:1], weight), product(x, weight)[:1])
        for other in (weight.t().contiguous().t(), torch.randn(1040, 2 * 1037)[:, ::2], torch.randn(2080, 1037)[::2]):
            assert torch.equal(product(x[:1], other), product(x, other)[:1])
            assert torch.allclose(product(x[:1], other), F.linear(x[:1], other), atol=1e-3)


def test_defaults_of_device_and_dtype_do_not_matter():
    """What is tried, and the unit matrix, are made in the first call, whatever the defaults are then."""
    torch.manual_seed(3)
    weight, x, product = torch.randn(1040, 768), torch.randn(9, 768), _products.Product()
    product.users = 1
    _products._unit.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), torch.device("meta"):
            one = product(x[:1], weight, activation="gelu")
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        assert torch.equal(one, product(x, weight, activation="gelu")[:1])


def test_threads_change_no_bit():
    layer, x = layer_of(512, 2053), torch.randn(3, 1, 512)
    with torch.no_grad():
        found = []
        for threads in (1, 2, 5):
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            found.append(layer(x))
            torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_layouts_of_rows_and_axes(monkeypatch):
    layer, rows = layer_of(192, 193), counted(monkeypatch)
    x = torch.randn(7, 5, 384)[::3, ::4, ::2]
    with torch.no_grad():
        assert torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias), atol=1e-5)
        assert layer(x[0, 0]).shape == (193,)
    assert rows == [6, 1]


def test_calls_that_others_look_on_take_pytorchs(monkeypatch):
    """Gradients, autocast, modes, transforms, other dtypes, small weights, many or no rows; widths that are wrong."""
    layer, rows = layer_of(192, 193), counted(monkeypatch)
    x = torch.randn(2, 192)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        with FlopCounterMode(display=False) as counter:
            layer(x)
        assert counter.get_total_flops() == 2 * 2 * 192 * 193
        torch.func.vmap(layer)(x)
        layer(torch.randn(_products.FEW + 1, 192)), layer(torch.randn(0, 192)), layer_of(16, 16)(torch.randn(1, 16))
        layer_of(192, 193).double()(x.double())
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            layer(torch.randn(2, 191))
        assert not rows
        layer(x)
    assert rows == [2]

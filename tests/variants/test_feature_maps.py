"""Feature maps against their papers' formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from looped import looped
from saccade.variants.feature_maps import NAMES, Dpfp, EluPlusOne, Relu, Softmax, Taylor


def tokens(width=7):
    return torch.randn(3, 5, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [2, 7, 11])
def test_widths_and_gradients(name, width):
    x = tokens(width).requires_grad_()
    feature_map = NAMES[name]
    assert feature_map(x).shape == (3, 5, feature_map.width(width))
    assert feature_map(x).dtype == x.dtype
    assert torch.autograd.gradcheck(feature_map, x)


@looped("name", NAMES)
def test_weights_are_not_negative(name):
    x = 3 * tokens()
    assert (NAMES[name](x[0]) @ NAMES[name](x[1]).mT >= 0).all()


def test_elu_plus_one():
    x = 4 * tokens()
    torch.testing.assert_close(EluPlusOne()(x), F.elu(x) + 1, rtol=0, atol=1e-15)


def test_elu_plus_one_keeps_the_digits_of_small_features():
    x = torch.tensor([-40.0, -17.5, 0.0, 1e-3, 1e30])
    exact = torch.tensor([math.exp(-40), math.exp(-17.5), 1.0, 1.001, 1e30])
    torch.testing.assert_close(EluPlusOne()(x), exact, rtol=3e-7, atol=0)
    assert F.elu(x[0]) + 1 == 0  # what it is for


def test_second_derivative_of_elu_plus_one():
    assert torch.autograd.gradgradcheck(EluPlusOne(), tokens().requires_grad_())


def test_relu_and_softmax():
    x = tokens()
    assert torch.equal(Relu()(x), torch.where(x > 0, x, 0.0))
    weights = Softmax()(x)
    torch.testing.assert_close(weights[..., 3], x[..., 3].exp() / x.exp().sum(-1))
    torch.testing.assert_close(weights[..., 9], (-x[..., 2]).exp() / (-x).exp().sum(-1))
    assert torch.isfinite(Softmax()(1e4 * x)).all()


@pytest.mark.parametrize("nu", [1, 2, 5])
def test_dpfp(nu):
    x = tokens(3)
    r = [max(y, 0.0) for y in (*x[0, 0].tolist(), *(-x[0, 0]).tolist())]
    expected = sorted(r[i] * r[(i + n) % 6] for n in range(1, nu + 1) for i in range(6))
    torch.testing.assert_close(Dpfp(nu)(x)[0, 0].sort().values, torch.tensor(expected, dtype=torch.float64))


def test_taylor_is_the_polynomial():
    x, y = tokens()[0], tokens()[1]
    s = x @ y.mT / math.sqrt(7)
    torch.testing.assert_close(Taylor()(x) @ Taylor()(y).mT, 1 + s + s**2 / 2, rtol=1e-13, atol=1e-13)
    assert Taylor().width(16) == 153  # as the paper counts


@pytest.mark.parametrize(
    "nu, kind, words",
    [
        (0, ValueError, "nu: expected at least 1, got 0"),
        (1.5, TypeError, "nu: expected an int, got float"),
        (True, TypeError, "nu: expected an int, got bool"),
    ],
)
def test_dpfp_refuses(nu, kind, words):
    with pytest.raises(kind, match=words):
        Dpfp(nu)


def test_dpfp_refuses_heads_that_are_too_narrow():
    with pytest.raises(ValueError, match="nu: expected less than 6, twice the width of a head, got 6"):
        Dpfp(6)(tokens(3))

"""The kernels' own exponential against float64, on every instruction set of this machine."""

from __future__ import annotations

import pytest
import torch

native = pytest.importorskip("saccade._native")
EPS = 2.0**-23


@pytest.fixture(params=native.sets())
def each_set(request):
    before = native.active()
    native.use(request.param)
    yield request.param
    native.use(f"{before}!")


def exp2(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    native.exp2(x.data_ptr(), y.data_ptr(), x.numel())
    return y


def floats(low: int, high: int, step: int) -> torch.Tensor:
    """Every `step`-th float32 whose bits, as an integer, lie in [low, high)."""
    return torch.arange(low, high, step, dtype=torch.int64).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("sign", [0, 1])
def test_within_two_and_a_half_units_in_the_last_place(each_set, sign):
    # From 2^-30 to 126 in magnitude, every 101st float: some 3.7 million, both signs. What is below rounds to 1.
    x = floats(0x30800000, 0x42FC0000, 101) * (-1 if sign else 1)
    truth = torch.exp2(x.double())
    unit = torch.exp2(truth.log2().floor()) * EPS
    assert ((exp2(x).double() - truth).abs() / unit).max() < 2.5


def test_exact_where_it_must_be(each_set):
    whole = torch.arange(-126.0, 128.0)
    assert torch.equal(exp2(whole), torch.exp2(whole))
    hidden = torch.tensor([float("-inf"), -3.4e38, -1e9, -150.0, -127.0])
    assert torch.equal(exp2(hidden), torch.zeros(5))
    assert exp2(torch.tensor([float("nan")] * 3)).isnan().all()


def test_any_number_of_floats(each_set):
    x = torch.linspace(-3, 3, 67)
    whole = exp2(x)
    for count in (1, 2, 15, 17, 47, 66):
        assert torch.equal(exp2(x[:count].clone()), whole[:count])

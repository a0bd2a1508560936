"""Where tokens stand: every kind of offset, read and checked in one place."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from looped import looped
from positions.formulas import of_each_token
from saccade.positions import Learned, Rotary, Sinusoidal, places

CPU = torch.device("cpu")
EVERY = {
    "rotary": (lambda: Rotary(6), (3, 2, 7, 6)),
    "sinusoidal": (lambda: Sinusoidal(11), (3, 7, 11)),
    "learned": (lambda: Learned(97, 11), (3, 7, 11)),
}


@given(st.integers(0, 10**12), st.integers(0, 13))
def test_an_int_is_the_first_token_of_every_item(offset, length):
    got = places(offset, length, CPU, 3)
    assert got.dtype == torch.int64
    assert got.tolist() == [offset + i for i in range(length)]


@given(st.lists(st.integers(-(10**12), 10**12), max_size=5), st.integers(0, 13))
def test_one_for_each_item_is_its_first_token(firsts, length):
    got = places(torch.tensor(firsts, dtype=torch.int64), length, CPU, len(firsts))
    assert got.dtype == torch.int64 and got.shape == (len(firsts), length)
    assert got.tolist() == [[first + i for i in range(length)] for first in firsts]


def test_one_for_each_token_is_taken_as_it_is():
    offset = torch.randint(-5, 100, (3, 7))
    assert torch.equal(places(offset, 7, CPU, 3), offset)


def test_other_integers_count_as_ints():
    assert places(np.int64(5), 3, CPU, 1).tolist() == [5, 6, 7]


def test_positions_go_to_the_device_of_the_call():
    assert places(torch.tensor([5, 6, 7]), 7, torch.device("meta"), 3).device.type == "meta"
    assert places(5, 7, torch.device("meta"), 3).device.type == "meta"


BAD = [
    (-1, ValueError, "offset: positions start at 0, got -1"),
    (True, TypeError, "offset must be an int, got True"),
    (1.0, TypeError, "offset must be an int, got 1.0"),
    ([1, 2, 3], TypeError, "offset must be an int, got a list"),
    (torch.zeros(3), TypeError, r"offset: a tensor must be int64, got a float32 tensor of shape \(3,\)"),
    (torch.zeros(3, dtype=torch.int32), TypeError, "offset: a tensor must be int64, got a int32 tensor"),
    (torch.zeros(3, dtype=torch.bool), TypeError, "offset: a tensor must be int64, got a bool tensor"),
    (torch.tensor(3), ValueError, r"offset: expected .*\(B,\) = \(3,\) .* \(B, L\) = \(3, 7\), got shape \(\)"),
    (torch.zeros(2).long(), ValueError, r"got shape \(2,\)"),
    (torch.zeros(7).long(), ValueError, r"got shape \(7,\)"),
    (torch.zeros(1, 7).long(), ValueError, r"got shape \(1, 7\)"),
    (torch.zeros(3, 5).long(), ValueError, r"got shape \(3, 5\)"),
    (torch.zeros(3, 1, 7).long(), ValueError, r"got shape \(3, 1, 7\)"),
]


@looped(("offset", "error", "message"), BAD)
def test_bad_offsets(offset, error, message):
    with pytest.raises(error, match=message):
        places(offset, 7, CPU, 3)


@looped("name", EVERY)
@looped(("offset", "error", "message"), BAD)
def test_every_module_reads_offsets_there(name, offset, error, message):
    make, shape = EVERY[name]
    with pytest.raises(error, match=message):
        make()(torch.zeros(shape), offset)


@looped("name", EVERY)
@looped("offset", [5, torch.tensor([5, 0, 31]), torch.arange(21).view(3, 7).flip(1) * 4])
def test_every_kind_of_offset_is_every_token_put_by_itself(name, offset):
    make, shape = EVERY[name]
    module, x = make().double(), torch.randn(shape, dtype=torch.float64)
    positions, out = of_each_token(offset, 3, 7), module(x, offset)
    for b in range(3):
        for i in range(7):
            alone = module(x[b : b + 1, ..., i : i + 1, :], int(positions[b, i]))
            torch.testing.assert_close(out[b : b + 1, ..., i : i + 1, :], alone, rtol=1e-15, atol=1e-15)


@looped("name", EVERY)
@looped(("batch", "length"), [(3, 0), (0, 7), (0, 0)])
def test_nothing_stays_nothing(name, batch, length):
    make, shape = EVERY[name]
    x = torch.zeros(batch, *shape[1:-2], length, shape[-1])
    for offset in (0, 5, torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, length, dtype=torch.int64)):
        assert make()(x, offset).shape == x.shape


@pytest.mark.parametrize("name", EVERY)
def test_gradients_of_every_input(name):
    make, shape = EVERY[name]
    module = make().double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for offset in (5, torch.tensor([5, 0, 31]), torch.randint(0, 97, (3, 7))):
        assert torch.autograd.gradcheck(
            lambda x, *parameters, offset=offset: module(x, offset), (x, *module.parameters()), fast_mode=True
        )
        assert torch.autograd.gradgradcheck(lambda x, offset=offset: module(x, offset), (x,), fast_mode=True)


@pytest.mark.parametrize("name", EVERY)
def test_works_under_torch_func_and_keeps_nothing_of_it(name):
    make, shape = EVERY[name]
    module, x = make().double(), torch.randn(2, *shape, dtype=torch.float64)
    offset = torch.tensor([5, 0, 31])
    apart = torch.stack([module(one, offset) for one in x])
    fresh = make().double()
    fresh.load_state_dict(module.state_dict())
    torch.testing.assert_close(torch.func.vmap(lambda one: fresh(one, offset))(x), apart, rtol=1e-15, atol=1e-15)
    gradient = torch.func.grad(lambda one: fresh(one, 3).square().sum())(x[0])
    torch.testing.assert_close(
        gradient, torch.autograd.grad(module(y := x[0].requires_grad_(), 3).square().sum(), y)[0]
    )
    # Tables of a transform would be wrappers of a level that has ended.
    for value in [*vars(fresh).values(), *vars(getattr(fresh, "_waves", fresh)).values()]:
        if isinstance(value, torch.Tensor):
            assert not torch._C._functorch.is_functorch_wrapped_tensor(value)
    torch.testing.assert_close(fresh(x[1].detach(), 3), module(x[1].detach(), 3), rtol=0, atol=0)

"""Learned positions: rows of a table, and an error beyond it."""

from __future__ import annotations

import pytest
import torch

from looped import looped
from saccade.positions import Learned


def test_adds_the_rows_of_its_table():
    learned, x = Learned(31, 5), torch.randn(2, 7, 5)
    torch.testing.assert_close(learned(x, 11), x + learned.weight[11:18], rtol=0, atol=0)
    positions = torch.randint(0, 31, (2, 7))
    torch.testing.assert_close(learned(x, positions), x + learned.weight[positions], rtol=0, atol=0)


def test_gradients_add_up_in_the_rows_that_were_read():
    learned = Learned(13, 3).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(2, 5, 3, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 1, 12, 3], [1, 0, 5, 5, 5]])
    learned(x, positions).backward(cotangent)
    want = torch.zeros(13, 3, dtype=torch.float64)
    for b in range(2):
        for i in range(5):
            want[positions[b, i]] += cotangent[b, i]
    torch.testing.assert_close(learned.weight.grad, want)
    assert torch.equal(x.grad, cotangent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_keeps_the_inputs_dtype(dtype):
    x = torch.randn(2, 7, 5, dtype=dtype)
    learned = Learned(31, 5)
    for offset in (3, torch.tensor([3, 5])):
        assert learned(x, offset).dtype == dtype
    exact = (x.double() + learned.weight[:7].double()).to(dtype)
    torch.testing.assert_close(learned(x), exact, rtol=torch.finfo(dtype).eps, atol=2.4e-7)


def test_starts_as_large_as_the_sinusoid():
    weight = Learned(1009, 101).weight.detach().double()
    count = weight.numel()
    # Four standard errors of a mean and of a mean square of normal numbers with variance 1/2.
    assert abs(weight.mean()) < 4 * (0.5 / count) ** 0.5
    assert abs(weight.square().mean() - 0.5) < 4 * 0.5 * (2 / count) ** 0.5


def test_the_seed_decides_and_reset_draws_anew():
    torch.manual_seed(5)
    one = Learned(7, 3)
    torch.manual_seed(5)
    other = Learned(7, 3)
    assert torch.equal(one.weight, other.weight)
    other.reset_parameters()
    assert not torch.equal(one.weight, other.weight)
    other.load_state_dict(one.state_dict())
    assert list(one.state_dict()) == ["weight"] and torch.equal(one.weight, other.weight)


BEYOND = [
    (25, "25 to 31"),
    (31, "31 to 37"),
    (torch.tensor([0, 25]), "0 to 31"),
    (torch.tensor([-1, 3]), "-1 to 9"),
    (torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 31, 4, 5, 6]]), "0 to 31"),
]


@looped(("offset", "message"), BEYOND)
def test_beyond_the_table_is_an_error(offset, message):
    with pytest.raises(
        ValueError, match=f"offset: the table has 31 learned positions, 0 to 30, but tokens stand at {message}$"
    ):
        Learned(31, 5)(torch.zeros(2, 7, 5), offset)


def test_the_last_position_is_still_in_the_table():
    learned, x = Learned(31, 5), torch.zeros(2, 7, 5)
    for offset in (24, torch.tensor([24, 24])):
        assert torch.equal(learned(x, offset)[1, 6], learned.weight[30])
    assert Learned(31, 5)(torch.zeros(2, 0, 5), 31).shape == (2, 0, 5)


@pytest.mark.parametrize("where", ["compiled", "vmap"])
def test_where_nobody_can_look_a_row_of_nan_stands_in(where):
    learned, x = Learned(31, 5), torch.randn(2, 7, 5)
    offset = torch.tensor([-2, 27])
    if where == "compiled":
        out = torch.compile(learned, backend="eager", fullgraph=True)(x, offset)
    else:
        out = torch.func.vmap(learned, (0, None))(x[None], offset)[0]
    off = torch.zeros(2, 7, dtype=torch.bool)
    off[0, :2] = off[1, 4:] = True
    assert out[off].isnan().all()
    assert torch.equal(out[0, 2:], x[0, 2:] + learned.weight[:5])
    assert torch.equal(out[1, :4], x[1, :4] + learned.weight[27:])
    gradient = torch.autograd.grad(out[~off].sum(), learned.weight)[0]
    assert gradient.isfinite().all() and gradient.sum() == 5 * (~off).sum()


@looped(
    ("call", "error", "message"),
    [
        (lambda: Learned(0, 5), ValueError, "length must be at least 1, got 0"),
        (lambda: Learned(5, 0), ValueError, "width must be at least 1, got 0"),
        (lambda: Learned(5.0, 5), TypeError, "length must be an int, got 5.0"),
        (lambda: Learned(5, True), TypeError, "width must be an int, got True"),
        (lambda: Learned(9, 5)(torch.zeros(2, 3, 7)), ValueError, r"x: expected .*length, 5\), got \(2, 3, 7\)"),
        (lambda: Learned(9, 5)(torch.zeros(2, 1, 3, 5)), ValueError, r"x: expected .*, got \(2, 1, 3, 5\)"),
        (lambda: Learned(9, 5)(torch.zeros(2, 3, 5).int()), TypeError, "x: must be floating point, got a int32"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()

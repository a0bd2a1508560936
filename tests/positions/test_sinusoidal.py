"""Sinusoidal positions against the paper's equation, feature by feature."""

from __future__ import annotations

import copy
import pickle

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from looped import looped
from positions import formulas
from saccade.positions import Sinusoidal


@given(
    st.integers(1, 13),
    st.integers(1, 7),
    st.integers(0, 5000),
    st.floats(1.5, 1e6),
)
def test_is_the_papers_equation(width, length, offset, base):
    x = torch.randn(2, length, width, dtype=torch.float64)
    want = torch.tensor([formulas.wave(offset + i, width, base) for i in range(length)], dtype=torch.float64)
    # An angle of up to 5,000 radians, from a power and a product, each rounded: 5e3 * 2 eps, and as much in the oracle.
    torch.testing.assert_close(Sinusoidal(width, base=base)(x, offset), x + want, rtol=0, atol=5e3 * 8 * 2.3e-16)


@given(st.integers(1, 7).map(lambda n: 2 * n), st.floats(-1000, 1000), st.floats(-1000, 1000))
def test_a_shift_is_a_linear_map(width, position, shift):
    table = Sinusoidal(width).table
    moved, there = table(torch.tensor([position + shift, position], dtype=torch.float64))
    torch.testing.assert_close(moved, formulas.rotation(shift, width) @ there, rtol=0, atol=2e3 * 16 * 2.3e-16)


def test_the_rotation_depends_on_the_shift_alone_and_does_turn():
    rotation = formulas.rotation(5, 10)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(10, dtype=torch.float64))
    table = Sinusoidal(10).table(torch.arange(31))
    torch.testing.assert_close(table[5:], table[:-5] @ rotation.T)
    assert (table[6:] - table[:-6] @ rotation.T).abs().max() > 0.1


def test_products_depend_on_distance_alone():
    table = Sinusoidal(14).table(torch.arange(23))
    products = table @ table.T
    torch.testing.assert_close(products[1:, 1:], products[:-1, :-1])


def test_odd_widths_leave_out_the_last_cosine():
    positions = torch.arange(13)
    exact = torch.tensor([formulas.wave(p, 7) for p in range(13)], dtype=torch.float64)
    torch.testing.assert_close(Sinusoidal(7).table(positions), exact)
    assert Sinusoidal(1).table(positions).shape == (13, 1)


def test_halves_are_all_sines_and_then_all_cosines():
    positions = torch.arange(13)
    for width in (1, 7, 8):
        in_turn = Sinusoidal(width).table(positions)
        halves = Sinusoidal(width, layout="halves").table(positions)
        assert torch.equal(halves, torch.cat((in_turn[:, 0::2], in_turn[:, 1::2]), 1))


@looped("shape", [(), (3,), (2, 3, 5)])
@looped("dtype", [torch.int32, torch.int64, torch.float32])
def test_tables_of_any_positions(shape, dtype):
    positions = (torch.randn(shape) * 100).to(dtype)
    table = Sinusoidal(5).table(positions)
    assert table.shape == (*shape, 5) and table.dtype == torch.float64
    want = torch.tensor([formulas.wave(p, 5) for p in positions.flatten().tolist()], dtype=torch.float64)
    torch.testing.assert_close(table.view(-1, 5), want)


def test_angles_stay_exact_far_out():
    # In float32 the angle of a position near 2^24 would be off by a whole radian.
    far = 2**24 + 1
    x = torch.zeros(1, 1, 6)
    want = torch.tensor(formulas.wave(far, 6), dtype=torch.float64)
    assert (Sinusoidal(6)(x, far).double() - want).abs().max() < 1e-7


@looped("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_adds_in_the_inputs_dtype_with_one_rounding(dtype):
    x = torch.randn(2, 7, 11, dtype=dtype)
    out = Sinusoidal(11)(x, 5)
    assert out.dtype == dtype
    exact = x.double() + Sinusoidal(11).table(torch.arange(5, 12))
    # Half a unit of the last place, and what float32 adds on the way there (nothing to speak of for 16 bits).
    eps = torch.finfo(dtype).eps
    allowed = exact.abs() * eps / 2 + 2 * min(torch.finfo(torch.float32).eps, eps)
    assert ((out.double() - exact).abs() <= allowed).all()


def test_grows_with_the_text_and_stays_the_same():
    sinusoidal, x = Sinusoidal(6), torch.randn(1, 151, 6)
    parts = [sinusoidal(x[:, start:stop], start) for start, stop in ((97, 151), (0, 5), (5, 97))]
    assert torch.equal(torch.cat((parts[1], parts[2], parts[0]), 1), Sinusoidal(6)(x))


def test_saves_nothing_pickles_and_copies():
    sinusoidal, x = Sinusoidal(5, base=77.0), torch.randn(1, 3, 5)
    out = sinusoidal(x)
    assert not sinusoidal.state_dict() and not list(sinusoidal.parameters())
    for again in (pickle.loads(pickle.dumps(sinusoidal)), copy.deepcopy(sinusoidal)):
        assert torch.equal(again(x), out)
    assert len(pickle.dumps(sinusoidal)) == len(pickle.dumps(Sinusoidal(5, base=77.0)))  # no tables
    assert repr(sinusoidal) == "Sinusoidal(5, base=77)"


def test_tables_made_in_inference_mode_serve_training():
    sinusoidal = Sinusoidal(6)
    with torch.inference_mode():
        sinusoidal(torch.randn(1, 5, 6))
        sinusoidal(torch.randn(2, 5, 6), torch.tensor([3, 9]))
    x = torch.randn(2, 5, 6, requires_grad=True)
    (sinusoidal(x) + sinusoidal(x, torch.tensor([3, 9]))).square().sum().backward()
    torch.testing.assert_close(x.grad, 4 * (sinusoidal(x) + sinusoidal(x, torch.tensor([3, 9]))).detach())


@looped(
    ("call", "error", "message"),
    [
        (lambda: Sinusoidal(0), ValueError, "width must be at least 1, got 0"),
        (lambda: Sinusoidal(2.0), TypeError, "width must be an int, got 2.0"),
        (lambda: Sinusoidal(5, base=1.0), ValueError, "base: must be greater than 1, got 1.0"),
        (lambda: Sinusoidal(5, base=float("nan")), ValueError, "base: must be finite, got nan"),
        (
            lambda: Sinusoidal(5, layout="split"),
            ValueError,
            "layout: expected 'interleaved' or 'halves', got 'split'",
        ),
        (lambda: Sinusoidal(5, base="10"), TypeError, "base: must be a number, got '10'"),
        (
            lambda: Sinusoidal(5)(torch.zeros(2, 3, 7)),
            ValueError,
            r"x: expected shape \(batch, length, 5\), got \(2, 3, 7\)",
        ),
        (lambda: Sinusoidal(5)(torch.zeros(3, 5)), ValueError, r"x: expected shape .*, got \(3, 5\)"),
        (lambda: Sinusoidal(5)(torch.zeros(2, 3, 5).long()), TypeError, "x: must be floating point, got a int64"),
        (lambda: Sinusoidal(5).table(torch.tensor([True])), TypeError, "positions: must be numbers, got a bool"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()

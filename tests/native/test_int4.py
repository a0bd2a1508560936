"""Products with weights of 4 bits on every instruction set: sums against whole numbers, rounding against its bound.

Shape legend: R rows, E width, F features, G groups of E.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from native.fuzzing import each_set
from saccade.operator._int4 import GROUP, int4_weight, multiply_int4

SIZES = [(1, 2, 1), (3, 7, 65), (13, 127, 61), (5, 131, 67), (8, 389, 193), (37, 1537, 71), (301, 257, 131)]


def groups_of(x):
    """(R, E) as (R, G, 32), zeros at the end."""
    return F.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


@pytest.mark.usefixtures("every_other_set")
@pytest.mark.parametrize("quads", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_sums_are_those_of_whole_numbers(size, quads):
    """Groups of rows that hold 127 are their own bytes, groups of W with -8 their own integers, so nothing is rounded,
    up to scales, which are powers of two: halves in the wrong order, a group that is left out or 8 that is not
    subtracted shows."""
    rows, width, features = size
    torch.manual_seed(width)
    x, weight = torch.randint(-127, 128, (rows, width)), torch.randint(-8, 8, (features, width))
    x[:, ::GROUP], weight[:, ::GROUP] = 127, -8
    exponents = torch.randint(-1, 2, groups_of(weight).shape[:2]).repeat_interleave(GROUP, 1)[:, :width]
    weight = weight * 2.0**exponents
    packed = int4_weight(weight)
    assert torch.equal(packed.dense(), weight)
    for _ in each_set():
        assert torch.equal(multiply_int4(x.float(), packed, None, quads), x.float() @ weight.T)


@pytest.mark.usefixtures("every_other_set")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES[2:5])
def test_rows_are_rounded_by_at_most_half_a_step(size, dtype):
    rows, width, features = size
    torch.manual_seed(width)
    x, bias = (torch.randn(rows, width) * torch.logspace(-3, 3, rows)[:, None] + 0.3).to(dtype), torch.randn(features)
    packed = int4_weight(torch.randn(features, width))
    exact = x.double() @ packed.dense().double().T + bias.double()
    steps = groups_of(x.float()).abs().amax(2) / 127  # (R, G)
    sizes = groups_of(packed.dense()).abs().sum(2)  # (F, G)
    unit = 2.0**-23 if dtype == torch.float32 else 2.0**-8
    terms = x.double().abs() @ packed.dense().double().abs().T
    bound = steps.double() / 2 @ sizes.double().T + unit * exact.abs() + 2.0**-23 * width / GROUP * terms
    for _ in each_set():
        got = multiply_int4(x, packed, bias)
        assert got.dtype == dtype
        assert ((got.double() - exact).abs() <= bound).all()
        assert torch.equal(got, multiply_int4(x, packed, bias, quads=False))


def test_no_scale_on_a_fine_grid_is_much_better():
    """Of the scales that have the extreme entry between 6 and 9.5 steps from 0, with the integers nearest to it."""
    torch.manual_seed(0)
    weight = torch.randn(61, 389)
    parts = groups_of(weight)
    found = groups_of(int4_weight(weight).dense() - weight).square().sum(2)
    extreme = parts.gather(2, parts.abs().argmax(2, keepdim=True))
    best = torch.full_like(found, torch.inf)
    for steps in torch.linspace(6, 9.5, 351):
        scale = -extreme / steps
        q = (parts / scale).round().clamp(-8, 7)
        best = torch.minimum(best, (parts - scale * q).square().sum(2))
    plain = (parts - (parts / (extreme / -8)).round().clamp(-8, 7) * extreme / -8).square().sum(2)
    assert found.sum() < 1.01 * best.sum()
    assert found.sum() < 0.93 * plain.sum()


def test_a_row_has_the_same_bits_beside_any_other_and_on_any_number_of_threads():
    torch.manual_seed(3)
    x, packed = torch.randn(61, 389), int4_weight(torch.randn(211, 389))
    before = torch.get_num_threads()
    try:
        outs = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outs.append(multiply_int4(x, packed, None))
            for rows in (1, 7, 8, 13):
                outs.append(torch.cat([multiply_int4(part, packed, None) for part in x.split(rows)]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_rows_that_bytes_cannot_hold():
    """NaN and infinities go the way of floats and reach no other row; zeros give the bias; ends of the range stay."""
    torch.manual_seed(5)
    weight, bias = torch.randn(67, 131), torch.randn(67)
    packed, x = int4_weight(weight), torch.randn(7, 131)
    plain = multiply_int4(x, packed, bias)
    x[1, 2], x[3, 130], x[4] = float("nan"), float("-inf"), 0
    x[5], x[6] = x[5] * 1e-41, x[6] / x[6].abs().max() * 3e38
    got = multiply_int4(x, packed, bias)
    assert torch.equal(got[[0, 2]], plain[[0, 2]])
    assert got[1].isnan().all()
    assert torch.allclose(got[3], -torch.inf * packed.dense()[:, 130], equal_nan=True)  # a weight of 0 gives NaN
    assert torch.equal(got[4], bias)
    assert torch.allclose(got[5], bias, atol=1e-35, rtol=0)
    assert not got[6].isnan().any()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(wrong):
    weight = torch.randn(5, 131)
    weight[3, 130] = wrong
    with pytest.raises(ValueError, match="weight: expected finite numbers"):
        int4_weight(weight)


def test_weights_of_zeros_and_of_large_and_small_numbers():
    torch.manual_seed(9)
    weight = torch.randn(5, 131)
    weight[0], weight[1], weight[2] = 0, weight[1] * 1e37, weight[2] * 1e-37
    dense = int4_weight(weight).dense()
    assert torch.equal(dense[0], weight[0])
    steps = groups_of(weight).abs().amax(2) / 8
    assert (groups_of(dense - weight).abs().amax(2) <= 1.1 * steps).all()

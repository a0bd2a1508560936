"""What products with weights of any few bits have in common: rows that do not depend on others, and odd numbers."""

from __future__ import annotations

import pytest
import torch

from native.test_groups import FORMS, made
from saccade.operator._int4 import int4_weight
from saccade.operator._int8 import int8_weight

ROUND = {"int8": int8_weight, "int4": int4_weight}


@pytest.fixture(params=["int8", "int4", "Q4_K", "Q6_K"])
def make(request):
    """Makes a weight (F, E)."""

    def weight(features, width):
        if request.param in ROUND:
            return ROUND[request.param](torch.randn(features, width))
        return made(FORMS[request.param], features, width, torch.randn)[0]

    return weight


def test_a_row_has_the_same_bits_beside_any_other_and_on_any_number_of_threads(make):
    torch.manual_seed(3)
    x, packed = torch.randn(61, 389), make(211, 389)
    before = torch.get_num_threads()
    try:
        outs = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outs.append(packed.multiply(x, None))
            for rows in (1, 7, 8, 13):
                outs.append(torch.cat([packed.multiply(part, None) for part in x.split(rows)]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_rows_that_bytes_cannot_hold(make):
    """NaN and infinities go the way of floats and reach no other row; zeros give the bias; ends of the range stay."""
    torch.manual_seed(5)
    packed, bias, x = make(67, 131), torch.randn(67), torch.randn(7, 131)
    plain = packed.multiply(x, bias)
    x[1, 2], x[3, 130], x[4] = float("nan"), float("-inf"), 0
    x[5], x[6] = x[5] * 1e-41, x[6] / x[6].abs().max() * 1e35
    got = packed.multiply(x, bias)
    assert torch.equal(got[[0, 2]], plain[[0, 2]])
    assert got[1].isnan().all()
    assert torch.allclose(got[3], -torch.inf * packed.dense()[:, 130], equal_nan=True)  # a weight of 0 gives NaN
    assert torch.equal(got[4], bias)
    assert torch.allclose(got[5], bias, atol=1e-33, rtol=0)
    assert not got[6].isnan().any()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("form", ROUND)
def test_weights_that_are_not_finite(form, wrong):
    weight = torch.randn(5, 131)
    weight[3, 130] = wrong
    with pytest.raises(ValueError, match="weight: expected finite numbers"):
        ROUND[form](weight)

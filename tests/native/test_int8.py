"""Products with weights of 8 bits on every instruction set: sums against whole numbers, rounding against its bound.

Shape legend: R rows, E width, F features, N blocks of E.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from native.fuzzing import each_set
from saccade.operator._backends.native import _kernels
from saccade.operator._int8 import BLOCK, FUNCTIONS, RowNorm, int8_weight, multiply_int8, rounded_product

SIZES = [
    (1, 2, 1),
    (3, 7, 65),
    (13, 127, 61),
    (5, 131, 67),
    (8, 389, 193),
    (37, 1537, 71),
    (53, 320, 131),
    (301, 257, 131),
]

AT_ONCE = (64, 4, 2)  # by AMX, where the width is a multiple of 64; by AVX512_VNNI; by pairs


def blocks_of(x):
    """(R, E) as (R, N, 128), zeros at the end."""
    return F.pad(x, (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))


@pytest.mark.usefixtures("every_other_set")
@pytest.mark.parametrize("at_once", AT_ONCE)
@pytest.mark.parametrize("size", SIZES)
def test_sums_are_those_of_whole_numbers(size, at_once):
    """Rows that hold 0 and 255 in each block are their own bytes, rows of W with 127 their own integers, so nothing is
    rounded: a product that saturates in 16 bits, a block that is left out or a zero that is not subtracted shows."""
    rows, width, features = size
    torch.manual_seed(width)
    x, weight = torch.randint(0, 256, (rows, width)), torch.randint(-127, 128, (features, width))
    for first in range(0, width, BLOCK):
        x[:, first], x[:, min(first + 1, width - 1)] = 0, 255
        weight[:, first] = 127
    x[:, width - 1] = 255  # of a block of a single number
    shift = torch.randint(0, 256, (rows, 1)) * (width > 1)
    for first in range(0, width, BLOCK):  # numbers below zero: the range stays 255
        part = x[:, first : first + BLOCK]
        part -= torch.minimum(shift, torch.tensor(255 if part.shape[1] > 1 else 0))
    packed = int8_weight(weight.float())
    assert torch.equal(packed.integers(), weight.to(torch.int8))
    assert torch.equal(packed.dense(), weight.float())
    for _ in each_set():
        assert torch.equal(multiply_int8(x.float(), packed, None, at_once), (x @ weight.T).float())


@pytest.mark.usefixtures("every_other_set")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [SIZES[n] for n in (2, 3, 4, 6)])
def test_rounding_stays_within_half_a_step(size, dtype):
    """|x - q| <= step / 2 of each block, and half a step for the zero; W's own rounding is that of `dense`."""
    rows, width, features = size
    torch.manual_seed(width)
    x, bias = (torch.randn(rows, width) * torch.logspace(-3, 3, rows)[:, None] + 0.3).to(dtype), torch.randn(features)
    weight = torch.randn(features, width)
    weight[:, 3] *= 50
    packed = int8_weight(weight)
    step = blocks_of(weight).abs().amax(2, keepdim=True) / 127
    assert (blocks_of(packed.dense() - weight).abs() <= step * 0.5001).all()
    exact = x.double() @ packed.dense().double().T + bias.double()
    parts = blocks_of(x.float())
    steps = (parts.amax(2).clamp_min(0) - parts.amin(2).clamp_max(0)) / 255  # (R, N)
    sizes = blocks_of(packed.dense()).abs().sum(2)  # (F, N)
    unit = 2.0**-23 if dtype == torch.float32 else 2.0**-8
    bound = steps.double() @ sizes.double().T + unit * (
        2 * exact.abs() + 8 * x.double().abs() @ weight.double().abs().T
    )
    for _ in each_set():
        got = multiply_int8(x, packed, bias)
        assert got.dtype == dtype
        assert ((got.double() - exact).abs() <= bound).all()
        assert all(got.equal(multiply_int8(x, packed, bias, at_once)) for at_once in AT_ONCE)


@pytest.mark.usefixtures("every_other_set")
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_activations_and_sums_in_the_last_step(activation):
    """Against float64, at products that are exact: whole numbers times a power of 2.

    Relative to the product 2^-24 each for the polynomial, the sum with it and the last product, and at most 2 for 2^x,
    which weighs a quarter; `gelu_tanh` and `silu` round an exponent u six times, which weighs u exp(-u) / 4 < .1.
    """
    torch.manual_seed(11)
    x, weight = torch.randint(0, 256, (13, 131)), torch.randint(-127, 128, (67, 131))
    x[:, [0, 128]], x[:, [1, 129]], weight[:, [0, 128]] = 0, 255, 127
    added = torch.randn(13, 67)
    for scale in (2.0**-7, 2.0**-16, 2.0**-19):
        exact, small = (x @ weight.T).double() * scale, int8_weight(weight.float() * scale)
        for _ in each_set():
            got = multiply_int8(x.float(), small, None, activation=activation).double()
            assert ((got - FUNCTIONS[activation](exact)).abs() <= 6 * 2.0**-24 * exact.abs()).all()
            with_sum = multiply_int8(x.float(), small, None, activation=activation, added=added)
            assert torch.equal(with_sum, got.float() + added)


@pytest.mark.usefixtures("every_other_set")
@pytest.mark.parametrize("size", [(7, 131, 389, 71), (301, 257, 193, 131), (211, 384, 512, 389)])
def test_two_products_in_one_pass_have_the_bits_of_one_after_the_other(size):
    """Also in rows with NaN and infinities, before and between, and where the last block of features is not whole."""
    rows, width, inner, features = size
    torch.manual_seed(13)
    up, down = int8_weight(torch.randn(inner, width)), int8_weight(torch.randn(features, inner))
    bias, after, added = torch.randn(inner), torch.randn(features), torch.randn(rows, features)
    x = torch.randn(rows, width)
    for spoilt, dtype in ((False, torch.float32), (False, torch.bfloat16), (True, torch.float32)):
        x, added = x.to(dtype), added.to(dtype)
        if spoilt:
            x[1, 2], x[3, 5], x[5] = torch.nan, -torch.inf, 3e38
        for _ in each_set():
            for at_once in AT_ONCE:
                hidden = multiply_int8(x, up, bias, at_once, activation="gelu")
                wanted = multiply_int8(hidden, down, after, at_once, added=added)
                got = multiply_int8(x, up, bias, at_once, activation="gelu", added=added, then=(down, after))
                assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.usefixtures("every_other_set")
@pytest.mark.parametrize("rows", [7, 301])
def test_a_norm_after_all_is_that_of_the_sum(rows):
    """Against float64 of the same sum, at few rows and in the tasks of many, also after two products; a row with NaN is
    normalised once, too. Each of F terms of a mean and a variance is rounded, and so are six later steps; a mean that
    is large beside the deviation (here 1 to 1) magnifies that."""
    torch.manual_seed(17)
    up, down = int8_weight(torch.randn(193, 131)), int8_weight(torch.randn(389, 193))
    x, added = torch.randn(rows, 131), torch.randn(rows, 389) + 300
    x[1, 2], added[3] = torch.nan, torch.inf
    for dtype, unit in ((torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-9)):
        x, added = x.to(dtype), added.to(dtype)
        norm = RowNorm(torch.randn(389).to(dtype), torch.randn(389).to(dtype), 1e-3)
        for _ in each_set():
            for product, then in ((up, (down, None)), (down, None)):
                rows_in = x if then else F.pad(x, (0, 62))
                total = multiply_int8(rows_in, product, None, added=added, then=then)
                got = multiply_int8(rows_in, product, None, added=added, then=then, norm=norm).double()
                wanted = F.layer_norm(total.double(), (389,), norm.weight.double(), norm.bias.double(), norm.eps)
                assert wanted.isfinite().all(1).sum() == rows - 2
                close = (got - wanted).abs() <= 4 * unit * (wanted.abs() + 1) + 400 * 2.0**-24 * norm.weight.abs()
                assert (close | wanted.isnan() & got.isnan()).all()


def test_gradients_reach_inputs_and_biases_and_never_the_weight():
    """As adapters train: dx = dy W of the weight that was multiplied, in float64."""
    torch.manual_seed(7)
    x, weight, bias = torch.randn(3, 5, 131, requires_grad=True), torch.randn(67, 131), torch.randn(67)
    bias.requires_grad_()
    packed, d_out = int8_weight(weight), torch.randn(3, 5, 67)
    dx, db = torch.autograd.grad(rounded_product(x, weight, bias, packed), (x, bias), d_out)
    assert torch.allclose(dx.double(), d_out.double() @ packed.dense().double(), atol=1e-4)
    assert torch.allclose(db, d_out.sum((0, 1)), atol=1e-5)
    weight.requires_grad_()
    with pytest.raises(RuntimeError, match="int8 weights cannot be trained"):
        rounded_product(x, weight, bias, packed).sum().backward()


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux names what a processor has")
def test_instructions_for_products_of_bytes_are_taken_where_they_are(use):
    use("auto")
    flags = Path("/proc/cpuinfo").read_text()
    assert _kernels.module.sums_quads() == ("avx512_vnni" in flags)
    assert _kernels.module.sums_tiles() == ("amx_int8" in flags)

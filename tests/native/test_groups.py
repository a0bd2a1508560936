"""Products with weights in groups on every instruction set: sums against whole numbers, rounding against its bound; and
how "int4" rounds.

Shape legend: R rows, E width, F features, G groups of E.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from native.fuzzing import each_set
from saccade.operator._groups import GroupForm, empty_groups, joined
from saccade.operator._int4 import GROUP, int4_weight
from saccade.operator._int8 import BLOCK

SIZES = [(1, 2, 1), (3, 7, 65), (13, 127, 61), (5, 131, 67), (8, 389, 193), (37, 1537, 71), (301, 257, 131)]
FORMS = {
    "int4": GroupForm(4, span=4, dtype=torch.bfloat16, steps=True, zeros=True, bytes=True),
    "Q4_0": GroupForm(4, offset=8),
    "Q4_1": GroupForm(4, minima=True),
    "Q4_K": GroupForm(4, span=8, steps=True, minima=True, zeros=True),
    "gptq, 4 bits": GroupForm(4, span=4, zeros=True),
    "Q8_0": GroupForm(offset=128),
    "Q5_1": GroupForm(minima=True),
    "Q6_K": GroupForm(group=16, span=16, offset=32, steps=True),
    "gptq, 8 bits": GroupForm(span=2, offset=128, dtype=torch.bfloat16, zeros=True),
}


def groups_of(x, group=GROUP):
    """(R, E) as (R, G, 32), zeros at the end."""
    return F.pad(x, (0, -x.shape[1] % group)).unflatten(1, (-1, group))


def made(form, features, width, numbers, order=None):
    """A weight with `numbers(shape)` as scales and minima and whole numbers up to 2 in size beside them, of "int4" as
    far as its bytes go, and the same in float64 by the definition."""
    groups = -(-width // form.group)
    units = -(-groups // form.span)
    q = torch.randint(0, 2**form.bits, (features, width), dtype=torch.uint8)
    parts = {"scales": numbers((features, units)).to(form.dtype)}
    if form.minima:
        parts["minima"] = numbers((features, units)).to(form.dtype)
    for name in ("steps", "zeros"):
        if getattr(form, name):
            parts[name] = torch.randint(-2, 3, (features, groups), dtype=torch.int8)
    column = torch.arange(width)
    unit, group = column // form.group // form.span, column // form.group
    if form.bytes:
        parts["steps"] = torch.randint(1, 18, (features, groups), dtype=torch.int8)
        parts["zeros"] = torch.randint(-100, 128, (features, groups), dtype=torch.int8)
        most = (parts["zeros"].int() + 127) // parts["steps"]
        q = torch.minimum(q, most[:, group].clamp_max(15).to(torch.uint8))
    weight = empty_groups(features, width, form, order)
    for first in range(0, features, 64):
        weight.put(first, q[first : first + 64], **{name: part[first : first + 64] for name, part in parts.items()})
    scale, minimum = parts["scales"].double()[:, unit], torch.zeros(())
    if form.minima or form.zeros:
        minimum = parts["minima"].double()[:, unit] if form.minima else scale
        minimum = minimum * parts["zeros"][:, group] if form.zeros else minimum
    scale = scale * parts["steps"][:, group] if form.steps else scale
    return weight, scale * (q.double() - form.offset) - minimum


def whole(shape):
    return torch.randint(1, 3, shape) * (2 * torch.randint(0, 2, shape) - 1)


@pytest.mark.usefixtures("every_other_set")
@pytest.mark.parametrize("at_once", [64, 2])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_sums_are_those_of_whole_numbers(size, form, at_once):
    """Groups of rows that hold 127 are their own bytes, and sums of the others, which are small, stay below 2^24, so
    nothing is rounded: halves in the wrong order, a group that is left out or reads the scale of another shows."""
    rows, width, features = size
    torch.manual_seed(width)
    packed, weight = made(FORMS[form], features, width, whole)
    assert torch.equal(packed.dense(), weight.float())
    x = torch.randint(-1, 2, (rows, width))
    x[:, :: FORMS[form].group] = 127
    for _ in each_set():
        assert torch.equal(packed.multiply(x.float(), None, at_once), (x.double() @ weight.T).float())


@pytest.mark.usefixtures("every_other_set")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES[2:5])
def test_rows_are_rounded_by_at_most_half_a_step(size, form, dtype):
    rows, width, features = size
    torch.manual_seed(width)
    x, bias = (torch.randn(rows, width) * torch.logspace(-3, 3, rows)[:, None] + 0.3).to(dtype), torch.randn(features)
    packed, weight = made(FORMS[form], features, width, torch.randn)
    exact = x.double() @ weight.T + bias.double()
    group = BLOCK if FORMS[form].bytes else FORMS[form].group
    steps = groups_of(x.float(), group).abs().amax(2) / 127  # (R, G)
    sizes = groups_of(weight, group).abs().sum(2)  # (F, G)
    unit = 2.0**-23 if dtype == torch.float32 else 2.0**-8
    # A product with q and one with the minimum, 2^bits steps at most, of which a sum may be the small difference.
    terms = x.double().abs().sum(1)[:, None] * (weight.abs().amax(1) + 2.0 ** FORMS[form].bits * 2 * 4)
    bound = steps.double() / 2 @ sizes.T + unit * exact.abs() + 2.0**-23 * (2 + width / group) * terms
    for _ in each_set():
        got = packed.multiply(x, bias)
        assert got.dtype == dtype
        assert ((got.double() - exact).abs() <= bound).all()
        assert torch.equal(got, packed.multiply(x, bias, at_once=2))


def test_columns_in_another_order_and_layers_of_the_same_x_as_one():
    """Only this moves columns: x is read in the order of the weight, which is read in that of x."""
    torch.manual_seed(2)
    order = torch.randperm(131)
    parts = [made(FORMS["gptq, 4 bits"], features, 131, whole, order) for features in (128, 64, 7)]
    back = torch.empty(131, dtype=torch.long).index_put_((order,), torch.arange(131))
    weight, x = torch.cat([each for _, each in parts])[:, back], torch.full((3, 131), 127.0)
    one = joined([packed for packed, _ in parts])
    assert torch.equal(one.dense(), weight.float())
    x[:, 1:] = torch.randint(-1, 2, (3, 130))
    x[:, order[::32]] = 127
    assert torch.equal(one.multiply(x, None), (x.double() @ weight.T).float())
    assert joined([parts[2][0], parts[0][0]]) is None  # 7 rows fill no panel
    assert joined([parts[0][0], parts[1][0]._replace(order=back)]) is None
    assert joined([parts[0][0], None]) is None


def test_no_step_and_zero_are_much_better():
    """Than those found, of all steps with each zero near that which centres the range; the plain range is worse."""
    torch.manual_seed(0)
    weight = torch.randn(61, 389)
    packed = int4_weight(weight)
    scale = packed.scales[:, : packed.form.rows(389)[0]].view(torch.bfloat16).transpose(1, 2).flatten(0, 1)[:61].float()
    parts = groups_of(weight) / scale.repeat_interleave(4, 1)[:, :13, None]
    least, most = parts.aminmax(dim=2, keepdim=True)
    best = torch.full(parts.shape[:2], torch.inf)
    for step in range(1, 18):
        for moved in range(-12, 13):
            zero = (step * 7.5 - (most + least) / 2).round() + moved
            value = (((parts + zero) / step).round().clamp(0, 15) * step - zero).clamp(-128, 127)
            best = torch.minimum(best, (value - parts).square().sum(2))
    step = (most - least) / 15
    plain = (((parts - least) / step).round() * step + least - parts).square().sum(2)
    found = (groups_of(packed.dense()) / scale.repeat_interleave(4, 1)[:, :13, None] - parts).square().sum(2)
    assert found.sum() < 1.15 * best.sum()
    assert found.sum() < 0.9 * plain.sum()


def test_weights_of_zeros_and_of_large_and_small_numbers():
    torch.manual_seed(9)
    weight = torch.randn(5, 131)
    weight[0], weight[1], weight[2] = 0, weight[1] * 1e37, weight[2] * 1e-37
    dense = int4_weight(weight).dense()
    assert torch.equal(dense[0], weight[0])
    steps = groups_of(weight).abs().amax(2) / 8
    assert (groups_of(dense - weight).abs().amax(2) <= 1.1 * steps).all()

"""NaN and Inf where they may not be seen, numbers near the ends of each dtype, and sizes of zero: kernel by kernel.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D and Dv widths.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from looped import looped
from native.fuzzing import DTYPES, Draw, check, each_set, error, floors, ours, plain_errors, truth
from saccade import Causal, Documents, FromTensor, Global, Padding, Window
from saccade.operator._backends.native._kernels import BF16_SETS
from slowly import slow_but

pytest.importorskip("saccade._native", reason="this installation has no native build")
pytestmark = pytest.mark.usefixtures("every_other_set")

every_dtype = looped("dtype", DTYPES)
minus = pytest.param(-math.inf, marks=pytest.mark.slow)  # as +inf, but for the sign
every_poison = pytest.mark.parametrize("bad", [math.nan, math.inf, minus], ids=["nan", "+inf", "-inf"])

# (Lq, Lk, D, Dv): a row of values of 64 is read in place, others are copied; both ends of a block of 48; decoding.
SIZES = {
    "in place": (61, 103, 64, 64),
    "copied": (53, 107, 31, 37),
    "one tail": (7, 53, 16, 5),
    "decode": (4, 523, 64, 64),
    "decode narrow": (3, 301, 5, 3),
    "decode odd": (2, 1031, 67, 33),
}
every_size = looped("size", SIZES)
# Near the ends of a dtype the sizes differ by how a row is read, and not by what is beside it.
near_ends = pytest.mark.parametrize("size", slow_but(SIZES, "copied", "decode"))


def problem(size: str, dtype: torch.dtype, mask, batch: int = 2, **more) -> Draw:
    rows, keys, width, value_width = SIZES[size]
    draw = torch.Generator().manual_seed(17)
    shapes = {"query": (batch, 2, rows, width), "key": (batch, 1, keys, width), "value": (batch, 1, keys, value_width)}
    leaves = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    return Draw(leaves | more, mask(rows, keys) if callable(mask) else mask, seed=19)


def spoilt(call: Draw, places: dict[str, tuple], bad: float) -> Draw:
    """With `bad` in whole rows: `places` names items and rows of query, key or value."""
    leaves = dict(call.leaves)
    for name, (items, rows) in places.items():
        if name in leaves:
            leaves[name] = leaves[name].clone()
            leaves[name][items, :, rows] = bad
    return Draw(leaves, call.mask, call.offset, call.options, call.relative, call.seed)


# --- (a): what nobody may see is never read ------------------------------------------------------------------------


@every_dtype
@every_poison
@every_size
def test_padding_leaves_no_trace(size, bad, dtype):
    """The very same bits. The first item's keys end within a block of 48 and, when decoding, of 512."""
    rows, keys = SIZES[size][:2]
    some, few = keys - 31, rows - rows // 3 - 1
    call = problem(size, dtype, Padding([some, keys], [few, rows]))
    dirty = spoilt(call, {name: (0, slice(some, None)) for name in ("key", "value")}, bad)
    dirty = spoilt(dirty, {"query": (0, slice(few, None))}, bad)
    clean = call.cotangents()
    unread = [x.clone() for x in clean]
    for x in unread:
        x[0, :, few:] = bad
    for instructions in each_set():
        want, got = ours(call, cotangents=clean), ours(dirty, cotangents=unread)
        for name, result in want.items():
            assert torch.equal(got[name], result), f"{name} on {instructions}"


# --- (b): what some may see reaches nobody else ----------------------------------------------------------------------


def holes(rows: int, keys: int) -> FromTensor:
    """Keys that one row in seven sees."""
    bits = torch.rand(1, 1, rows, keys, generator=torch.Generator().manual_seed(23)) < 0.5
    bits[..., keys // 2 :] &= (torch.arange(rows)[:, None] % 7 == 1).expand(rows, keys - keys // 2)
    return FromTensor(bits)


def halves(rows: int, keys: int) -> Documents:
    return Documents((torch.arange(rows) >= rows // 2).long(), (torch.arange(keys) >= keys // 2).long())


MASKS = {
    "causal": Causal(),
    "window": Window(19, 0),
    "tensor": holes,
    "documents": halves,
    "global": Global([0, 1]) | Window(11, 0),
}
every_mask = pytest.mark.parametrize("mask", MASKS)


def assert_contained(call: Draw, *poisons: tuple) -> None:
    """Where the reference is finite with NaN at these places, the kernels with `bad` there give what they give without.

    poisons: (places, bad) each, or (places, bad, places of the upstream gradient).
    """
    given = call.cotangents()
    want = truth(call, True, given)
    least, plain = floors(call, True, given), plain_errors(call, call.leaves["query"].dtype, want, True, given)
    reached = {}
    for places, bad, *d_out in poisons:
        d_out = d_out[0] if d_out else None
        where = repr((places, d_out))
        if where not in reached:
            reached[where] = truth(spoilt(call, places, math.nan), True, spoilt_rows(given, d_out, math.nan))
        reach = reached[where]
        assert any(0 < x.isnan().sum() < x.numel() for x in reach.values()), "nothing to tell apart"
        dirty, dirty_given = spoilt(call, places, bad), spoilt_rows(given, d_out, bad)
        for instructions in each_set():
            for name, result in ours(dirty, cotangents=dirty_given).items():
                free = ~reach[name].isnan()
                far = error(torch.where(free, result, 0.0), torch.where(free, want[name], 0.0))
                assert far <= max(2 * plain[name], least[name]), f"{name} on {instructions}, {bad} in {where}: {far}"


def spoilt_rows(given: list[Tensor], places, bad: float) -> list[Tensor]:
    d_out = given[0].clone()
    if places is not None:
        d_out[places[0], :, places[1]] = bad
    return [d_out, given[1]]


def all_in_turn() -> list:
    """Each size with each mask, of which every other pair is fast: in one dtype after the other."""
    pairs = [(size, mask) for size in SIZES for mask in MASKS]
    return [
        pytest.param(size, mask, dtype, marks=[] if (n + m) % 6 == 0 else pytest.mark.slow)
        for n, (size, mask) in enumerate(pairs)
        for m, dtype in enumerate(DTYPES)
    ]


every_pair = pytest.mark.parametrize(("size", "mask", "dtype"), all_in_turn())


@every_pair
def test_a_bad_key_or_value_stays_with_those_who_see_it(size, mask, dtype):
    call, keys = problem(size, dtype, MASKS[mask]), SIZES[size][1]
    places = (0, [keys // 2 + 2, keys - 1])
    assert_contained(call, ({"key": places}, math.nan), ({"value": places}, math.nan), ({"value": places}, -math.inf))


@every_pair
def test_a_bad_query_or_upstream_gradient_stays_with_what_it_sees(size, mask, dtype):
    call, rows = problem(size, dtype, MASKS[mask]), SIZES[size][0]
    row = 0 if mask == "documents" or size.startswith("decode") else rows // 2  # the first sees the fewest
    assert_contained(call, ({"query": (1, row)}, math.inf), ({}, math.nan, (1, row)))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bad"), list(zip(DTYPES, (math.nan, math.inf, -math.inf), strict=True)), ids=str)
@every_size
def test_a_bias_of_minus_infinity_hides_as_a_mask_does(size, bad, dtype):
    rows, keys = SIZES[size][:2]
    bias = torch.zeros(2, 1, rows, keys)
    bias[0, :, :, keys - 5 :] = -math.inf
    bias[1, :, rows // 2 :, 7:19] = -math.inf
    call = problem(size, dtype, None, bias=bias)
    places = ([0, 1], [keys - 3, 11])
    assert_contained(call, ({"value": places}, bad), ({"key": places}, bad))


# --- near the ends of a dtype -----------------------------------------------------------------------------------------


@pytest.mark.slow
@every_dtype
@near_ends
def test_products_beyond_the_dtype_that_a_small_scale_brings_back(size, dtype):
    """q.k overflows, scale q.k does not."""
    call = problem(size, dtype, Causal())
    large = 2.0**13 if dtype == torch.float16 else 2.0**63
    for name in ("query", "key"):
        call.leaves[name] = call.leaves[name].clamp(-3, 3) * large
    call.options["scale"] = 0.3 / large**2
    check(call)


@pytest.mark.slow
@every_dtype
@near_ends
@looped("softcap", [None, 2.0])
def test_small_queries_and_large_keys(size, dtype, softcap):
    call = problem(size, dtype, Causal())
    large = 2.0**12 if dtype == torch.float16 else 2.0**60
    call.leaves["query"], call.leaves["key"] = call.leaves["query"] / large, call.leaves["key"] * large
    call.options |= {} if softcap is None else {"softcap": softcap}
    check(call)


@pytest.mark.slow
@every_dtype
@near_ends
def test_values_near_the_largest(size, dtype):
    """A mean of numbers is no larger than they are, though their sum is."""
    call = problem(size, dtype, Causal())
    top = torch.finfo(dtype).max
    call.leaves["value"] = call.leaves["value"].abs().clamp(0.5, 3) * (top / 4)
    given = call.cotangents()
    given[0] = given[0] * (2.0**-10 / call.sizes[3])
    check(call, True, given)


@every_dtype
@near_ends
def test_large_upstream_gradients(size, dtype):
    call = problem(size, dtype, Window(47, 0))
    given = call.cotangents()
    given[0] = given[0].clamp(-3, 3) * (100.0 if dtype == torch.float16 else 2.0**100)
    check(call, True, given)


@every_dtype
@near_ends
def test_logits_of_thousands(size, dtype):
    call = problem(size, dtype, Causal())
    call.options["scale"] = 300.0
    check(call)


@every_dtype
@near_ends
def test_numbers_below_the_smallest_normal_one(size, dtype):
    """They count, but in the processor's products of bf16, which by definition take them for 0."""
    tiny, without = torch.finfo(dtype).smallest_normal, BF16_SETS if dtype == torch.bfloat16 else ()
    call = problem(size, dtype, Causal())
    call.leaves["value"] = call.leaves["value"] * (tiny / 8)
    check(call, without=without)
    call = problem(size, dtype, Causal())
    call.leaves["query"] = call.leaves["query"] * (tiny / 8)
    call.options["scale"] = 0.125 / tiny if dtype == torch.float16 else 2.0**120
    check(call, without=without)


# --- sizes of zero ----------------------------------------------------------------------------------------------------


@every_dtype
@looped("zero", ["batch", "rows", "keys", "value width"])
@looped("masked", [False, True])
def test_sizes_of_zero(zero, masked, dtype):
    sizes = {"batch": 2, "rows": 3, "keys": 301, "value width": 5}
    sizes[zero] = 0
    batch, rows, keys, value_width = sizes.values()
    shapes = {
        "query": (batch, 4, rows, 7),
        "key": (batch, 2, keys, 7),
        "value": (batch, 2, keys, value_width),
        "sink": (4,),
        "bias": (1, 1, 1, keys),
    }
    leaves = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    check(Draw(leaves, Causal() if masked else None))

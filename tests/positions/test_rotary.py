"""Rotary positions against the formula written with complex numbers."""

from __future__ import annotations

import copy
import math
import pickle

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from looped import looped
from positions import formulas
from saccade.positions import LinearScaling, NTKScaling, Rotary, YaRNScaling
from saccade.positions.rotary import StoredRotary

KINDS = {
    "half": {},
    "interleaved": {"layout": "interleaved"},
    "half, partial": {"turned": 6},
    "interleaved, partial": {"layout": "interleaved", "turned": 6},
    "linear": {"scaling": LinearScaling(3.0)},
    "ntk, interleaved": {"scaling": NTKScaling(2.5), "layout": "interleaved"},
    "yarn": {"scaling": YaRNScaling(4.0, 41, 5.0, 1.0)},
    "yarn, partial": {"scaling": YaRNScaling(4.0, 41, 5.0, 1.0), "turned": 6, "layout": "interleaved"},
}
OFFSETS = {
    "int": 19,
    "items": torch.tensor([19, 0]),
    "left padding": torch.tensor([-3, 2]),
    "tokens": torch.tensor([[0, 1, 2, 0, 1, 2, 3], [31, 7, 7, -2, 90, 0, 1]]),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(params=OFFSETS)
def offset(request):
    return OFFSETS[request.param]


def angles_of(kind, width, base=10000.0):
    """Angle per position of each pair and the factor on it, by lists."""
    width = kind.get("turned", width)
    scaling, plain = kind.get("scaling"), formulas.theta(width, base)
    if isinstance(scaling, LinearScaling):
        return [angle / scaling.factor for angle in plain], 1.0
    if isinstance(scaling, NTKScaling):
        return formulas.theta(width, base * scaling.factor ** (width / (width - 2))), 1.0
    if isinstance(scaling, YaRNScaling):
        # Its frequencies have tests of their own; here: that they are what turns, and the factor on the pairs.
        return scaling.frequencies(width, base).tolist(), 0.1 * math.log(scaling.factor) + 1.0
    return plain, 1.0


def test_every_kind_and_offset_is_the_complex_formula(kind, offset):
    x = torch.randn(2, 3, 7, 10, dtype=torch.float64)
    angles, factor = angles_of(kind, 10)
    positions = formulas.of_each_token(offset, 2, 7)
    want = formulas.turned(x, positions, angles, kind.get("layout", "half"), factor)
    torch.testing.assert_close(Rotary(10, **kind)(x, offset), want, rtol=1e-12, atol=1e-12)


@given(
    st.integers(1, 5),
    st.integers(0, 3),
    st.sampled_from(["half", "interleaved"]),
    st.integers(1, 3),
    st.integers(1, 5),
    st.data(),
)
def test_any_shape_and_offset_is_the_complex_formula(half, more, layout, batch, length, data):
    width = 2 * half + more
    x = torch.randn(batch, 2, length, width, dtype=torch.float64)
    size = data.draw(st.sampled_from([batch, batch * length]))
    drawn = data.draw(st.lists(st.integers(-1000, 1000), min_size=size, max_size=size))
    offset = torch.tensor(drawn) if size == batch else torch.tensor(drawn).view(batch, length)
    want = formulas.turned(x, formulas.of_each_token(offset, batch, length), formulas.theta(2 * half), layout)
    rotary = Rotary(width, turned=2 * half, layout=layout)
    # An angle of up to 1,000 radians with a few roundings, times a pair of entries of at most 6.
    torch.testing.assert_close(rotary(x, offset), want, rtol=0, atol=1e3 * 4 * 2.3e-16 * 12)


def test_logits_of_every_kind_depend_on_distance_alone(kind):
    rotary = Rotary(10, **kind)
    query, key = torch.randn(2, 2, 3, 7, 10, dtype=torch.float64).unbind(0)

    def logits(offset):
        return rotary(query, offset) @ rotary(key, offset).transpose(-1, -2)

    far = logits(torch.tensor([577, 23]))
    torch.testing.assert_close(logits(0), far)
    apart = torch.tensor([[0, 3, 4, 9, 20, 21, 22], [5, 1, 0, 2, 3, 8, 7]])
    torch.testing.assert_close(logits(apart), logits(apart + torch.tensor([[101], [-4]])))
    assert not torch.allclose(logits(apart), far)
    shifted_key = rotary(query, 0) @ rotary(key, 1).transpose(-1, -2)
    assert not torch.allclose(shifted_key, far)


def permuted(turned, width):
    """Where the interleaved layout keeps what the half layout keeps at 0, 1, ...; the rest stays in place."""
    return [*range(0, turned, 2), *range(1, turned, 2), *range(turned, width)]


@looped("turned", [10, 6, 2])
def test_layouts_differ_by_a_permutation_of_features(turned, offset):
    x, order = torch.randn(2, 3, 7, 10), permuted(turned, 10)
    half, interleaved = Rotary(10, turned=turned), Rotary(10, turned=turned, layout="interleaved")
    assert torch.equal(half(x[..., order], offset), interleaved(x, offset)[..., order])
    if turned > 2:
        assert not torch.allclose(half(x, offset), interleaved(x, offset))


def test_partial_leaves_the_rest_as_it_is(offset):
    x = torch.randn(2, 3, 7, 10, dtype=torch.bfloat16)
    for layout in ("half", "interleaved"):
        rotary = Rotary(10, turned=6, layout=layout, scaling=YaRNScaling(4.0, 4096))
        out = rotary(x, offset)
        assert torch.equal(out[..., 6:], x[..., 6:])
        assert torch.equal(out[..., :6], Rotary(6, layout=layout, scaling=rotary.scaling)(x[..., :6], offset))


def test_yarn_multiplies_logits_by_the_square_of_its_factor():
    x = torch.randn(2, 3, 7, 10, dtype=torch.float64)
    grown, plain = (Rotary(10, scaling=YaRNScaling(4.0, 4096, attention_factor=f))(x, 5) for f in (1.3, 1.0))
    torch.testing.assert_close(grown @ grown.transpose(-1, -2), 1.3**2 * (plain @ plain.transpose(-1, -2)))


@looped("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_that_of_two_products_and_a_sum(kind, offset, dtype):
    x = torch.randn(2, 3, 7, 10).to(dtype)
    exact = Rotary(10, **kind)(x.double(), offset)
    # cos and sin, the products and the sum, each rounded once: 3/2 eps of |a| + |b|; then once to the result's dtype.
    angles, factor = angles_of(kind, 10)
    size = torch.zeros_like(exact)
    for one, other in formulas.pairs(2 * len(angles), kind.get("layout", "half")):
        both = (x[..., one].double().abs() + x[..., other].double().abs()) * factor
        size[..., one] = size[..., other] = both
    allowed = 1.6 * torch.finfo(torch.float32).eps * size
    if dtype != torch.float32:
        allowed = allowed + 0.51 * torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).smallest_normal
    out = Rotary(10, **kind)(x, offset)
    assert out.dtype == dtype
    assert ((out.double() - exact).abs() <= allowed).all()


def test_gradients_turn_back(kind, offset):
    x = torch.randn(2, 3, 7, 10, dtype=torch.float64, requires_grad=True)
    rotary = Rotary(10, **kind)
    assert torch.autograd.gradcheck(lambda x: rotary(x, offset), (x,), fast_mode=True)
    cotangent = torch.randn(2, 3, 7, 10, dtype=torch.float64)
    gradient = torch.autograd.grad(rotary(x, offset), x, cotangent)[0]
    positions = formulas.of_each_token(offset, 2, 7)
    angles, factor = angles_of(kind, 10)
    back = formulas.turned(cotangent, -positions, angles, kind.get("layout", "half"), factor)
    torch.testing.assert_close(gradient, back, rtol=1e-12, atol=1e-12)


def test_an_offset_for_each_item_gives_each_item_what_it_gets_alone():
    x = torch.randn(3, 2, 5, 10)
    together = Rotary(10)(x, torch.tensor([4, 0, 700]))
    for b, start in enumerate([4, 0, 700]):
        assert torch.equal(together[b], Rotary(10)(x[b : b + 1], start)[0])


def test_positions_beyond_any_table_are_computed():
    # A table up to here would take terabytes; unused slots of a cache may hold such numbers.
    x = torch.randn(2, 1, 3, 6, dtype=torch.float64)
    far = torch.tensor([2**40, -(2**40)])
    want = formulas.turned(x, formulas.of_each_token(far, 2, 3), formulas.theta(6))
    # 2^40 radians with a rounding or two of relative size 2^-53: off by up to a few 2^-13.
    torch.testing.assert_close(Rotary(6)(x, far), want, rtol=0, atol=2**-9)
    torch.testing.assert_close(Rotary(6)(x, 2**40)[0], want[0], rtol=0, atol=2**-9)
    extreme = torch.tensor([torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max - 7])
    assert Rotary(6)(x, extreme).isfinite().all()


def test_tables_of_one_dtype_do_not_serve_another():
    rotary, x = Rotary(6), torch.randn(2, 1, 7, 6)
    for offset in (5, torch.tensor([5, 0])):
        for dtype in (torch.float32, torch.float64, torch.float32):
            assert torch.equal(rotary(x.to(dtype), offset), Rotary(6)(x.to(dtype), offset))


def test_tables_are_kept_and_grow(monkeypatch):
    rotary, made = Rotary(6), []
    at = rotary._waves.at
    monkeypatch.setattr(rotary._waves, "at", lambda p, dtype: made.append(p.numel()) or at(p, dtype))
    x = torch.randn(2, 1, 7, 6)
    for offset in (0, 3, torch.tensor([5, 0]), torch.tensor([-9, 0]), torch.arange(14).view(2, 7), 57):
        rotary(x, offset)
    assert made == [64]
    rotary(x, torch.tensor([0, 100]))
    rotary(x, 121)
    assert made == [64, 128]


@pytest.mark.parametrize(("start", "base"), [(0, 10000.0), (11, 10000.0), (101, 500.0)])
def test_is_the_complex_formula(start, base):
    x = torch.randn(2, 3, 7, 10, dtype=torch.float64)
    want = formulas.turned(x, formulas.of_each_token(start, 2, 7), formulas.theta(10, base))
    torch.testing.assert_close(Rotary(10, base)(x, start), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_keeps_shape_and_dtype(dtype):
    turned = Rotary(6)(torch.randn(2, 3, 5, 6, dtype=dtype))
    assert turned.shape == (2, 3, 5, 6)
    assert turned.dtype == dtype


def test_logits_depend_on_distance_only():
    rotary = Rotary(14)
    query, key = torch.randn(2, 1, 1, 7, 14, dtype=torch.float64).unbind(0)

    def logits(offset):
        return rotary(query, offset) @ rotary(key, offset).transpose(-1, -2)

    torch.testing.assert_close(logits(0), logits(577))
    same = query[:, :, :1].expand(1, 1, 7, 14)
    by_distance = rotary(same) @ rotary(same).transpose(-1, -2)
    torch.testing.assert_close(by_distance[..., 1:, 1:], by_distance[..., :-1, :-1])
    assert not torch.allclose(by_distance[..., 0, 0], by_distance[..., 3, 0])


def test_lengths_are_kept():
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(Rotary(8)(x, 19).norm(dim=-1), x.norm(dim=-1))


def test_offset_continues_the_sequence_whatever_was_asked_before():
    x = torch.randn(1, 2, 131, 6, dtype=torch.float64)
    whole = Rotary(6)(x)
    rotary = Rotary(6)
    parts = [rotary(x[:, :, start:stop], start) for start, stop in ((97, 131), (0, 5), (5, 97))]
    torch.testing.assert_close(torch.cat((parts[1], parts[2], parts[0]), dim=2), whole, rtol=0, atol=0)


def test_tables_made_in_inference_mode_serve_training():
    rotary = Rotary(6)
    with torch.inference_mode():
        rotary(torch.randn(1, 1, 5, 6))
        rotary(torch.randn(2, 1, 5, 6), torch.tensor([3, 2**30]))
    x = torch.randn(2, 1, 5, 6, requires_grad=True)
    for offset in (0, torch.tensor([3, 1]), torch.tensor([3, 2**30])):
        x.grad = None
        rotary(x, offset).square().sum().backward()
        torch.testing.assert_close(x.grad, 2 * x.detach())


@pytest.mark.parametrize("inference", [False, True])
def test_positions_and_frequencies_written_without_being_counted_are_seen(inference):
    with torch.inference_mode(inference):
        x, places = torch.randn(2, 1, 5, 6), torch.tensor([3, 7])
        rotary = StoredRotary(6)
        rotary(x, places)
        places.numpy()[0] = 11
        assert torch.equal(rotary(x, places), StoredRotary(6)(x, torch.tensor([11, 7])))
        rotary.frequencies.data[1] = 0.25
        fresh = StoredRotary(6)
        fresh.load_state_dict(rotary.state_dict())
        assert torch.equal(rotary(x, places), fresh(x, places))


def test_has_nothing_to_save_and_pickles():
    rotary = Rotary(6, 77.0)
    x = torch.randn(1, 1, 5, 6)
    turned = rotary(x)
    assert not rotary.state_dict()
    for again in (pickle.loads(pickle.dumps(rotary)), copy.deepcopy(rotary)):
        assert torch.equal(again(x), turned)
    assert len(pickle.dumps(rotary)) == len(pickle.dumps(Rotary(6, 77.0)))  # no tables


def test_casting_the_module_does_not_touch_the_angles():
    x = torch.randn(1, 1, 5, 6)
    assert torch.equal(Rotary(6).bfloat16()(x, 3001), Rotary(6)(x, 3001))


def test_says_what_it_is():
    assert repr(Rotary(6)) == "Rotary(6, base=10000)"
    rotary = Rotary(10, 500.0, layout="interleaved", turned=6, scaling=LinearScaling(2.0))
    assert repr(rotary) == ("Rotary(10, base=500, layout='interleaved', turned=6, scaling=LinearScaling(factor=2.0))")


@looped(
    ("call", "error", "message"),
    [
        (lambda: Rotary(7), ValueError, "width: .* must be even, got 7"),
        (lambda: Rotary(0), ValueError, "width: .* got 0"),
        (lambda: Rotary(6.0), TypeError, "width must be an int, got 6.0"),
        (lambda: Rotary(6, base=1.0), ValueError, "base: must be greater than 1, got 1.0"),
        (lambda: Rotary(6, base=math.inf), ValueError, "base: must be finite, got inf"),
        (lambda: Rotary(6, base="10000"), TypeError, "base: must be a number, got '10000'"),
        (lambda: Rotary(6, layout="gptj"), ValueError, "layout: must be one of 'half', 'interleaved', got 'gptj'"),
        (lambda: Rotary(6, layout=None), ValueError, "layout: must be one of 'half', 'interleaved', got None"),
        (lambda: Rotary(6, turned=3), ValueError, "turned: .* must be even and at least 2, got 3"),
        (lambda: Rotary(6, turned=0), ValueError, "turned: .* must be even and at least 2, got 0"),
        (lambda: Rotary(6, turned=8), ValueError, "turned: at most all 6 features can be turned, got 8"),
        (lambda: Rotary(6, turned=4.0), TypeError, "turned must be an int, got 4.0"),
        (
            lambda: Rotary(6)(torch.zeros(1, 1, 5, 8)),
            ValueError,
            r"x: last axis must be 6 wide, got shape \(1, 1, 5, 8\)",
        ),
        (
            lambda: Rotary(6)(torch.zeros(1, 5, 6)),
            ValueError,
            r"x: expected shape \(batch, heads, length, 6\), got \(1, 5, 6\)",
        ),
        (lambda: Rotary(6)(torch.zeros(1, 1, 1, 5, 6)), ValueError, "x: expected shape"),
        (lambda: Rotary(6)(torch.zeros(1, 1, 5, 6).long()), TypeError, "x: must be floating point, got a int64"),
        (lambda: Rotary(6)(torch.zeros(1, 1, 5, 6), -1), ValueError, "offset: positions start at 0, got -1"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_odd_heads_can_be_turned_in_part():
    x = torch.randn(1, 2, 5, 7)
    assert torch.equal(Rotary(7, turned=6)(x, 3)[..., :6], Rotary(6)(x[..., :6], 3))

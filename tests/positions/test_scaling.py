"""Linear, NTK, YaRN and Llama 3 scaling against the papers' equations and transformers' functions."""

from __future__ import annotations

import itertools
import math
import pickle
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from looped import looped
from positions.formulas import theta
from saccade.positions import LinearScaling, Llama3Scaling, NTKScaling, Rotary, YaRNScaling

WIDTHS = st.integers(2, 67).map(lambda n: 2 * n)
FACTORS = st.floats(1.0, 64.0)
BASES = st.sampled_from([77.0, 10000.0, 500000.0])
ENDS = [LinearScaling(3.0), NTKScaling(3.0), YaRNScaling(3.0, 1009), Llama3Scaling(3.0, 1009)]


def transformers_frequencies(kind, width, base, seq_len=None, longest=16, **parameters):
    """What transformers.modeling_rope_utils says, float32 (width / 2,), and its attention factor."""
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    config = SimpleNamespace(
        head_dim=width,
        hidden_size=width,
        num_attention_heads=1,
        max_position_embeddings=longest,
        rope_parameters={"rope_theta": base, **parameters},
        standardize_rope_params=lambda: None,
    )
    return functions[kind](config, torch.device("cpu"), seq_len=seq_len)


def allowed(width: int, base: float) -> torch.Tensor:
    """What float32 may be off: an exponent rounded once becomes ln(base) roundings; mixing and dividing a few more."""
    eps = torch.finfo(torch.float32).eps
    return 4 * eps * (1 + math.log(base)) * torch.tensor(theta(width, base), dtype=torch.float64)


@given(WIDTHS, BASES, FACTORS)
def test_linear_is_positions_divided(width, base, factor):
    ours = LinearScaling(factor).frequencies(width, base)
    assert ours.dtype == torch.float64 and ours.shape == (width // 2,)
    for position in (1, 7, 1009):
        want = torch.tensor([position / factor * angle for angle in theta(width, base)], dtype=torch.float64)
        torch.testing.assert_close(position * ours, want, rtol=1e-14, atol=0)
    theirs, attention = transformers_frequencies("linear", width, base, factor=factor)
    assert ((ours - theirs.double()).abs() <= allowed(width, base)).all()
    assert attention == LinearScaling(factor).attention == 1.0


@given(WIDTHS, BASES, st.integers(1, 64))
def test_ntk_is_another_base(width, base, factor):
    ours = NTKScaling(factor).frequencies(width, base)
    changed = base * factor ** (width / (width - 2))
    torch.testing.assert_close(ours, torch.tensor(theta(width, changed), dtype=torch.float64), rtol=1e-13, atol=0)
    # What the exponent is for: the fastest pair as before, the slowest slower by the factor.
    assert ours[0] == 1.0
    assert ours[-1].item() == pytest.approx(theta(width, base)[-1] / factor, rel=1e-13)
    # transformers' dynamic kind, at the length where its base has grown as much.
    theirs, attention = transformers_frequencies("dynamic", width, base, seq_len=16 * factor, factor=1.0)
    assert ((ours - theirs.double()).abs() <= allowed(width, changed)).all()
    assert attention == NTKScaling(factor).attention == 1.0


@given(
    WIDTHS,
    BASES,
    FACTORS,
    st.integers(40, 100_000),
    st.sampled_from([(32.0, 1.0), (16.0, 2.0), (8.0, 5.0)]),
)
def test_yarn_is_that_of_transformers(width, base, factor, length, betas):
    ours = YaRNScaling(factor, length, *betas)
    theirs, attention = transformers_frequencies(
        "yarn",
        width,
        base,
        factor=factor,
        original_max_position_embeddings=length,
        beta_fast=betas[0],
        beta_slow=betas[1],
    )
    assert ((ours.frequencies(width, base) - theirs.double()).abs() <= allowed(width, base)).all()
    assert ours.attention == pytest.approx(attention, rel=1e-15)


@given(WIDTHS, BASES, FACTORS, st.integers(1, 100_000), st.sampled_from([(1.0, 4.0), (0.5, 0.7), (2.0, 9.0)]))
def test_llama3_is_that_of_transformers(width, base, factor, length, turns):
    ours = Llama3Scaling(factor, length, *turns)
    theirs, attention = transformers_frequencies(
        "llama3",
        width,
        base,
        factor=factor,
        original_max_position_embeddings=length,
        low_freq_factor=turns[0],
        high_freq_factor=turns[1],
    )
    # Their share is a difference of float32 turns, divided by high - low: its roundings grow by high / (high - low).
    grown = turns[1] / (turns[1] - turns[0])
    assert ((ours.frequencies(width, base) - theirs.double()).abs() <= (1 + grown) * allowed(width, base)).all()
    assert attention == ours.attention == 1.0


@given(WIDTHS, BASES, st.floats(1.01, 64.0), st.integers(40, 100_000))
def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones(width, base, factor, length):
    """Peng et al. 2023, section 3.2: by how often a pair turns within the length, r = L / wavelength."""
    ours = YaRNScaling(factor, length).frequencies(width, base)
    ratio = []
    for scaled, plain in zip(ours.tolist(), theta(width, base), strict=True):
        turns = length * plain / (2 * math.pi)
        if turns > 32 * (1 + 1e-9):
            assert scaled == pytest.approx(plain, rel=1e-13)
        elif turns < 1 - 1e-9:
            assert scaled == pytest.approx(plain / factor, rel=1e-13)
        ratio.append(scaled / plain)
    assert all(1 / factor * (1 - 1e-12) <= r <= 1 + 1e-12 for r in ratio)
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(ratio))


def test_yarn_mixes_in_between():
    ratio = YaRNScaling(4.0, 4096).frequencies(128, 10000.0) / torch.tensor(theta(128), dtype=torch.float64)
    # Pairs 20 and 46 are the last to turn 32 times within 4096 tokens and the first to turn less than once.
    low = 128 * math.log(4096 / (32 * 2 * math.pi)) / (2 * math.log(10000))
    high = 128 * math.log(4096 / (2 * math.pi)) / (2 * math.log(10000))
    assert (math.floor(low), math.ceil(high)) == (20, 46)
    steps = (1 - (torch.arange(20, 47) - 20) / 26) + (torch.arange(20, 47) - 20) / 26 / 4
    torch.testing.assert_close(ratio[20:47], steps.double(), rtol=1e-6, atol=0)
    assert ratio[19] == 1.0 and ratio[47].item() == pytest.approx(0.25)


def test_yarns_ramp_ends_where_the_authors_code_ends_it():
    # At base 20 the pair that turns once within 3000 tokens would be number 31 of 15. Their ramp goes from 13 to 29.
    ours = YaRNScaling(8.0, 3000).frequencies(30, 20.0)
    theirs, _ = transformers_frequencies("yarn", 30, 20.0, factor=8.0, original_max_position_embeddings=3000)
    assert ((ours - theirs.double()).abs() <= allowed(30, 20.0)).all()
    assert ours[14].item() == pytest.approx(theta(30, 20.0)[14] * (15 / 16 + 1 / 16 / 8), rel=1e-13)


def test_yarn_interpolates_nothing_where_every_pair_is_fast():
    # The slowest of these pairs turns hundreds of times within the length.
    plain = torch.tensor(theta(30, 20.0), dtype=torch.float64)
    assert plain[-1] * 10**6 / (2 * math.pi) > 32
    torch.testing.assert_close(YaRNScaling(8.0, 10**6).frequencies(30, 20.0), plain, rtol=1e-13, atol=0)


def test_yarns_attention_factor():
    assert YaRNScaling(16.0, 4096).attention == 0.1 * math.log(16.0) + 1.0
    assert YaRNScaling(16.0, 4096, attention_factor=0.7).attention == 0.7
    _, theirs = transformers_frequencies(
        "yarn", 64, 10000.0, factor=16.0, original_max_position_embeddings=4096, attention_factor=0.7
    )
    assert theirs == 0.7


@pytest.mark.parametrize("scaling", [LinearScaling(1.0), NTKScaling(1.0), YaRNScaling(1.0, 4096)])
def test_a_factor_of_one_changes_nothing(scaling):
    torch.testing.assert_close(scaling.frequencies(30, 10000.0), torch.tensor(theta(30), dtype=torch.float64))
    x = torch.randn(1, 2, 7, 30, dtype=torch.float64)
    torch.testing.assert_close(Rotary(30, scaling=scaling)(x, 19), Rotary(30)(x, 19))


@pytest.mark.parametrize("scaling", ENDS)
def test_values_compare_hash_and_pickle(scaling):
    again = pickle.loads(pickle.dumps(scaling))
    assert again == scaling and hash(again) == hash(scaling)
    assert len({*ENDS, again}) == 4
    with pytest.raises(AttributeError):
        scaling.factor = 5.0


@looped("kind", [LinearScaling, NTKScaling, lambda factor: YaRNScaling(factor, 4096), lambda f: Llama3Scaling(f, 4096)])
@looped(
    ("factor", "error", "message"),
    [
        (0.5, ValueError, "factor: must be at least 1 .*, got 0.5"),
        (-2, ValueError, "factor: must be at least 1 .*, got -2"),
        (math.inf, ValueError, "factor: must be finite, got inf"),
        (math.nan, ValueError, "factor: must be finite, got nan"),
        ("4", TypeError, "factor: must be a number, got '4'"),
        (True, TypeError, "factor: must be a number, got True"),
        (torch.tensor(4.0), TypeError, "factor: must be a number, got a float32 tensor"),
    ],
)
def test_bad_factors(kind, factor, error, message):
    with pytest.raises(error, match=message):
        kind(factor)


@looped(
    ("call", "error", "message"),
    [
        (lambda: YaRNScaling(4.0, 6), ValueError, "original_length: must be more than 2 pi beta_slow = 6.283 .* got 6"),
        (lambda: YaRNScaling(4.0, 4096.0), TypeError, "original_length must be an int, got 4096.0"),
        (lambda: YaRNScaling(4.0, 4096, 1.0, 1.0), ValueError, "beta_fast: must be greater than beta_slow, got"),
        (lambda: YaRNScaling(4.0, 4096, 1.0, 0.0), ValueError, "beta_slow: must be positive, got 0.0"),
        (lambda: YaRNScaling(4.0, 4096, math.inf), ValueError, "beta_fast: must be finite, got inf"),
        (lambda: YaRNScaling(4.0, 4096, attention_factor=0.0), ValueError, "attention_factor: must be positive"),
        (lambda: Llama3Scaling(4.0, 0), ValueError, "original_length must be at least 1, got 0"),
        (lambda: Llama3Scaling(4.0, 8192, 0.0), ValueError, "low_turns: must be positive, got 0.0"),
        (lambda: Llama3Scaling(4.0, 8192, 4.0, 4.0), ValueError, "high_turns: must be greater than low_turns, got"),
        (lambda: Rotary(2, scaling=NTKScaling(4.0)), ValueError, "scaling: NTKScaling needs at least 4 .*, got 2"),
        (lambda: Rotary(8, turned=2, scaling=NTKScaling(4.0)), ValueError, "NTKScaling needs at least 4 .*, got 2"),
        (lambda: Rotary(6, scaling=4.0), TypeError, "scaling: must be LinearScaling, NTKScaling, .*, got 4.0"),
        (lambda: Rotary(6, scaling="yarn"), TypeError, "scaling: must be LinearScaling, .*, got 'yarn'"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()

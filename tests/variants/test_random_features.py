"""Random features against the kernel they estimate, the errors the paper derives, and what Haar and chi mean."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from looped import looped
from saccade.variants import draw_projection, random_features
from saccade.variants._random_features import KINDS, haar_rotations, usual_features, vectors_for
from slowly import slow_after

DRAWS = {4: 60_000, 16: 15_000}  # for each width; of as many vectors


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pair(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y with |x|, |y| near 0.7, whatever the width: where estimates have light tails enough for error bars."""
    x, y = torch.randn(2, width, dtype=torch.float64, generator=generator(width)) * 0.7 / width**0.5
    return x, y + 0.3 * x


@functools.cache
def projections(width: int, orthogonal: bool) -> torch.Tensor:
    """As many draws as there are, each of `width` vectors: (draws, width, width)."""
    return draw_projection(width, width, heads=DRAWS[width], orthogonal=orthogonal, generator=generator(1))


def estimates(kind: str, width: int, orthogonal: bool) -> torch.Tensor:
    """exp(x.y), estimated once with each draw: (draws,)."""
    projection = projections(width, orthogonal)
    x, y = (one.expand(1, len(projection), 1, width) for one in pair(width))
    return (random_features(x, projection, kind) * random_features(y, projection, kind)).sum(-1).flatten()


def derived_error(kind: str, width: int) -> float:
    """Mean squared error of `width` independent vectors: Choromanski et al. (2020), Lemma 2."""
    x, y = pair(width)
    a, b, sm = (x + y).square().sum().item(), (x - y).square().sum().item(), math.exp(float(x @ y))
    if kind == "trigonometric":
        return math.exp(a) * sm**-2 * (1 - math.exp(-b)) ** 2 / (2 * width)
    positive = math.exp(a) * sm**2 * (1 - math.exp(-a)) / width
    return positive if kind == "positive" else (1 - math.exp(-a)) / 2 * positive


def bar(sample: torch.Tensor) -> float:
    """Standard error of the mean."""
    return sample.std().item() / len(sample) ** 0.5


def within(sample: torch.Tensor, mean: float, errors: float = 5.0) -> bool:
    """Whether the mean of a sample is `mean`, up to so many standard errors."""
    return abs(sample.mean().item() - mean) < errors * bar(sample)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("width", [4, 16])
def test_products_estimate_the_kernel_without_bias(kind, orthogonal, width):
    x, y = pair(width)
    assert within(estimates(kind, width, orthogonal), math.exp(float(x @ y)))


@pytest.mark.slow
@looped("kind", KINDS)
@looped("width", [4, 16])
def test_independent_vectors_have_the_derived_error(kind, width):
    x, y = pair(width)
    squares = (estimates(kind, width, orthogonal=False) - math.exp(float(x @ y))).square()
    assert within(squares, derived_error(kind, width))
    # And the bar is short enough to tell a factor: m counted as features, not vectors, would be one of 2.
    assert bar(squares) < 0.06 * derived_error(kind, width)


@pytest.mark.slow
@looped("kind", KINDS)
@looped("width", [4, 16])
def test_orthogonal_vectors_are_no_worse(kind, width):
    x, y = pair(width)
    squares = (estimates(kind, width, orthogonal=True) - math.exp(float(x @ y))).square()
    assert squares.mean().item() < derived_error(kind, width) + 5 * bar(squares)


@pytest.mark.parametrize("width", slow_after(1, [4, 16]))
def test_orthogonal_positive_features_gain_what_theorem_2_promises(width):
    x, y = pair(width)
    sm, least = math.exp(float(x @ y)), math.exp(-float(x @ x + y @ y) / 2)
    squares = (estimates("positive", width, orthogonal=True) - sm).square()
    gain = 2 * (width - 1) / (width * (width + 2)) * (sm - least) ** 2
    assert squares.mean().item() < derived_error("positive", width) - gain + 5 * bar(squares)
    assert gain > 3 * bar(squares)  # or nothing was tested


def test_hyperbolic_features_are_positive_ones_of_both_signs():
    w = draw_projection(5, 3, generator=generator())
    x, y = torch.randn(2, 2, 1, 7, 3, dtype=torch.float64, generator=generator())
    both = torch.cat([w, -w], 1)
    expected = random_features(x, both, "positive") @ random_features(y, both, "positive").mT
    torch.testing.assert_close(random_features(x, w, "hyperbolic") @ random_features(y, w, "hyperbolic").mT, expected)


def test_trigonometric_features_know_norms_exactly():
    x = torch.randn(2, 3, 7, 5, dtype=torch.float64, generator=generator())
    features = random_features(x, draw_projection(11, 5, heads=3, generator=generator()), "trigonometric")
    torch.testing.assert_close(features.square().sum(-1), x.square().sum(-1).exp())


def moments(rotations: torch.Tensor) -> list[tuple[torch.Tensor, float]]:
    """Samples and the means they have under Haar measure: entries, signs, and traces (Diaconis and Evans, 2001)."""
    trace = rotations.diagonal(dim1=1, dim2=2).sum(1)
    squared = (rotations @ rotations).diagonal(dim1=1, dim2=2).sum(1)
    entries = [(rotations[:, i, j], 0.0) for i in range(3) for j in range(3)]
    return [*entries, (rotations[:, 0, 0].sign(), 0.0), (trace.square(), 1.0), (squared, 1.0), (trace, 0.0)]


def test_rotations_are_haar_and_raw_qr_is_not():
    width, count = 3, 20_000
    rotations = haar_rotations(count, width, generator())
    torch.testing.assert_close(rotations @ rotations.mT, torch.eye(width, dtype=torch.float64).expand(count, -1, -1))
    assert all(within(sample, mean) for sample, mean in moments(rotations))
    raw = torch.linalg.qr(torch.randn(count, width, width, dtype=torch.float64, generator=generator())).Q
    assert sum(not within(sample, mean, 50) for sample, mean in moments(raw)) >= 4


def test_blocks_are_orthogonal_and_the_last_may_be_cut():
    width, vectors = 5, 13
    drawn = draw_projection(vectors, width, heads=2, generator=generator()).double()
    directions = drawn / drawn.norm(dim=-1, keepdim=True)
    for start in range(0, vectors, width):
        block = directions[:, start : start + width]
        one = torch.eye(block.shape[1], dtype=torch.float64).expand(2, -1, -1)
        torch.testing.assert_close(block @ block.mT, one, atol=1e-6, rtol=0)
    assert not torch.allclose(directions[:, :5], directions[:, 5:10])
    assert not torch.allclose(directions[0], directions[1])


@pytest.mark.parametrize("orthogonal", [False, True])
def test_each_vector_is_standard_normal(orthogonal):
    width, heads = 3, 20_000
    drawn = draw_projection(4, width, heads=heads, orthogonal=orthogonal, generator=generator()).double()
    for vector in drawn.unbind(1):
        norm = vector.norm(dim=-1)
        # Chi with D degrees of freedom.
        assert within(norm, math.sqrt(2) * math.exp(math.lgamma((width + 1) / 2) - math.lgamma(width / 2)))
        assert within(norm.square(), width)
        assert within(norm**4, width * (width + 2))
        for i in range(width):
            assert within(vector[:, i], 0)
            assert within(vector[:, i] ** 4, 3)
            assert within(vector[:, i] * vector[:, (i + 1) % width], 0)
        assert within(norm * vector[:, 0].sign(), 0)  # lengths say nothing of directions


def test_lengths_are_independent_of_each_other():
    lengths = draw_projection(3, 3, heads=20_000, generator=generator()).double().norm(dim=-1)
    lengths = lengths - lengths.mean(0)
    assert within(lengths[:, 0] * lengths[:, 1], 0)


def test_the_generator_decides():
    one, other = (draw_projection(7, 3, heads=2, generator=generator(seed)) for seed in (5, 6))
    torch.testing.assert_close(one, draw_projection(7, 3, heads=2, generator=generator(5)), rtol=0, atol=0)
    assert not torch.equal(one, other)
    torch.manual_seed(5)
    assert torch.equal(draw_projection(7, 3, heads=2), one)
    assert one.dtype == torch.float32


def test_usual_features_are_whole_blocks():
    assert [usual_features(width) for width in (1, 2, 3, 16, 32, 64, 128)] == [2, 2, 4, 48, 96, 256, 640]


def test_refusals():
    with pytest.raises(ValueError, match=r"kind: expected one of positive, trigonometric, hyperbolic; got 'relu'"):
        random_features(torch.zeros(1, 1, 1, 3), torch.zeros(1, 2, 3), "relu")
    with pytest.raises(
        ValueError, match=r"features: hyperbolic features come in pairs, expected an even number, got 7"
    ):
        vectors_for(7, "hyperbolic")
    assert vectors_for(7, "positive") == 7 and vectors_for(8, "trigonometric") == 4
    for arguments, name in (((0, 3), "vectors"), ((3, 0), "width")):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            draw_projection(*arguments)
    with pytest.raises(TypeError, match=r"heads must be an int, got 1\.5"):
        draw_projection(3, 3, heads=1.5)

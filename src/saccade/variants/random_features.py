"""Random features: vectors whose inner products estimate the softmax kernel exp(x.y).

    SM(x, y) = exp(x.y) = E[phi(x).phi(y)]          over m vectors w ~ N(0, I_D)

    positive        phi(x) = exp(-|x|^2 / 2) m^-1/2    [exp(w_1.x), ..., exp(w_m.x)]                       m features
    hyperbolic      phi(x) = exp(-|x|^2 / 2) (2m)^-1/2 [exp(w_1.x), ..., exp(-w_1.x), ...]                2m features
    trigonometric   phi(x) = exp(+|x|^2 / 2) m^-1/2    [cos(w_1.x), ..., sin(w_1.x), ...]                 2m features

Choromanski et al., "Rethinking Attention with Performers" (2020): Lemma 1 (positive and hyperbolic), equation 4 and
section 2.3 (trigonometric; Rahimi and Recht, "Random Features for Large-Scale Kernel Machines", 2007). With
independent vectors, a = |x + y|^2 and b = |x - y|^2, the mean squared errors are (Lemma 2)

    positive        e^a SM^2 (1 - e^-a) / m
    hyperbolic      (1 - e^-a) / 2 of that
    trigonometric   e^a SM^-2 (1 - e^-b)^2 / (2m)

where m counts vectors: at equal features, hyperbolic ones have 1 - e^-a of the error of positive ones. Positive and
hyperbolic errors vanish where the kernel does, which is what attention needs; trigonometric ones grow there, and sums
of them may even be negative.

Orthogonal vectors (section 2.4 and Theorem 2) stand in blocks of D: directions from a rotation drawn uniformly (Haar),
lengths independent, as long as Gaussian vectors are (chi with D degrees of freedom). Each alone is then still exactly
N(0, I), so nothing becomes biased, while errors of the same block partly cancel.

Shapes: B batch, H heads, L length, D width, m vectors, r features (m, or 2m).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._masks._data import whole

KINDS = ("positive", "trigonometric", "hyperbolic")


def usual_features(width: int) -> int:
    """D log D, rounded to whole blocks of D orthogonal vectors, and even: 256 at D = 64.

    D log D is what uniform convergence asks for (Theorem 4); 256 is what the paper trains heads of 64 with.
    """
    features = width * max(1, round(math.log(width)))
    return features + features % 2


def vectors_for(features: int, kind: str) -> int:
    """How many vectors give so many features: half as many where each gives two."""
    if kind == "positive":
        return features
    if features % 2:
        raise ValueError(f"features: {kind} ones come in pairs, expected an even number, got {features}")
    return features // 2


def haar_rotations(count: int, width: int, generator: torch.Generator) -> Tensor:
    """(count, D, D), orthogonal matrices drawn uniformly, float64.

    Q of a QR decomposition alone is not uniform: the algorithm's choice of signs shows in it. It is with the signs that
    make the diagonal of R positive, where the decomposition is unique (Mezzadri, "How to generate random matrices from
    the classical compact groups", 2007).
    """
    q, r = torch.linalg.qr(torch.randn(count, width, width, dtype=torch.float64, generator=generator))
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    return q * signs[:, None, :]


def draw_projection(
    vectors: int, width: int, *, heads: int = 1, orthogonal: bool = True, generator: torch.Generator | None = None
) -> Tensor:
    """Draw (heads, m, D), float32 on the CPU: m vectors for each head, each of them N(0, I_D).

    Args:
        vectors: m.
        width: D.
        heads: H, each with vectors of its own.
        orthogonal: within blocks of D vectors; otherwise all are independent.
        generator: of the CPU; None is PyTorch's own.
    """
    for name, number in (("vectors", vectors), ("width", width), ("heads", heads)):
        whole(number, name, least=1)
    generator = torch.default_generator if generator is None else generator
    drawn = torch.randn(heads, vectors, width, dtype=torch.float64, generator=generator)
    if orthogonal:
        blocks = -(-vectors // width)
        rotations = haar_rotations(heads * blocks, width, generator)
        directions = rotations.reshape(heads, blocks * width, width)[:, :vectors]
        drawn = directions * drawn.norm(dim=-1, keepdim=True)
    return drawn.float()


def random_features(x: Tensor, projection: Tensor, kind: str = "positive") -> Tensor:
    """phi(x) as in the formula, (B, H, L, D) -> (B, H, L, r). Overflows where exp does; attention takes care of that.

    Args:
        x: (B, H, L, D).
        projection: (H or 1, m, D), from `draw_projection`.
        kind: "positive", "trigonometric" or "hyperbolic".
    """
    check_kind(kind)
    projected, half = project(x, projection), half_square(x)
    if kind == "trigonometric":
        return waves(projected) * half.exp() * projection.shape[1] ** -0.5
    exponents = projected if kind == "positive" else both_signs(projected)
    return (exponents - half).exp() * exponents.shape[-1] ** -0.5


def project(x: Tensor, projection: Tensor) -> Tensor:
    """w.x of every vector: (B, H, L, D) and (H or 1, m, D) to (B, H, L, m)."""
    # One matrix for all heads is one product of all rows; a batch of one would be copied for every head.
    weight = projection[0] if projection.shape[0] == 1 else projection
    return x @ weight.to(x.dtype).transpose(-2, -1)


def half_square(x: Tensor) -> Tensor:
    """|x|^2 / 2, (B, H, L, 1)."""
    return x.square().sum(-1, keepdim=True) / 2


def both_signs(projected: Tensor) -> Tensor:
    """(..., m) to (..., 2m)."""
    return torch.cat([projected, -projected], -1)


def waves(projected: Tensor) -> Tensor:
    """Cosines and sines, (..., m) to (..., 2m)."""
    return torch.cat([projected.cos(), projected.sin()], -1)


def check_kind(kind: object) -> None:
    """ValueError unless it is one of `KINDS`."""
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}; got {kind!r}")

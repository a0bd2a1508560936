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
from typing import Any

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
    half = half_square(x)
    if kind == "trigonometric":
        return waves(project(x, projection)) * half.exp() * projection.shape[1] ** -0.5
    projected = project(x, signed(projection, kind))
    return (projected - half).exp() * projected.shape[-1] ** -0.5


def exponentials(
    x: Tensor, vectors: Tensor, level: Tensor | None = None, *, squares: bool = False, room: float = 0.0
) -> tuple[Tensor, Tensor]:
    """exp(w.x + level - top + room), at most exp(room), and top, the largest w.x + level of each row.

    Gradients take level and top as constant: they cancel in attention. With `squares` they are those of
    exp(w.x - |x|^2 / 2 - constant). They do not reach vectors.

    Args:
        x: (B, H, L, D).
        vectors: (H or 1, r, D).
        level: (B, H, 1, r) or None: 0.
        squares: see above.
        room: see above.

    Returns:
        (B, H, L, r) and (B, H, L, 1).
    """
    features, top = _OverRows.apply(x, vectors, level, squares, room)
    return features, top


def exponentials_over_keys(x: Tensor, vectors: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """exp(w.x - |x|^2 / 2 - top), at most 1, and top, the largest exponent of each feature: of rows that are kept.

    Args:
        x: (B, H, L, D).
        vectors: (H or 1, r, D); gradients do not reach them.
        kept: bool (B or 1, L); the features of other rows are 0. None: all are.

    Returns:
        (B, H, L, r) and (B, H, 1, r), 0 where no row is kept.
    """
    features, top = _OverKeys.apply(x, vectors, kept)
    return features, top


class _Exponentials(torch.autograd.Function):
    """Every pass over the L r exponents after the first is in place, and the features are all that is kept of them."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, vectors, features = ctx.saved_tensors
        of_exponents = grad * features
        of_x = of_exponents @ (vectors[0] if vectors.shape[0] == 1 else vectors)
        if ctx.squares:
            of_x = of_x - x * of_exponents.sum(-1, keepdim=True)
        return of_x, *(None,) * ctx.others


class _OverRows(_Exponentials):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, vectors: Tensor, level: Tensor | None, squares: bool, room: float
    ) -> tuple[Tensor, Tensor]:
        vectors = vectors.to(x.dtype)
        exponents = project(x, vectors)
        if level is not None:
            exponents += level
        top = exponents.amax(-1, keepdim=True)
        features = exponents.sub_(top - room).exp_()
        ctx.squares, ctx.others = squares, 4
        ctx.save_for_backward(x, vectors, features)
        ctx.mark_non_differentiable(top)
        return features, top


class _OverKeys(_Exponentials):
    @staticmethod
    def forward(ctx: Any, x: Tensor, vectors: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        vectors = vectors.to(x.dtype)
        exponents = project(x, vectors).sub_(half_square(x))
        if kept is not None:
            exponents.masked_fill_(~kept[:, None, :, None], -torch.inf)
        if x.shape[2]:
            top = exponents.amax(-2, keepdim=True)
            top.masked_fill_(top == -torch.inf, 0.0)
        else:
            top = exponents.new_zeros(*exponents.shape[:2], 1, exponents.shape[3])
        features = exponents.sub_(top).exp_()
        ctx.squares, ctx.others = True, 2
        ctx.save_for_backward(x, vectors, features)
        ctx.mark_non_differentiable(top)
        return features, top


def signed(projection: Tensor, kind: str) -> Tensor:
    """The vectors of positive features, (H or 1, r, D): hyperbolic ones are those of w and -w."""
    return torch.cat([projection, -projection], 1) if kind == "hyperbolic" else projection


def project(x: Tensor, projection: Tensor) -> Tensor:
    """w.x of every vector: (B, H, L, D) and (H or 1, m, D) to (B, H, L, m)."""
    # One matrix for all heads is one product of all rows; a batch of one would be copied for every head.
    weight = projection[0] if projection.shape[0] == 1 else projection
    return x @ weight.to(x.dtype).transpose(-2, -1)


def half_square(x: Tensor) -> Tensor:
    """|x|^2 / 2, (B, H, L, 1)."""
    return x.square().sum(-1, keepdim=True) / 2


def waves(projected: Tensor) -> Tensor:
    """Cosines and sines, (..., m) to (..., 2m)."""
    return torch.cat([projected.cos(), projected.sin()], -1)


def check_kind(kind: object) -> None:
    """ValueError unless it is one of `KINDS`."""
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}; got {kind!r}")

"""Random features: vectors whose inner products estimate the softmax kernel exp(x.y).

    SM(x, y) = exp(x.y) = E[phi(x).phi(y)]          over m vectors w ~ N(0, I_D)

    positive        phi(x) = exp(-|x|^2 / 2) m^-1/2    [exp(w_1.x), ..., exp(w_m.x)]                       m features
    hyperbolic      phi(x) = exp(-|x|^2 / 2) (2m)^-1/2 [exp(w_1.x), ..., exp(-w_1.x), ...]                2m features
    trigonometric   phi(x) = exp(+|x|^2 / 2) m^-1/2    [cos(w_1.x), ..., sin(w_1.x), ...]                 2m features

Choromanski et al., "Rethinking Attention with Performers" (2020; numbers as in the text of ICLR 2021): Lemma 1
(positive and hyperbolic), section 2.3 (trigonometric; Rahimi and Recht, "Random Features for Large-Scale Kernel
Machines", 2007). With independent vectors,
a = |x + y|^2 and b = |x - y|^2, the mean squared errors are (Lemma 2)

    positive        e^a SM^2 (1 - e^-a) / m
    hyperbolic      (1 - e^-a) / 2 of that
    trigonometric   e^a SM^-2 (1 - e^-b)^2 / (2m)

where m counts vectors: at equal features, hyperbolic ones have 1 - e^-a of the error of positive ones. Positive and
hyperbolic errors vanish where the kernel does, which is what attention needs; trigonometric ones grow there, and sums
of them may even be negative.

Orthogonal vectors (section 2.4, Theorem 2; more than D of them, appendix B.2) stand in blocks of D: directions from a
rotation drawn uniformly (Haar), lengths independent, as long as Gaussian vectors are (chi with D degrees of freedom).
Each alone is then still exactly N(0, I), so nothing becomes biased, while errors of the same block partly cancel.

Shape legend: B batch, H heads, L length, D width, m vectors, r features (m, or 2m).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._masks._data import whole

KINDS = ("positive", "trigonometric", "hyperbolic")


def usual_features(width: int) -> int:
    """D log D, rounded to whole blocks of D orthogonal vectors, and even: 256 at D = 64.

    D log D is what uniform convergence asks for (Theorem 4, for trigonometric ones); 256 is what the paper trains heads
    of 64 with (appendix A.3).
    """
    features = width * max(1, round(math.log(width)))
    return features + features % 2


def vectors_for(features: int, kind: str) -> int:
    """The number of vectors for this number of features: half as many if each vector gives two features."""
    if kind == "positive":
        return features
    if features % 2:
        raise ValueError(f"features: {kind} features come in pairs, expected an even number, got {features}")
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
    """Draw the vectors of random features: each of them N(0, I_D).

    Choromanski et al., "Rethinking Attention with Performers" (2020), section 2.4 and appendix B.2.

    Args:
        vectors: m.
        width: D.
        heads: H, each with vectors of its own.
        orthogonal: within blocks of D vectors; otherwise all are independent.
        generator: of the CPU; None is PyTorch's own.

    Returns:
        (H, m, D), float32 on the CPU.

    Raises:
        TypeError, ValueError: numbers that are no ints, or below 1.

    Example:
        >>> import torch, saccade
        >>> vectors = saccade.variants.draw_projection(4, 4)
        >>> vectors.shape
        torch.Size([1, 4, 4])
        >>> products = vectors[0] @ vectors[0].T
        >>> torch.allclose(products, products.diag().diag(), atol=1e-5)  # orthogonal
        True
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
    """Random features phi(x), whose products estimate the softmax kernel: E[phi(x) . phi(y)] = exp(x . y).

    Choromanski et al., "Rethinking Attention with Performers" (2020), Lemma 1 and section 2.3. The features overflow
    where exp does; `performer_attention` avoids that.

    Args:
        x: (B, H, L, D).
        projection: (H or 1, m, D), from `draw_projection`.
        kind: "positive", "trigonometric" or "hyperbolic".

    Returns:
        (B, H, L, r): r is m for "positive", otherwise 2 m.

    Raises:
        ValueError: an unknown kind.

    Example:
        >>> import torch, saccade
        >>> vectors = saccade.variants.draw_projection(4096, 4, generator=torch.Generator().manual_seed(0))
        >>> x = torch.eye(4)[None, None]
        >>> phi = saccade.variants.random_features(x, vectors)
        >>> torch.allclose(phi @ phi.mT, (x @ x.mT).exp(), rtol=0.2)
        True
    """
    check_kind(kind)
    half = half_square(x)
    if kind == "trigonometric":
        return waves(x, projection) * half.exp() * projection.shape[1] ** -0.5
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


class _OverRows(torch.autograd.Function):
    """Keeps only the features, not the L r exponents, and processes them while they are in cache."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, vectors: Tensor, level: Tensor | None, squares: bool, room: float
    ) -> tuple[Tensor, Tensor]:
        features = x.new_empty(*x.shape[:3], vectors.shape[1])
        top = x.new_empty(*x.shape[:3], 1)
        weight = _for_items(vectors.to(x.dtype), x)
        level = None if level is None else level.flatten(0, 1)
        for items, rows in _blocks(features):
            exponents = _rows(features, items, rows)
            torch.bmm(_rows(x, items, rows), weight[items].mT, out=exponents)
            if level is not None:
                exponents += level[items]
            highest = _rows(top, items, rows)
            torch.amax(exponents, -1, keepdim=True, out=highest)
            exponents.sub_(highest - room).exp_()
        ctx.squares, ctx.others = squares, 4
        ctx.save_for_backward(x, vectors, features)
        ctx.mark_non_differentiable(top)
        return features, top

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return _through_exponentials(ctx, grad)


class _OverKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, vectors: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
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

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return _through_exponentials(ctx, grad)


def _through_exponentials(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, vectors, features = ctx.saved_tensors

    def of_exponents(items: slice, rows: slice) -> tuple[Tensor, Tensor | None]:
        product = _rows(grad, items, rows) * _rows(features, items, rows)
        return product, -product.sum(-1, keepdim=True) if ctx.squares else None

    return _through_projection(x, vectors, features, of_exponents), *(None,) * ctx.others


class _Waves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, vectors: Tensor, squares: bool) -> Tensor:
        count = vectors.shape[1]
        features = x.new_empty(*x.shape[:3], 2 * count)
        weight = _for_items(vectors.to(x.dtype), x)
        for items, rows in _blocks(features):
            projected = _rows(x, items, rows) @ weight[items].mT
            torch.cos(projected, out=_rows(features, items, rows)[..., :count])
            torch.sin(projected, out=_rows(features, items, rows)[..., count:])
        ctx.squares = squares
        ctx.save_for_backward(x, vectors, features)
        return features

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, vectors, features = ctx.saved_tensors

        def of_projected(items: slice, rows: slice) -> tuple[Tensor, Tensor | None]:
            here, above = _rows(features, items, rows), _rows(grad, items, rows)
            (cos, sin), (of_cos, of_sin) = here.chunk(2, -1), above.chunk(2, -1)
            of_squares = (here * above).sum(-1, keepdim=True) if ctx.squares else None
            return (of_sin * cos).addcmul_(of_cos, sin, value=-1), of_squares

        return _through_projection(x, vectors, features, of_projected), None, None


def _through_projection(
    x: Tensor, vectors: Tensor, features: Tensor, of: Callable[[slice, slice], tuple[Tensor, Tensor | None]]
) -> Tensor:
    """The gradient of x, from those of w.x and, where there is one, of |x|^2 / 2 in a block of rows."""
    weight = _for_items(vectors.to(x.dtype), x)
    if torch.is_grad_enabled():  # a graph of the gradient is asked for
        everything = slice(None)
        projected, squares = of(everything, everything)
        of_x = projected @ weight
        return (of_x if squares is None else of_x + x.flatten(0, 1) * squares).view_as(x)
    of_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    for items, rows in _blocks(features):
        projected, squares = of(items, rows)
        here = _rows(of_x, items, rows)
        torch.bmm(projected, weight[items], out=here)
        if squares is not None:
            here.addcmul_(_rows(x, items, rows), squares)
    return of_x


_CACHED = 2**17  # numbers that several passes find in the cache of one core


def _blocks(features: Tensor) -> Iterator[tuple[slice, slice]]:
    """Cuts (B, H, L, r) into runs of heads, or of rows of one head, whose features stay in the cache."""
    count, length, width = features.shape[0] * features.shape[1], features.shape[2], features.shape[3]
    together, step = count, length
    if features.device.type == "cpu":
        room = _CACHED * torch.get_num_threads() // width
        together, step = max(1, room // max(1, length)), max(64, room)
    for item in range(0, count, max(1, together)):
        for row in range(0, length, max(1, step)):
            yield slice(item, min(item + together, count)), slice(row, min(row + step, length))


def _rows(tensor: Tensor, items: slice, rows: slice) -> Tensor:
    """(B, H, L, n) to some rows of some of its B H items, a view where the tensor is contiguous."""
    return tensor.flatten(0, 1)[items, rows]


def _for_items(vectors: Tensor, x: Tensor) -> Tensor:
    """(H or 1, r, D) to (B H, r, D): those of each head of each item."""
    batch, heads = x.shape[:2]
    return vectors.expand(batch, heads, *vectors.shape[1:]).flatten(0, 1)


def signed(projection: Tensor, kind: str) -> Tensor:
    """The vectors of positive features, (H or 1, r, D); for hyperbolic features, those of w and -w."""
    return torch.cat([projection, -projection], 1) if kind == "hyperbolic" else projection


def project(x: Tensor, projection: Tensor) -> Tensor:
    """w.x of every vector: (B, H, L, D) and (H or 1, m, D) to (B, H, L, m)."""
    # One matrix for all heads is one product of all rows; a batch of one would be copied for every head.
    weight = projection[0] if projection.shape[0] == 1 else projection
    return x @ weight.to(x.dtype).transpose(-2, -1)


def half_square(x: Tensor) -> Tensor:
    """|x|^2 / 2, (B, H, L, 1)."""
    return x.square().sum(-1, keepdim=True) / 2


def waves(x: Tensor, projection: Tensor, *, squares: bool = False) -> Tensor:
    """Cosines and sines of w.x, (B, H, L, D) and (H or 1, m, D) to (B, H, L, 2m); gradients do not reach vectors.

    With `squares` gradients are those of these features times exp(|x|^2 / 2 - constant), as `exponentials` has it.
    """
    features: Tensor = _Waves.apply(x, projection, squares)
    return features


def check_kind(kind: object) -> None:
    """ValueError unless it is one of `KINDS`."""
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}; got {kind!r}")

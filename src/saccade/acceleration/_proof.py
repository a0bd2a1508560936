"""Proofs that a fused layer equals its module: the inputs, the tolerance, and when to repeat them."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

_MAGNITUDES = 13  # powers of ten of the sample's rows, from 1e-6 to 1e6
_UNUSUAL = (0.0, 1), (0.0, 3), (math.nan, 3), (math.inf, 3), (-math.inf, 3)  # what stands in a row, at every so many
_MEAN = 256  # calls between two proofs
_RANDOM = random.Random()  # its own: the user's numbers stay as they are


def next_proof() -> int:
    """Random number of calls until the next proof, so that no module can be exact only when it is checked."""
    return _RANDOM.randint(1, 2 * _MEAN - 1)


def samples(inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Inputs of the same shapes, with one batch item, that cover all magnitudes and both signs.

    What a module does only to large, small, negative or changing numbers (a clamp, a threshold) shows in one of them.
    """
    shapes = [(1, *x.shape[1:]) if x.dim() > 2 else tuple(x.shape) for x in inputs]
    rows = math.prod(shapes[0][:-1])
    generator = torch.Generator().manual_seed(0)
    found = []
    for first in range(0, _MAGNITUDES, max(1, rows)):
        powers = (torch.arange(first, first + rows) % _MAGNITUDES - _MAGNITUDES // 2).float()
        scale = (10.0**powers)[:, None]
        drawn = (torch.randn(rows, shape[-1], generator=generator) * scale for shape in shapes)
        found.append(tuple(x.to(like.dtype).view(shape) for x, like, shape in zip(drawn, inputs, shapes, strict=True)))
    return found


def unusual_samples(inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """As `samples`, with zeros, NaN and infinities, which a module may treat specially."""
    drawn = samples(inputs)[0]
    rows, kinds, found = drawn[0].numel() // drawn[0].shape[-1], len(_UNUSUAL), []
    for first in range(0, kinds, max(1, rows)):
        found.append(tuple(x.clone() for x in drawn))
        for x in found[-1]:
            for place, (value, step) in enumerate(_UNUSUAL):
                x.view(rows, -1)[(place - first) % kinds :: kinds, ::step] = value
    return found


def same_where_finite(got: object, expected: object, terms: int) -> bool:
    """As `same`, but NaN equals infinity: the order of additions decides between them."""
    if not (isinstance(got, Tensor) and isinstance(expected, Tensor)):
        return False
    return same(got.where(got.isfinite(), torch.nan), expected.where(expected.isfinite(), torch.nan), terms)


def same(got: Tensor, expected: object, terms: int) -> bool:
    """Whether two results differ only by rounding, if each entry is a sum of `terms` products in any order.

    A sum of n terms is off by n u of them at most, u the unit of float32; in half precision the result is rounded on
    the way. What has another structure differs by as much as the entries of a row (..., E) themselves.
    """
    if not isinstance(expected, Tensor) or got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    unit = 8 * terms * 2.0**-24 + (0 if got.dtype == torch.float32 else 8 * torch.finfo(got.dtype).eps)
    got, expected = got.float(), expected.float()
    largest = expected.abs().nan_to_num(0, 0, 0).amax(-1, keepdim=True)
    close = (got - expected).abs() <= min(unit, 0.1) * largest
    return bool((close | (got == expected) | (got.isnan() & expected.isnan())).all())


def tells(expected: Tensor) -> bool:
    """Whether a result can prove equality: no row is constant."""
    rows = expected.float()
    return bool((rows.amax(-1) != rows.amin(-1)).all())

"""Measures how gradients decrease with distance: the influence of the input at distance d on the last output.

    g(d) = E || v^T d y_L / d x_(L-d) ||,  v ~ N(0, I),  relative to g(1), with initial parameters

Hochreiter et al., "Gradient Flow in Recurrent Nets" (2001), and Vaswani et al. (2017), section 4 and table 1, count the
steps of a signal's path: O(1) for attention, O(L) for a recurrent layer, O(log_k L) for dilated convolutions. For
learning it matters whether a gradient arrives, which is measured here.

The random vector v represents the gradient of the output; one backward pass gives g for all distances. Norms are
averaged over vectors, tokens and parameters (not squared norms, which a few large values of attention's exponential
would dominate). Stacks of several layers are residual, x + f(norm(x)), as in a transformer.

Shape legend: N sequences, L tokens, E width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...support._restored import seeded
from ..attention.timing import first_line
from .contenders import VariantContender
from .data import ProblemSizes
from .layers import AttentionLayer, LayerMaker
from .readings import ExactAttention, MaskedAttention, VariantAttention
from .results import GradientReach

Told = Callable[[str], None]
NUMBERS = 2**20  # entries of the tokens in a draw
MOST = 4  # sequences of a draw
DRAWS = 8  # of parameters and tokens
STACKED = 4


def paths(who: Sequence[VariantContender], sizes: ProblemSizes, seed: int, progress: Told) -> list[GradientReach]:
    """The gradients by distance of each contender as a layer; for sparse patterns also of four layers."""
    paths = []
    for contender in who:
        if not contender.refusal(sizes):
            depths = (1, STACKED) if isinstance(contender, MaskedAttention) else (1,)
            paths += [_path(contender, depth, sizes, seed) for depth in depths]
        progress(contender.name)
    return paths


def _path(contender: VariantContender, depth: int, sizes: ProblemSizes, seed: int) -> GradientReach:
    try:
        draws = [
            gradients([as_layer(contender, sizes, seed + draw * depth + n) for n in range(depth)], sizes, seed + draw)
            for draw in range(DRAWS)
        ]
    except Exception as error:  # an exception of a contender becomes its note
        return GradientReach(contender.name, depth, (), (), first_line(error))
    norms = torch.stack(draws).mean(0)
    if not norms[1] > 0:
        return GradientReach(contender.name, depth, (), (), "nothing arrives from the token before")
    distances = [2**n for n in range(sizes.length.bit_length()) if 2**n < sizes.length]
    return GradientReach(contender.name, depth, tuple(distances), tuple(float(norms[d] / norms[1]) for d in distances))


def gradients(stack: Sequence[nn.Module], sizes: ProblemSizes, seed: int) -> Tensor:
    """(L,): g(d) for d = 0, 1, ..., L - 1, for normal tokens."""
    generator = torch.Generator().manual_seed(seed)
    count = max(1, min(MOST, NUMBERS // (sizes.length * sizes.width)))
    x = torch.randn(count, sizes.length, sizes.width, generator=generator).requires_grad_()
    out: Tensor = x
    for layer in stack:
        out = layer(out) if len(stack) == 1 else out + layer(F.layer_norm(out, (sizes.width,)))
    upstream = torch.randn(count, sizes.width, generator=generator)
    (gradient,) = torch.autograd.grad(out[:, -1], x, upstream)
    return gradient.double().norm(dim=-1).mean(0).flip(0)


def as_layer(contender: VariantContender, sizes: ProblemSizes, seed: int) -> nn.Module:
    """A layer with the contender in place of softmax attention; layers are returned unchanged."""
    if isinstance(contender, LayerMaker):
        return contender.module(sizes, seed)
    with seeded(seed):
        if isinstance(contender, MaskedAttention):
            return AttentionLayer(sizes, None, contender.mask(sizes)).eval()
        if isinstance(contender, VariantAttention):
            return AttentionLayer(sizes, contender.config(sizes.length)).eval()
        assert isinstance(contender, ExactAttention)
        return AttentionLayer(sizes, None).eval()

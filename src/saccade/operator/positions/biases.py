"""Positions as biases on the logits: modules that hold the parameters of `saccade.ALiBi` and `saccade.RelativeBias`.

Shape legend: Hq query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._biases import ALiBi, RelativeBias, paper_slopes
from .._masks._data import whole


class AlibiBias(nn.Module):
    """Attention with linear biases: `slope_h * |position(i) - j|` is subtracted from the logits.

    Slopes are powers of `2 ** (-8 / Hq)`: Press et al., "Train Short, Test Long: Attention with Linear Biases Enables
    Input Length Extrapolation" (2022), section 3. For numbers of heads that are no power of two they follow the
    authors' code.

    Fixed slopes are a buffer that is not saved. They stay in float32 whatever dtype the module is cast to: in bf16 a
    slope may be off by 0.2 %, and a bias of -500 by 1. Learned slopes are an ordinary parameter and start at the
    paper's.

    Args:
        heads: Hq.
        learned: whether slopes are learned.
        slopes: of each head, or the initial ones where they are learned; None: the paper's for so many heads.

    Raises:
        TypeError: heads is not an int.
        ValueError: heads is below 1, or slopes are not one for each.

    Example:
        >>> import torch, saccade
        >>> positions = saccade.positions.AlibiBias(heads=8)
        >>> positions.slopes[:3]
        tensor([0.5000, 0.2500, 0.1250])
        >>> query, key, value = torch.randn(3, 1, 8, 5, 16)
        >>> saccade.attention(query, key, value, bias=positions()).shape
        torch.Size([1, 8, 5, 16])
    """

    slopes: Tensor

    def __init__(self, heads: int, *, learned: bool = False, slopes: Sequence[float] | None = None):
        super().__init__()
        self.heads, self.learned = whole(heads, "heads", least=1), check_flag("learned", learned)
        self.beginnings = tuple(paper_slopes(heads) if slopes is None else slopes)
        if len(self.beginnings) != self.heads:
            raise ValueError(f"slopes: expected one for each of {self.heads} heads, got {len(self.beginnings)}")
        if learned:
            self.slopes = nn.Parameter(torch.tensor(self.beginnings))
        else:
            self.register_buffer("slopes", torch.tensor(self.beginnings), persistent=False)

    def reset_parameters(self) -> None:
        """Set the slopes to their initial values."""
        with torch.no_grad():
            self.slopes.copy_(torch.tensor(self.beginnings))

    def forward(self) -> ALiBi:
        """The bias of one attention call, for `bias=`; gradients reach learned slopes."""
        return ALiBi(self.slopes)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> AlibiBias:
        super()._apply(fn, recurse)
        if not self.learned:
            self.slopes = torch.tensor(self.beginnings).to(self.slopes.device)
        return self

    def extra_repr(self) -> str:
        return f"{self.heads}, learned={self.learned}"


class T5Bias(nn.Module):
    """T5's relative positions: logits plus `table[bucket(j - position(i)), h]`.

    Near distances have a bucket each. Farther ones share buckets that grow logarithmically up to `max_distance`; all
    distances beyond it share the last. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified
    Text-to-Text Transformer" (2020), section 2.1. T5 shares one such module between all layers of a stack, and does not
    divide its logits by sqrt(D): give its weights `scale=1.0`.

    Initialisation: uniform with variance `2 / (buckets + heads)` (Glorot and Bengio 2010), as in T5X: with 32 buckets
    and 8 heads, .05 is added to the variance of the logits. It does not depend on the model's width, which the bias
    does not know.

    Args:
        heads: Hq.
        buckets: rows of the table; even and at least 4, or at least 2 where not bidirectional.
        max_distance: distances from here on share a bucket.
        bidirectional: half of the buckets for keys after the query (encoders); False: later keys share bucket 0.

    Raises:
        TypeError: an argument of another type.
        ValueError: heads below 1, too few buckets, a max_distance that is too small.

    Example:
        >>> import torch, saccade
        >>> positions = saccade.positions.T5Bias(heads=2)
        >>> query, key, value = torch.randn(3, 1, 2, 5, 16)
        >>> saccade.attention(query, key, value, bias=positions(), scale=1.0).shape
        torch.Size([1, 2, 5, 16])
    """

    def __init__(self, heads: int, *, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True):
        super().__init__()
        check_buckets(buckets, max_distance, bidirectional)
        self.heads = whole(heads, "heads", least=1)
        self.max_distance, self.bidirectional = max_distance, bidirectional
        self.table = nn.Parameter(torch.empty(buckets, heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table anew."""
        nn.init.xavier_uniform_(self.table)

    def forward(self) -> RelativeBias:
        """The bias of one attention call, for `bias=`; gradients reach the table."""
        return RelativeBias(self.table, self.bidirectional, self.max_distance)

    def extra_repr(self) -> str:
        return (
            f"{self.heads}, buckets={self.table.shape[0]}, max_distance={self.max_distance}, "
            f"bidirectional={self.bidirectional}"
        )


def check_flag(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: must be True or False, got {value!r}")
    return value


def check_buckets(buckets: int, max_distance: int, bidirectional: bool) -> None:
    """TypeError or ValueError unless `RelativeBias` accepts these arguments."""
    check_flag("bidirectional", bidirectional)
    RelativeBias(torch.zeros(whole(buckets, "buckets", least=0), 1), bidirectional, max_distance)

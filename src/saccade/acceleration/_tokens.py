"""Which tokens of a batch are real, by the mask that a layer is given; and parts that read several tokens.

Shape legend: B batch, L length, T real tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..operator.batching.packing import has_holes, real_row
from ._thread import AttentionOfTokens

MOST = 0.9  # share of real tokens above which nothing is gained
_MIXING = (
    *(
        nn.modules.conv._ConvNd,
        nn.RNNBase,
        nn.modules.batchnorm._NormBase,
        nn.GroupNorm,
        nn.Fold,
        nn.Unfold,
        nn.Upsample,
    ),
    *(
        kind
        for name, kind in vars(nn.modules.pooling).items()
        if name.endswith(tuple("123d")) and isinstance(kind, type)
    ),
)


@dataclass(frozen=True, eq=False)
class TokenRows:
    """The real tokens of one batch.

    Attributes:
        real: bool (B, L).
        places: int64 (T,), b * L + l of each.
        items: how many of the batch have one or more.
        attention: what the calls of attention of a packed row mean.
    """

    real: Tensor
    places: Tensor
    items: int
    attention: AttentionOfTokens

    def take(self, x: Tensor) -> Tensor:
        """(B, L, ...) or (1, L, ...) to (1, T, ...)."""
        whole = x.expand(self.real.shape[0], *x.shape[1:])
        return whole.flatten(0, 1)[self.places][None] if x.shape[0] > 1 else x[:, self.places % self.real.shape[1]]

    def put(self, x: Tensor) -> Tensor:
        """(1, T, ...) to (B, L, ...), 0 at padding."""
        batch, length = self.real.shape
        whole = x.new_zeros(batch * length, *x.shape[2:])
        return whole.index_copy_(0, self.places, x[0]).view(batch, length, *x.shape[2:])


def tokens_of_mask(mask: Tensor, batch: int, length: int) -> TokenRows | None:
    """The real tokens by a mask (B, 1, L or 1, L): True or 0 = attend. None if it hides more than padding or later
    tokens."""
    if tuple(mask.shape) not in ((batch, 1, 1, length), (batch, 1, length, length)):
        return None
    if mask.dtype == torch.bool:
        seen = mask[:, 0]
    elif not mask.is_floating_point():
        return None  # numbers whose meaning the model alone knows
    else:
        seen = mask[:, 0] == 0
        if not bool((seen | (mask[:, 0] <= torch.finfo(mask.dtype).min / 2)).all()):
            return None
    real = seen.any(1)
    if seen.shape[1] == 1:
        return _packed(real, causal=False)
    whole, rows = real[:, None, :], ~real[:, :, None]
    if bool(((seen == whole) | rows).all()):
        return _packed(real, causal=False)
    causal = torch.ones(length, length, dtype=torch.bool).tril_()
    return _packed(real, causal=True) if bool(((seen == (whole & causal)) | rows).all()) else None


def tokens_of_padding(ignored: Tensor) -> TokenRows | None:
    """The real tokens by src_key_padding_mask (B, L): True or -inf = padding."""
    hidden = ignored if ignored.dtype == torch.bool else ignored == -torch.inf
    only = ignored.dtype == torch.bool or bool((hidden | (ignored == 0)).all())
    return _packed(~hidden, causal=False) if only and ignored.dim() == 2 else None


def _packed(real: Tensor, causal: bool) -> TokenRows | None:
    # A hole between real tokens would close, and distances across it shrink. A single token may have a rule of its own.
    if real.shape[1] < 2 or not 1 < int(real.sum()) <= MOST * real.numel() or has_holes(real):
        return None
    places, documents = real_row(real)
    return TokenRows(real, places, int(real.any(1).sum()), AttentionOfTokens(documents, len(places), causal))


def mixes_tokens(layer: nn.Module) -> bool:
    """Whether a part of a layer is of a class that reads several tokens at once, beside its attention."""
    return any(isinstance(part, _MIXING) for part in layer.modules())

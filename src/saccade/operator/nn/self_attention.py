"""Self-attention at its plainest, to read and to look into.

Shape legend: B batch, L length, E model width, D width of queries, keys and values.
"""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor, nn

from .._attention import attention
from .._masks import Mask
from .._unknown_arguments import advised
from .._weights import attention_weights
from ._initial import by_fan_in
from .attention import check_tokens
from .config import check_positive


class SelfAttention(nn.Module):
    """One head and no output projection: (B, L, E) -> (B, L, D). The layer to learn attention with.

        query = x Wq,   key = x Wk,   value = x Wv
        weights_ij = exp(query_i . key_j / sqrt(D)) / sum of the same over all keys that i sees
        out_i = sum_j weights_ij value_j

    Vaswani et al., "Attention Is All You Need" (2017), equation 1. Weights start by fan-in, so logits of tokens of
    variance 1 start with a variance near 1. `MultiHeadAttention` is the layer to build models with.

    Args:
        width: E.
        head_width: D; None is E. There is one head: this is no number of heads, which nn.MultiheadAttention has here.
        bias: whether the projections have one.

    Example:
        >>> import torch, saccade
        >>> layer = saccade.nn.SelfAttention(16, head_width=8)
        >>> out, weights = layer(torch.randn(2, 5, 16), saccade.Causal(), return_weights=True)
        >>> out.shape, weights.shape
        (torch.Size([2, 5, 8]), torch.Size([2, 5, 5]))
        >>> bool((weights.triu(1) == 0).all())
        True
    """

    def __init__(self, width: int, head_width: int | None = None, *, bias: bool = False):
        super().__init__()
        check_positive("width", width)
        head_width = width if head_width is None else head_width
        check_positive("head_width", head_width)
        self.query, self.key, self.value = (nn.Linear(width, head_width, bias=bias) for _ in range(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew, as they were drawn at first."""
        by_fan_in(self)

    @overload
    def forward(
        self, x: Tensor, mask: Mask | Tensor | None = None, *, return_weights: Literal[False] = False
    ) -> Tensor: ...

    @overload
    def forward(
        self, x: Tensor, mask: Mask | Tensor | None = None, *, return_weights: Literal[True]
    ) -> tuple[Tensor, Tensor]: ...

    @advised
    def forward(
        self, x: Tensor, mask: Mask | Tensor | None = None, *, return_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x (B, L, E) to (B, L, D), and with `return_weights` also the weights (B, L, L): a row for each query, a
        column for each key."""
        check_tokens("x", x, self.query.in_features, self.query.weight)
        query, key, value = (layer(x)[:, None] for layer in (self.query, self.key, self.value))  # one head
        out = attention(query, key, value, mask)[:, 0]
        if not return_weights:
            return out
        return out, attention_weights(query, key, mask)[:, 0]

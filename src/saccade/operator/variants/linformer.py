"""Linformer: the length of keys and values is projected down to a fixed rank, and softmax attention reads the rest.

    out = softmax(scale q (E k)^T) (F v),        E, F (rank, length)

Wang, Li, Khabsa, Fang, Ma, "Linformer: Self-Attention with Linear Complexity" (2020), section 4, equation 7. E and F
are learned; they may be shared by the heads of a layer, and by keys and values (their section 4, "parameter sharing").

They begin normal with variance 1 / rank: Johnson-Lindenstrauss projections R, with E[R^T R] = 1. What that promises is
that *inner products along the sequence* are kept: for a row p of weights and a column v of values

    E[(p R^T R v - p v)^2] = (|p|^2 |v|^2 + (p v)^2) / rank,

an error that falls as rank^-1/2 (the paper's theorem 1 is this, with p from softmax). It does not promise that
untrained Linformer is softmax attention: softmax of projected logits is not projected softmax, and with normal E and F
the output stays far from exact attention at every rank until E and F have learned. Random projections of another kind
do approach it: where the rows of E = F pick random keys, the output is self-normalised importance sampling of exact
attention, with error rank^-1/2. And the identity gives exact attention.

Time O(L rank D), memory O(L D + rank D) besides E and F, which are `rank length` numbers each.

Padding is removed before the projection: an item's real tokens are counted from its first, they meet columns 0, 1, ...
of E and F, and no column meets what is padded. So a padded item gives what it gives alone, on whichever side it was
padded. A sequence shorter than `length` uses the first columns.

One projection for all layers, the paper's third way of sharing, is one module in several places:
`for layer in layers[1:]: layer.attention.mechanism = layers[0].attention.mechanism`.

Shape legend: B batch, Hq / Hkv query and key-value heads (query head h reads h // (Hq // Hkv)), Lq / Lk lengths, N the
greatest length, D key width, Dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._attention import attention
from .._call import without_autocast
from .._checks import check_inputs
from .._dropout import Dropout
from .._masks import Mask
from .._masks._data import describe, whole
from .._tiles import ALIGNED
from .._unknown_arguments import advised
from ._causal_padding import causal_padding_of, zero_padding
from ._mechanism import HeadSizes, Mechanism, MechanismConfig, Traits
from ._real_tokens import RealTokens

_NOT_CAUSAL = "each projected key mixes all positions, later ones too"
_NO_MASKS = "each projected key mixes all positions, and no pair of tokens can be hidden in it"
SHARED = ("none", "heads", "key-value")


@advised
def linformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    key_projection: Tensor,
    value_projection: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float | Dropout = 0.0,
) -> Tensor:
    """Linformer: softmax attention to projected keys and values, `softmax(scale q (E k)^T) (F v)`.

    Wang, Li, Khabsa, Fang and Ma, "Linformer: Self-Attention with Linear Complexity" (2020), equation 7.

    Args:
        query: (B, Hq, Lq, D), float32, bfloat16, float16 or float64.
        key: (B, Hkv, Lk, D).
        value: (B, Hkv, Lk, Dv).
        mask: None or `Padding(...)`. Padded keys and values are removed before the projection.
        key_projection: E (Hkv or 1, rank, N), N >= Lk: the first Lk columns are used.
        value_projection: F, of the same rank; None is E.
        scale, softcap, sink, dropout: as in `saccade.attention`, of the `rank` projected keys.

    Returns:
        (B, Hq, Lq, Dv) in the input dtype. Padded queries, and items without a key, give 0.

    Raises:
        TypeError: not tensors, dtypes that do not fit.
        ValueError: shapes or devices that do not fit, a rank above N, more keys than N, a mask other than padding.

    Example:
        >>> import torch, saccade
        >>> x = torch.rand(1, 2, 6, 4)
        >>> saccade.variants.linformer_attention(x, x, x, key_projection=torch.rand(1, 3, 6)).shape
        torch.Size([1, 2, 6, 4])
        >>> out = saccade.variants.linformer_attention(x, x, x, key_projection=torch.eye(6)[None])
        >>> torch.allclose(out, saccade.attention(x, x, x), atol=1e-6)  # the identity is exact
        True
    """
    query, key, value = check_inputs(query, key, value)
    projections = key_projection, key_projection if value_projection is None else value_projection
    _check_projections(*projections, key)
    batch, length_q, length_k = query.shape[0], query.shape[2], key.shape[2]
    seen = causal_padding_of(mask, batch, length_q, length_k, query.device, "Linformer", _NO_MASKS, causal=_NOT_CAUSAL)
    if seen.keys is not None:
        real = RealTokens.of(seen.keys)
        key, value = real.gather(key), real.gather(value)
    with without_autocast(query.device):
        key, value = (_projected(m, x) for m, x in zip(projections, (key, value), strict=True))
    out = attention(
        zero_padding(query, seen.rows), key, value, scale=scale, softcap=softcap, sink=sink, dropout=dropout
    )
    return zero_padding(out, seen.rows)


def _projected(matrix: Tensor, tokens: Tensor) -> Tensor:
    """(H|1, rank, N) and (B, H, L, n) to (B, H, rank, n) in the tokens' dtype, summed in float32 at least.

    Item by item, and a multiple of 16 rows: see `_tiles.matmul`.
    """
    heads, length, width = tokens.shape[1:]
    wide = torch.promote_types(tokens.dtype, torch.float32)
    rank = matrix.shape[1]
    left = matrix[..., :length].to(wide)
    if rank % ALIGNED:
        left = F.pad(left, (0, 0, 0, -rank % ALIGNED))
    items = []
    for item in tokens.to(wide):
        if matrix.shape[0] == 1:  # heads side by side are one product, and what is shared is never expanded
            columns = item.transpose(0, 1).reshape(length, heads * width)
            items.append((left[0] @ columns)[:rank].unflatten(1, (heads, width)).transpose(0, 1))
        else:
            items.append((left @ item)[:, :rank])
    return torch.stack(items).to(tokens.dtype) if items else tokens.new_zeros(0, heads, rank, width)


def _check_projections(key_projection: Tensor, value_projection: Tensor, key: Tensor) -> None:
    for name, matrix in (("key_projection", key_projection), ("value_projection", value_projection)):
        if not isinstance(matrix, Tensor) or not matrix.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor (Hkv or 1, rank, N), got {describe(matrix)}")
        if matrix.dim() != 3 or matrix.shape[0] not in (1, key.shape[1]) or matrix.shape[1] == 0:
            raise ValueError(
                f"{name} must be (Hkv or 1, rank, N) with Hkv = {key.shape[1]} and a rank of at least 1, got shape "
                f"{tuple(matrix.shape)}"
            )
        if matrix.device != key.device:
            raise ValueError(f"{name} is on {matrix.device}, expected query's device {key.device}")
        if matrix.dtype == torch.float64 and key.dtype != torch.float64:
            raise TypeError(f"{name} is {matrix.dtype}, expected query's dtype {key.dtype} or torch.float32")
        _check_rank(matrix.shape[1], matrix.shape[2], name)
        if key.shape[2] > matrix.shape[2]:
            raise ValueError(
                f"key has length (axis 2) {key.shape[2]}, but {name} was made for at most {matrix.shape[2]} (its last "
                "axis): Linformer has a greatest length"
            )
    if key_projection.shape[1] != value_projection.shape[1]:
        raise ValueError(
            f"value_projection has rank (axis 1) {value_projection.shape[1]}, expected key_projection's "
            f"{key_projection.shape[1]}"
        )


def _check_rank(rank: int, length: int, name: str) -> None:
    if rank > length:
        raise ValueError(f"{name}: rank {rank} is above the length {length}: that would be more keys than there were")


@dataclass(frozen=True)
class LinformerConfig(MechanismConfig):
    """`linformer_attention` with learned projections, as the mechanism of `saccade.nn`.

    Args:
        length: N, the greatest number of keys.
        rank: the number of projected keys, at most `length`.
        shared: "none", E and F for each key-value head; "heads", one E and one F; "key-value", one matrix for both.

    Raises:
        TypeError, ValueError: numbers outside of these ranges, an unknown `shared`.

    Example:
        >>> import torch, saccade
        >>> mechanism = saccade.variants.LinformerConfig(length=16, rank=4)
        >>> config = saccade.nn.AttentionConfig(width=8, heads=2, mechanism=mechanism)
        >>> saccade.nn.MultiHeadAttention(config)(torch.ones(1, 12, 8)).shape
        torch.Size([1, 12, 8])
    """

    length: int
    rank: int
    shared: str = "none"

    name: ClassVar[str] = "linformer"
    traits: ClassVar[Traits] = Traits(
        paper='Wang et al., "Linformer: Self-Attention with Linear Complexity" (2020)',
        computes="approximation",
        time="O(L rank d)",
        memory="O(L d + rank d)",
        choose="An encoder reads one known, long length, and its projections can be trained.",
        avoid="The model is causal, its length is open, or it is to stand in for softmax without training.",
        causal=_NOT_CAUSAL,
        masks=_NO_MASKS,
        cached=_NOT_CAUSAL,
        recurrent=_NOT_CAUSAL,
        takes=("scale", "softcap", "sink", "dropout"),
    )

    def __post_init__(self) -> None:
        whole(self.length, "length", least=1)
        whole(self.rank, "rank", least=1)
        _check_rank(self.rank, self.length, "rank")
        if self.shared not in SHARED:
            raise ValueError(f"shared: expected one of {', '.join(map(repr, SHARED))}; got {self.shared!r}")

    @classmethod
    def usual(cls, length: int) -> LinformerConfig:
        """A quarter of the length, at most 256: about the paper's 128 at 512 and 256 at 1024."""
        return cls(length, min(256, max(1, length // 4)))

    def build(self, heads: HeadSizes) -> LinformerAttention:
        return LinformerAttention(self, heads)


class LinformerAttention(Mechanism):
    """`linformer_attention` with learned E and F. `LinformerConfig.build` makes it.

    Its parameters are `key_projection` and `value_projection`, which is None if E and F are one matrix.
    """

    def __init__(self, config: LinformerConfig, heads: HeadSizes):
        super().__init__()
        self.config = config
        shape = heads.kv_heads if config.shared == "none" else 1, config.rank, config.length
        self.key_projection = nn.Parameter(torch.empty(shape))
        self.value_projection = None if config.shared == "key-value" else nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw E and F anew: normal with variance 1 / rank (the paper's proof of theorem 1)."""
        for matrix in self.parameters():
            nn.init.normal_(matrix, std=self.config.rank**-0.5)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None = None, **options: Any) -> Tensor:
        """As `linformer_attention`, which takes the options `scale`, `softcap`, `sink` and `dropout`."""
        both: dict[str, Any] = dict(key_projection=self.key_projection, value_projection=self.value_projection)
        return linformer_attention(query, key, value, mask, **both, **options)

    def extra_repr(self) -> str:
        return f"length={self.config.length}, rank={self.config.rank}, shared={self.config.shared!r}"

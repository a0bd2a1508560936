"""Nystromformer: softmax attention from landmarks, by the Nystrom method.

    out = softmax(scale q k~^T) Z softmax(scale q~ k^T) v + convolution(v),      Z ~ A^+,  A = softmax(scale q~ k~^T)

Xiong, Zeng, Chakraborty, Tan, Fung, Li, Singh, "Nystromformer: A Nystrom-Based Algorithm for Approximating
Self-Attention" (2021), section 3. q~ and k~ are landmarks, the means of m segments of the queries and of the keys. The
pseudo-inverse comes from the third-order iteration of Razavi et al. (2014), as the paper has it,

    Z_0 = A^T / (|A|_1 |A|_inf),      Z <- 1/4 Z (13 - A Z (15 - A Z (7 - A Z))).

|A|_1 is the greatest column sum *of that matrix*, for each item and head by itself; |A|_inf, the greatest row sum, is
1. (Code that takes the greatest over the batch makes a sample's result depend on its batch mates.) The eigenvalues x of
A Z go to 1, by 1 - x <- (1 - x)^3 (4 - x) / 4; small ones grow by 13/4 in each step, so directions in which A is nearly
singular stay out for a while. That is a virtue: what landmarks say there is noise, which a true inverse blows up, and
rounding with it. Six to ten steps are as near to exact attention as it gets, on random tokens and on smooth ones.

Segments are of an item's real tokens, padding counts nowhere: their sizes differ by at most one, so any length works.
An item with fewer tokens than m has as many landmarks as tokens; then A is the whole matrix and the result, with an
exact inverse, exact attention.

Queries and keys may come from two sequences, both known whole: each has landmarks of its own, and A need not be square.
A decoder's queries are not known whole: their landmarks, too, are means over later tokens.

The first and the last factor are the operator: attention(q, k~, Z attention(q~, k, v)). Not even L x m is formed.

Time O(L m D + m^3), memory O(L D + m^2).

Shape legend: B batch, Hq / Hkv query and key-value heads (query head h reads h // (Hq // Hkv)), Lq / Lk lengths, m
landmarks, D key width, Dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._attention import attention
from .._call import without_autocast
from .._checks import check_inputs
from .._masks import Mask, Padding
from .._masks._data import describe, whole
from .._tiles import matmul, products, spread
from .._unknown_arguments import advised
from ._causal_padding import CausalPadding, causal_padding_of, zero_padding
from ._mechanism import HeadSizes, Mechanism, MechanismConfig, Traits
from ._real_tokens import RealTokens

_NOT_CAUSAL = "its landmarks are means over the whole sequence, later tokens too"
_NO_DECODER = (
    "its landmarks are means of the queries too: a token that asks would hear of those after it, and decoding token by "
    "token would give something else"
)
_BLOCK = 64  # rows of the convolution at once
_NO_MASKS = "a pair is never formed, only pairs with landmarks, which stand for many tokens"


@advised
def nystrom_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    landmarks: int = 64,
    iterations: int | None = 6,
    convolution: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Nystromformer: softmax attention through landmarks, the means of segments of queries and keys.

    `softmax(q k~^T) pinv(softmax(q~ k~^T)) softmax(q~ k^T) v`, all logits times `scale`, plus a convolution of v.
    Xiong et al., "Nystromformer: A Nystrom-Based Algorithm for Approximating Self-Attention" (2021), section 3.

    Args:
        query: (B, Hq, Lq, D), float32, bfloat16, float16 or float64; computed in float32 at least.
        key: (B, Hkv, Lk, D).
        value: (B, Hkv, Lk, Dv).
        mask: None or `Padding(keys, queries)`. Landmarks are means of real tokens. Rows count as real queries unless
            `queries` says otherwise: in self-attention give both sides.
        landmarks: m; an item with fewer tokens has one for each token.
        iterations: of the pseudo-inverse; None is `torch.linalg.pinv`, by a singular value decomposition.
        convolution: (Hq, 1, odd width) of a depthwise convolution over the values, added to the output; for
            self-attention. Past the ends of an item's real tokens there is 0.
        scale: factor of the dot products; None is D ** -0.5.

    Returns:
        (B, Hq, Lq, Dv) in the input dtype. Padded queries, and items without a key, give 0.

    Raises:
        TypeError: not tensors, dtypes that do not fit.
        ValueError: shapes or devices that do not fit, no landmarks, a convolution of even width or between sequences of
            two lengths, a mask other than padding.

    Example:
        >>> import torch, saccade
        >>> x = torch.eye(4)[None, None] * 4
        >>> saccade.variants.nystrom_attention(x, x, x, landmarks=2).shape
        torch.Size([1, 1, 4, 4])
        >>> out = saccade.variants.nystrom_attention(x, x, x, landmarks=4, iterations=None)
        >>> torch.allclose(out, saccade.attention(x, x, x), atol=1e-5)  # a landmark for each token is exact
        True
    """
    query, key, value = check_inputs(query, key, value)
    whole(landmarks, "landmarks", least=1)
    if iterations is not None:
        whole(iterations, "iterations", least=0)
    if convolution is not None:
        _check_convolution(convolution, query, key)
    batch, length_q, length_k = query.shape[0], query.shape[2], key.shape[2]
    seen = causal_padding_of(
        mask, batch, length_q, length_k, query.device, "Nystrom attention", _NO_MASKS, causal=_NOT_CAUSAL
    )
    wide = torch.promote_types(query.dtype, torch.float32)
    with without_autocast(query.device):
        given = zero_padding(query.to(wide), seen.rows), key.to(wide), value.to(wide)
        out = _attended(given, seen, landmarks, iterations, scale)
        if convolution is not None and length_k:
            out = out + _convolved(given[2], convolution.to(wide), seen.keys)
    return zero_padding(out, seen.rows).to(query.dtype)


def _attended(
    given: tuple[Tensor, Tensor, Tensor],
    hidden: CausalPadding,
    landmarks: int,
    iterations: int | None,
    scale: float | None,
) -> Tensor:
    """The three factors times the values, from the right."""
    query, key, value = given
    of_query, of_key = _landmarks(query, hidden.rows, landmarks), _landmarks(key, hidden.keys, landmarks)
    padding = None if hidden.keys is None else Padding(hidden.keys)
    read = attention(of_query.means, key, value, padding, scale=scale)
    factor = query.shape[3] ** -0.5 if scale is None else scale
    read = matmul(_inverse_of_middle(of_query, of_key, factor, iterations), read)
    real = None if of_key.real is None else Padding(of_key.real)
    return attention(query, spread(of_key.means, query.shape[1]), read, real, scale=scale)


class Landmarks(NamedTuple):
    means: Tensor  # (B, H, m, D)
    real: Tensor | None  # bool (B|1, m), False for those that an item has no tokens for; None: all are real


def _landmarks(tokens: Tensor, kept: Tensor | None, most: int) -> Landmarks:
    """Means of segments of each item's real tokens, as many as there are tokens and at most `most`."""
    length = tokens.shape[2]
    count = min(most, length)
    if kept is None and (count == 0 or length % count == 0):
        return Landmarks(tokens.unflatten(2, (count, length // max(count, 1))).mean(3), None)
    real = None if kept is None else RealTokens.of(kept)
    number = torch.full((1, 1), length, device=tokens.device) if real is None else real.number[:, None]
    edges = _edges(number, count)
    starts, sizes = edges[:, :-1], edges.diff(dim=1)
    step = torch.arange(-(-length // max(count, 1)), device=tokens.device)
    places = (starts[..., None] + step).clamp(max=max(length - 1, 0))
    inside = step < sizes[..., None]
    rows = _rows(tokens if real is None else real.gather(tokens), places.flatten(1)).unflatten(2, places.shape[1:])
    sums = rows.masked_fill(~inside[:, None, ..., None], 0.0).sum(3)
    return Landmarks(sums / sizes.clamp(min=1)[:, None, :, None], None if real is None else sizes > 0)


def _edges(number: Tensor, count: int) -> Tensor:
    """Start of each of `count` segments and the end of the last, (B|1, count + 1). If the `number` (B|1, 1) of tokens
    is smaller than `count`, the segments after the first `number` are empty.

    Of n tokens in m segments, token t is in segment floor(t m / n): sizes differ by at most one.
    """
    segments = number.clamp(min=1, max=max(count, 1))
    edge = torch.arange(count + 1, device=number.device)
    return (-(-edge * number // segments)).minimum(number)


def _rows(tokens: Tensor, places: Tensor) -> Tensor:
    """(B, H, L, n) at places (B|1, k) to (B, H, k, n)."""
    if places.shape[0] == 1:
        return tokens.index_select(2, places[0])
    return tokens.gather(2, places[:, None, :, None].expand(-1, tokens.shape[1], -1, tokens.shape[3]))


def _inverse_of_middle(query: Landmarks, key: Landmarks, scale: float, iterations: int | None) -> Tensor:
    """Z (B, Hq, m of keys, m of queries), 0 for landmarks that are not real."""
    logits = products(query.means * scale, key.means)
    if key.real is not None:
        logits = logits.masked_fill(~key.real[:, None, None], torch.finfo(logits.dtype).min)
    weights = torch.softmax(logits, -1)
    if key.real is not None:
        weights = weights.masked_fill(~key.real[:, None, None], 0.0)
    weights = zero_padding(weights, query.real)
    if weights.numel() == 0:
        return weights.mT
    return torch.linalg.pinv(weights) if iterations is None else pseudo_inverse(weights, iterations)


def pseudo_inverse(matrix: Tensor, iterations: int) -> Tensor:
    """The Moore-Penrose inverse of each matrix (B, H, n, k) of non-negative rows with sum 1 or 0, by iteration."""
    greatest = matrix.sum(-2).amax(-1)[..., None, None]
    inverse = matrix.mT / torch.where(greatest == 0, 1.0, greatest)
    one = torch.eye(matrix.shape[-2], dtype=matrix.dtype, device=matrix.device)
    for _ in range(iterations):
        near = matmul(matrix, inverse)
        inverse = 0.25 * matmul(inverse, 13 * one - matmul(near, 15 * one - matmul(near, 7 * one - near)))
    return inverse


def _convolved(value: Tensor, weight: Tensor, kept: Tensor | None) -> Tensor:
    """Depthwise over the real tokens of each item, (B, Hkv, L, Dv) by (Hq, 1, k) to (B, Hq, L, Dv)."""
    real = None if kept is None else RealTokens.of(kept)
    rows = value if real is None else real.gather(value)
    items = [_slid(item, weight[:, 0]) for item in rows]
    out = torch.stack(items) if items else spread(rows, weight.shape[0])
    return out if real is None else real.scatter(out)


def _slid(item: Tensor, weight: Tensor) -> Tensor:
    """One item, (Hkv, L, Dv) by (Hq, k) to (Hq, L, Dv): a banded matrix times each block of rows.

    F.conv2d, with no more channels than heads, takes twice as long on a CPU.
    """
    (heads, width), (kv_heads, length, columns) = weight.shape, item.shape
    if item.numel() == 0:
        return item.new_zeros(heads, length, columns)
    block = max(_BLOCK, width - 1)
    blocks, reach = -(-length // block), block + width - 1
    # Each row of the band is the weights one place further right: rows of one entry more, read in rows of `reach`.
    lines = F.pad(weight, (0, block))[:, None].expand(-1, block, -1).flatten(1)
    band = lines[:, : block * reach].reshape(kv_heads, -1, reach)
    before = width // 2
    cells = F.pad(item, (0, 0, before, (blocks + 1) * block - length - before)).unflatten(1, (-1, block))
    windows = torch.cat((cells[:, :-1], cells[:, 1:, : width - 1]), 2).transpose(1, 2).flatten(2)
    out = matmul(band[None], windows[None])[0].unflatten(1, (-1, block)).unflatten(3, (blocks, columns))
    return out.transpose(2, 3).flatten(2, 3).flatten(0, 1)[:, :length]


def _check_convolution(weight: Tensor, query: Tensor, key: Tensor) -> None:
    heads = query.shape[1]
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise TypeError(f"convolution must be a floating-point tensor (Hq, 1, width), got {describe(weight)}")
    if weight.dim() != 3 or weight.shape[:2] != (heads, 1) or weight.shape[2] % 2 == 0:
        raise ValueError(
            f"convolution must be (Hq, 1, width) with Hq = {heads} and an odd width, got shape {tuple(weight.shape)}"
        )
    if weight.device != query.device:
        raise ValueError(f"convolution is on {weight.device}, expected query's device {query.device}")
    if weight.dtype == torch.float64 and query.dtype != torch.float64:
        raise TypeError(f"convolution is {weight.dtype}, expected query's dtype {query.dtype} or torch.float32")
    if key.shape[2] not in (0, query.shape[2]):
        raise ValueError(
            f"convolution: it adds the values at the positions of the queries, so there must be as many keys as "
            f"queries, got {query.shape[2]} queries and {key.shape[2]} keys"
        )


@dataclass(frozen=True)
class NystromConfig(MechanismConfig):
    """`nystrom_attention` as the mechanism of `saccade.nn`.

    Args:
        landmarks: m.
        iterations: of the pseudo-inverse; None is a singular value decomposition. More than the default, or None,
            amplify noise, and diverge for logits of hundreds.
        convolution: odd width of the depthwise convolution over values, the paper's skip connection (33 is usual), for
            self-attention. It begins at 0: an untrained model has only the approximation. None: no convolution.

    Raises:
        TypeError, ValueError: numbers outside of these ranges.

    Example:
        >>> import torch, saccade
        >>> mechanism = saccade.variants.NystromConfig(landmarks=4)
        >>> config = saccade.nn.AttentionConfig(width=8, heads=2, mechanism=mechanism)
        >>> saccade.nn.MultiHeadAttention(config)(torch.ones(1, 12, 8)).shape
        torch.Size([1, 12, 8])
    """

    landmarks: int = 64
    iterations: int | None = 6
    convolution: int | None = 33

    name: ClassVar[str] = "nystrom"
    traits: ClassVar[Traits] = Traits(
        paper='Xiong et al., "Nystromformer: A Nystrom-Based Algorithm for Approximating Self-Attention" (2021)',
        computes="approximation",
        time="O(L m d + m^3), m landmarks",
        memory="O(L d + m^2)",
        choose="A long encoder attends smoothly, so that means of segments stand for their tokens.",
        avoid="The model is causal, or single tokens must be found: averaging hides single tokens.",
        causal=_NOT_CAUSAL,
        cross=_NO_DECODER,
        masks=_NO_MASKS,
        cached=_NOT_CAUSAL,
        recurrent=_NOT_CAUSAL,
        takes=("scale",),
    )

    def __post_init__(self) -> None:
        whole(self.landmarks, "landmarks", least=1)
        if self.iterations is not None:
            whole(self.iterations, "iterations", least=0)
        if self.convolution is not None and whole(self.convolution, "convolution", least=1) % 2 == 0:
            raise ValueError(f"convolution: must be odd, so that it has a middle, got {self.convolution}")

    def build(self, heads: HeadSizes) -> NystromAttention:
        return NystromAttention(self, heads)


class NystromAttention(Mechanism):
    """`nystrom_attention` as a module, with `convolution` (Hq, 1, width) if the configuration has one."""

    def __init__(self, config: NystromConfig, heads: HeadSizes):
        super().__init__()
        self.config = config
        width = config.convolution
        self.convolution = None if width is None else nn.Parameter(torch.empty(heads.heads, 1, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The convolution begins at 0."""
        if self.convolution is not None:
            nn.init.zeros_(self.convolution)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None = None, **options: Any) -> Tensor:
        """As `nystrom_attention`, which takes the option `scale`."""
        given = {**vars(self.config), "convolution": self.convolution, **options}
        return nystrom_attention(query, key, value, mask, **given)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self.config).items())

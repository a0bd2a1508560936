"""Differential attention: two softmax maps, the second taken away from the first, so that noise in both cancels.

    out_h = (1 - l0) RMSNorm((softmax(q1 k1^T s) - l softmax(q2 k2^T s)) v),   s = d^-0.5
    l     = exp(lq1 . lk1) - exp(lq2 . lk2) + l0,   l0 = 0.8 - 0.6 exp(-0.3 depth)

Ye, Dong, Xia, Sun, Zhu, Huang and Wei, "Differential Transformer", 2024: equations 1 to 3. The four vectors lq1, lk1,
lq2 and lk2 are one set for all heads of a layer; the norm is of each head by itself, with weights that all heads share.
The depth counts layers from 0, as the authors' code does; their text counts from 1 and writes l - 1: the same numbers.

A head has two queries and two keys of width d, which lie side by side (heads 2h and 2h + 1), and one value of width
2 d. So h heads of these have the parameters of 2 h heads of softmax attention. Of fewer key-value heads each map reads
its own: map m of head h reads map m of g = h // (H // Hkv). (Of the authors' implementations that is the one on
FlashAttention, which they recommend; their naive one pairs maps otherwise where heads are grouped.)

Time O(L^2 d), twice that of softmax attention of h heads of width d and as much as that of 2 h of them, memory O(L d).

A single map is no probability: it is the difference of two.

Shape legend: B batch, H heads, Hkv key-value heads, Lq / Lk lengths, d width of a query or key, Dv value width (2 d).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._attention import attention
from .._biases import Bias
from .._call import without_autocast
from .._checks import check_inputs
from .._dropout import Dropout, another
from .._masks import Mask
from .._unknown_arguments import advised
from ._causal_padding import real_rows, zero_padding
from ._mechanism import HeadSizes, Mechanism, MechanismConfig, Traits

EPS = 1e-5  # of the norm, in the authors' code


@advised
def differential_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    vectors: Sequence[Tensor],
    weight: Tensor,
    initial: float,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float | Dropout = 0.0,
) -> Tensor:
    """Differential attention: the first softmax map of each head minus a part of the second, then normalised.

    `out_h = (1 - l0) RMSNorm((softmax(q1 k1^T s) - l softmax(q2 k2^T s)) v)` with s = d^-0.5 and
    `l = exp(lq1 . lk1) - exp(lq2 . lk2) + l0`: Ye, Dong, Xia, Sun, Zhu, Huang and Wei, "Differential Transformer"
    (2024), equations 1 to 3. The rows of the difference are not distributions.

    Args:
        query: (B, 2 H, Lq, d), the two maps of head h at 2 h and 2 h + 1.
        key: (B, 2 Hkv, Lk, d), in the same order.
        value: (B, Hkv, Lk, Dv), which both maps read.
        mask: of both maps, with the H heads of the output; as in `saccade.attention`.
        vectors: lq1, lk1, lq2, lk2, each (d,).
        weight: (Dv,), of the norm.
        initial: l0, below 1; `initial_lambda(depth)`.
        bias, scale, softcap, dropout: as in `saccade.attention`, for both maps; each map drops its own weights.

    Returns:
        (B, H, Lq, Dv), in the dtype of the inputs. Rows that see nothing are 0.

    Raises:
        TypeError, ValueError: inputs that do not belong together.

    Example:
        >>> import torch, saccade
        >>> query, key, value = torch.rand(1, 4, 5, 8), torch.rand(1, 4, 5, 8), torch.rand(1, 2, 5, 16)
        >>> vectors, weight = [torch.zeros(8)] * 4, torch.ones(16)
        >>> initial = saccade.variants.initial_lambda(0)
        >>> out = saccade.variants.differential_attention(
        ...     query, key, value, saccade.Causal(), vectors=vectors, weight=weight, initial=initial
        ... )
        >>> out.shape
        torch.Size([1, 2, 5, 16])
    """
    first, second = _maps(query, key, value)
    _check_vectors(vectors, weight, query.shape[3], value.shape[3])
    given: dict[str, Any] = dict(bias=bias, scale=scale, softcap=softcap)
    one = attention(*first, value, mask, dropout=dropout, **given)
    other = attention(*second, value, mask, dropout=another(dropout), **given)
    rows = real_rows(mask, one.shape[2], key.shape[2], one.device)
    with without_autocast(one.device):
        wide = torch.promote_types(one.dtype, torch.float32)
        lq1, lk1, lq2, lk2 = (vector.to(wide) for vector in vectors)
        taken = (lq1 @ lk1).exp() - (lq2 @ lk2).exp() + initial
        difference = _tamed(one.to(wide) - taken * other.to(wide))
        # Padded rows are set to 0 once more: what comes back to them must not reach the norm's weight.
        out = zero_padding(F.rms_norm(difference, weight.shape, weight.to(wide), EPS), rows)
        return (out * (1 - initial)).to(one.dtype)


def _tamed(rows: Tensor) -> Tensor:
    """Rows to be normalised, scaled down to at most 1e15: the square of 1e20 overflows float32, and the row would
    become 0. Normalisation removes the factor, and `EPS` is negligible for such rows."""
    if 0 in rows.shape:
        return rows
    return rows / rows.detach().abs().amax(-1, keepdim=True).div(1e15).clamp(min=1.0)


def initial_lambda(depth: int) -> float:
    """l0 = 0.8 - 0.6 exp(-0.3 depth) of `differential_attention`, for the layer `depth`, counted from 0.

    Example:
        >>> import saccade
        >>> [round(saccade.variants.initial_lambda(depth), 2) for depth in (0, 5, 30)]
        [0.2, 0.67, 0.8]
    """
    return 0.8 - 0.6 * math.exp(-0.3 * depth)


class DifferentialAttention(Mechanism):
    """`differential_attention` with learned vectors and norm. `DifferentialConfig.build` makes it.

    The vectors start normal with standard deviation 0.1, the weights of the norm at 1.

    Args:
        config: the depth of the layer.
        heads: the sizes of the layer: two query and key heads for each head of values.

    Raises:
        ValueError: an odd number of query or key heads.
    """

    calls_are_maps = True

    def __init__(self, config: DifferentialConfig, heads: HeadSizes):
        super().__init__()
        if heads.heads % 2 or heads.kv_heads % 2:
            raise ValueError(
                f"heads: differential attention takes pairs of query heads and pairs of key heads, got {heads.heads} "
                f"and {heads.kv_heads}"
            )
        self.initial = initial_lambda(config.depth)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.empty(heads.head)) for _ in range(4)
        )
        self.weight = nn.Parameter(torch.empty(heads.value_head))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the vectors anew; the norm's weights become 1."""
        for vector in self.vectors:
            nn.init.normal_(vector, std=0.1)
        nn.init.ones_(self.weight)

    @property
    def vectors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """lq1, lk1, lq2, lk2, each (d,)."""
        return self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None = None, **options: Any) -> Tensor:
        """(B, 2 H, Lq, d), (B, 2 Hkv, Lk, d), (B, Hkv, Lk, Dv) to (B, H, Lq, Dv), as `differential_attention`."""
        return differential_attention(
            query, key, value, mask, vectors=self.vectors, weight=self.weight, initial=self.initial, **options
        )

    def extra_repr(self) -> str:
        return f"initial={self.initial:.3g}"


@dataclass(frozen=True)
class DifferentialConfig(MechanismConfig):
    """`differential_attention` as the mechanism of `saccade.nn`.

    Args:
        depth: the number of the layer, from 0. Stacks set it, layer by layer.

    Raises:
        TypeError, ValueError: not an int, or negative.

    Example:
        >>> import torch, saccade
        >>> config = saccade.nn.AttentionConfig(width=8, heads=2, mechanism=saccade.variants.DifferentialConfig())
        >>> saccade.nn.MultiHeadAttention(config)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    depth: int = 0

    name: ClassVar[str] = "differential"
    maps: ClassVar[int] = 2
    traits: ClassVar[Traits] = Traits(
        paper="Ye, Dong, Xia, Sun, Zhu, Huang and Wei, Differential Transformer, 2024",
        computes="other",
        time="O(L^2 d)",
        memory="O(L d)",
        choose="A model is trained anew and has to find little in much: retrieval, many examples in context.",
        avoid="Weights were trained with softmax attention, or speed at length is wanted: it computes every pair.",
        masks=True,
        recurrent="it is made of softmax attention, whose past does not fit into a state",
        takes=("bias", "scale", "softcap", "dropout"),
    )

    def __post_init__(self) -> None:
        if isinstance(self.depth, bool) or not isinstance(self.depth, int):
            raise TypeError(f"depth: expected an int, got {self.depth!r}")
        if self.depth < 0:
            raise ValueError(f"depth: counts layers from 0, got {self.depth}")

    def build(self, heads: HeadSizes) -> DifferentialAttention:
        return DifferentialAttention(self, heads)

    def at_depth(self, layer: int) -> DifferentialConfig:
        return DifferentialConfig(layer)


def _maps(query: Tensor, key: Tensor, value: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(query, key) of the first maps and of the second, each (B, H, Lq, d) and (B, Hkv, Lk, d)."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if isinstance(tensor, Tensor) and tensor.dim() == 4 and name != "value" and tensor.shape[1] % 2:
            raise ValueError(f"{name} has {tensor.shape[1]} heads (axis 1), expected pairs: two maps for each head")
    if not all(isinstance(tensor, Tensor) and tensor.dim() == 4 for tensor in (query, key, value)):
        check_inputs(query, key, value)
    if key.shape[1] != 2 * value.shape[1]:
        raise ValueError(
            f"value has {value.shape[1]} heads (axis 1), expected half of key's {key.shape[1]}: two maps read each"
        )
    return (query[:, ::2], key[:, ::2]), (query[:, 1::2], key[:, 1::2])


def _check_vectors(vectors: Sequence[Tensor], weight: Tensor, width: int, value_width: int) -> None:
    if len(vectors) != 4 or any(vector.shape != (width,) for vector in vectors):
        raise ValueError(
            f"vectors: expected lq1, lk1, lq2, lk2, each ({width},), got {[tuple(vector.shape) for vector in vectors]}"
        )
    if weight.shape != (value_width,):
        raise ValueError(f"weight: expected ({value_width},), one for each column of value, got {tuple(weight.shape)}")

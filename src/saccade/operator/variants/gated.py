"""Gated attention: softmax attention whose output is multiplied by a gate that reads the layer's input.

    out_h = softmax(q k^T s) v * sigmoid(x Wg),   then Wo;   s = D^-0.5

Qiu, Wang, Zheng, Huang, Wen, Yang, Men, Yu, Huang, Huang, Liu, Zhou and Lin, "Gated Attention for Large Language
Models: Non-linearity, Sparsity, and Attention-Sink-Free", 2025: equation 5 in the position G1, after attention and
before Wo. x is what queries are projected from, after the norm in pre-norm blocks. The gate is elementwise, one number
for each column of each head, or headwise, one for each head.

Time O(L^2 D + L E H Dv), memory O(L D); headwise the gate costs O(L E H).

`AttentionConfig(gate=True)` is the elementwise one too, around any mechanism.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D key width, Dv value width, E model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .._attention import attention
from .._masks import Mask
from ._causal_padding import real_rows, tokens_of_gate, zero_padding
from ._mechanism import HeadSizes, Mechanism, MechanismConfig, Traits


def gated_attention(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, mask: Mask | Tensor | None = None, **options: Any
) -> Tensor:
    """Softmax attention whose output is multiplied by sigmoid(gate).

    Qiu et al., "Gated Attention for Large Language Models: Non-linearity, Sparsity, and Attention-Sink-Free" (2025),
    equation 5 in the position G1: after attention, before the output projection.

    Args:
        query: (B, Hq, Lq, D).
        key: (B, Hkv, Lk, D).
        value: (B, Hkv, Lk, Dv).
        gate: before the sigmoid: (B, Hq, Lq, Dv), or (B, Hq, Lq, 1) for one number a head.
        mask: as in `saccade.attention`.
        **options: bias, scale, softcap, sink, dropout, backend: as in `saccade.attention`.

    Returns:
        (B, Hq, Lq, Dv), in the dtype that `saccade.attention` returns.

    Raises:
        TypeError, ValueError: as in `saccade.attention`; a gate of another shape.

    Example:
        >>> import torch, saccade
        >>> x, gate = torch.rand(1, 2, 5, 4), torch.zeros(1, 2, 5, 1)
        >>> out = saccade.variants.gated_attention(x, x, x, gate)
        >>> torch.allclose(out, saccade.attention(x, x, x) / 2)  # sigmoid(0) is 1/2
        True
    """
    out = attention(query, key, value, mask, **options)
    if not isinstance(gate, Tensor):
        raise TypeError(f"gate: expected a tensor, got {type(gate).__name__}")
    if gate.shape[:-1] != out.shape[:-1] or gate.shape[-1] not in (1, out.shape[-1]):
        raise ValueError(
            f"gate: expected shape {tuple(out.shape)}, or 1 as its last size, for one number a head; got "
            f"{tuple(gate.shape)}"
        )
    rows = real_rows(mask, out.shape[2], key.shape[2], out.device)
    # In padded rows 0 * NaN would be NaN, of the gate there and of what comes back to it.
    return zero_padding(out * zero_padding(gate, rows).sigmoid().to(out.dtype), rows)


class GatedAttention(Mechanism):
    """`gated_attention` with a learned gate, which reads the layer's tokens.

    The gate's projection starts by fan-in: the gate of each token is near 1/2. `GatedConfig.build` makes the module.

    Args:
        config: elementwise or headwise.
        heads: the sizes of the layer.
    """

    calls_are_maps = True

    def __init__(self, config: GatedConfig, heads: HeadSizes):
        super().__init__()
        self.heads = heads.heads
        self.gate = nn.Linear(heads.width, heads.heads * (1 if config.headwise else heads.value_head), bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the projection anew."""
        nn.init.normal_(self.gate.weight, std=self.gate.in_features**-0.5)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | None = None,
        *,
        tokens: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """As `gated_attention`; `tokens` (B, Lq, E) are the tokens whose projections the queries are."""
        rows = real_rows(mask, query.shape[2], key.shape[2], query.device)
        tokens = tokens_of_gate(tokens, rows, "gated attention")
        gate = self.gate(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return gated_attention(query, key, value, gate, mask, **options)


@dataclass(frozen=True)
class GatedConfig(MechanismConfig):
    """`gated_attention` as the mechanism of `saccade.nn`.

    Args:
        headwise: one gate for each head; otherwise one for each column of each head, which the paper's section 3
            finds best.

    Raises:
        TypeError: not a bool.

    Example:
        >>> import torch, saccade
        >>> mechanism = saccade.variants.GatedConfig(headwise=True)
        >>> config = saccade.nn.AttentionConfig(width=8, heads=2, mechanism=mechanism)
        >>> saccade.nn.MultiHeadAttention(config)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    headwise: bool = False

    name: ClassVar[str] = "gated"
    reads_tokens: ClassVar[bool] = True
    traits: ClassVar[Traits] = Traits(
        paper="Qiu, Wang, Zheng, Huang, Wen, Yang, Men, Yu, Huang, Huang, Liu, Zhou and Lin, Gated Attention for Large "
        "Language Models: Non-linearity, Sparsity, and Attention-Sink-Free, 2025",
        computes="other",
        time="O(L^2 d)",
        memory="O(L d)",
        choose="A model is trained anew, and is to be stable and without tokens that only serve as sinks.",
        avoid="Weights were trained without a gate, or speed at length is wanted: every pair is computed.",
        masks=True,
        recurrent="it is made of softmax attention, whose past does not fit into a state",
        takes=("bias", "scale", "softcap", "sink", "dropout"),
    )

    def __post_init__(self) -> None:
        if not isinstance(self.headwise, bool):
            raise TypeError(f"headwise: expected True or False, got {self.headwise!r}")

    def build(self, heads: HeadSizes) -> GatedAttention:
        return GatedAttention(self, heads)

"""Models whose attention is written in every way, and how the oracle comes into its place.

Shape legend: B batch, L length, H heads, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saccade.nn.attention
import saccade.nn.self_attention
from rewritten_attention import Oracle
from saccade.nn import (
    AttentionConfig,
    BlockConfig,
    Decoder,
    MultiHeadAttention,
    Transformer,
)
from saccade.positions import AlibiConfig, RotaryConfig, T5Config

B, L, H, D = 2, 7, 4, 5
E = H * D
CONTEXT = 11
LENGTHS = torch.tensor([5, 7])
REAL = torch.arange(L) < LENGTHS[:, None]


class Projected(nn.Module):
    """q, k, v (B, H, L, D) of x, put together by a function of them."""

    def __init__(self, function: Callable[..., Tensor], kv_heads: int = H) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(E, heads * D) for heads in (H, kv_heads, kv_heads))
        self.function, self.kv_heads, self.num_heads = function, kv_heads, H

    def forward(self, x: Tensor) -> Tensor:
        heads = H, self.kv_heads, self.kv_heads
        parts = (
            layer(x).unflatten(-1, (n, D)).transpose(1, 2)
            for layer, n in zip((self.query, self.key, self.value), heads, strict=True)
        )
        return self.function(*parts).transpose(1, 2).flatten(2)


def causal() -> Tensor:
    return torch.ones(L, L, dtype=torch.bool).tril()


BIAS = torch.randn(H, L, L, dtype=torch.float64, generator=torch.Generator().manual_seed(11))


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(D) + BIAS.to(q.dtype)
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


def rows_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads after positions, as in many implementations."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * 0.3
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~causal(), -math.inf).softmax(-1), v).transpose(1, 2)


def bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = [tensor.flatten(0, 1) for tensor in (q, k, v)]
    weights = F.softmax(torch.bmm(flat[0], flat[1].transpose(1, 2)) * 0.3, dim=-1)
    return torch.bmm(weights, flat[2]).unflatten(0, q.shape[:2])


def soft_capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = 2 * torch.tanh(q @ k.mT * 0.3 / 2)
    return scores.masked_fill(~causal(), -1e30).softmax(-1) @ v


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    scores *= 0.3
    scores += BIAS.to(q.dtype)
    return torch.matmul(scores.softmax(dim=-1), v)


def written_into(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    scores[:, :, ~causal()] = -math.inf
    return scores.softmax(-1) @ v


def grouped_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.unflatten(1, (2, 2)) @ k.unsqueeze(2).mT * 0.3
    return (scores.softmax(-1) @ v.unsqueeze(2)).flatten(1, 2)


def repeated_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (tensor.repeat_interleave(2, 1) for tensor in (k, v))
    return (q * 0.3 @ k.mT).softmax(-1) @ v


class TimmLike(nn.Module):
    """timm's Attention: one projection, (3, B, H, L, D), and either way of computing it."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.qkv, self.proj, self.num_heads, self.fused = nn.Linear(E, 3 * E), nn.Linear(E, E), H, fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0)
        else:
            q = q * D**-0.5
            out = (q @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        return self.proj(out.transpose(1, 2).reshape(x.shape))


class MultiHead(nn.Module):
    def __init__(self, need_weights: bool, batch_first: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, H, batch_first=batch_first)
        self.need_weights, self.batch_first = need_weights, batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        out: Tensor = self.attention(x, x, x, key_padding_mask=~REAL, need_weights=self.need_weights)[0]
        return out if self.batch_first else out.transpose(0, 1)


class Across(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(AttentionConfig(E, H, context_width=E))
        self.other = nn.Parameter(torch.randn(B, CONTEXT, E))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, context=self.other)


class EncoderAndDecoder(nn.Module):
    """A Transformer whose encoder reads a parameter."""

    def __init__(self) -> None:
        super().__init__()
        block = BlockConfig(AttentionConfig(E, H))
        self.model, self.source = Transformer(block, 1), nn.Parameter(torch.randn(B, CONTEXT, E))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(self.source, x)


class PaddedEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = saccade.nn.Encoder(BlockConfig(AttentionConfig(E, H)), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x, padding=saccade.Padding(REAL))


class EditedModel(NamedTuple):
    """A model and the place where the oracle stands for its attention."""

    make: Callable[[], nn.Module]
    place: str  # "operator", "sdpa", "hand" or "hand of ..."
    group: int = 1
    keys: int = L
    padded: bool = False
    call: int = 0  # the one that is edited
    in_place: bool = False  # scores are written into: queries and keys cannot be changed
    attend: Callable[[Oracle], Callable[..., Tensor]] | None = None  # of "hand": the same call, of the oracle


def plain(oracle: Oracle, see: Tensor | None = None, bias: Tensor | None = None, scale: float | None = None) -> Any:
    return lambda q, k, v: oracle.attend(q, k, v, see, bias, scale)


MODELS: dict[str, EditedModel] = {
    "MultiHeadAttention": EditedModel(lambda: MultiHeadAttention(AttentionConfig(E, H, softcap=3.0)), "operator"),
    "relative positions": EditedModel(
        lambda: MultiHeadAttention(AttentionConfig(E, H, positions=T5Config(), scale=1.0)), "operator"
    ),
    "ALiBi": EditedModel(lambda: MultiHeadAttention(AttentionConfig(E, H, positions=AlibiConfig())), "operator"),
    "a sink": EditedModel(lambda: MultiHeadAttention(AttentionConfig(E, H, sink=True)), "operator"),
    "Decoder": EditedModel(
        lambda: Decoder(BlockConfig(AttentionConfig(E, H, kv_heads=2, head_width=6, positions=RotaryConfig())), 2),
        "operator",
        group=2,
        call=1,
    ),
    "Encoder, padded": EditedModel(PaddedEncoder, "operator", padded=True, call=1),
    "cross-attention": EditedModel(Across, "operator", keys=CONTEXT),
    "Transformer": EditedModel(EncoderAndDecoder, "operator", keys=CONTEXT, call=2),
    "F.sdpa": EditedModel(lambda: Projected(lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True)), "sdpa"),
    "F.sdpa grouped": EditedModel(
        lambda: Projected(lambda *qkv: F.scaled_dot_product_attention(*qkv, enable_gqa=True, scale=0.3), 2),
        "sdpa",
        group=2,
    ),
    "F.sdpa with a bias": EditedModel(
        lambda: Projected(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, BIAS.to(q.dtype))), "sdpa"
    ),
    "F.sdpa of 5 axes": EditedModel(
        lambda: Projected(lambda *qkv: F.scaled_dot_product_attention(*(x[:, None] for x in qkv))[:, 0]), "sdpa"
    ),
    "nn.MultiheadAttention": EditedModel(lambda: MultiHead(False), "sdpa", padded=True),
    "nn.MultiheadAttention with weights": EditedModel(lambda: MultiHead(True), "sdpa", padded=True),
    "nn.MultiheadAttention, rows first": EditedModel(lambda: MultiHead(True, False), "sdpa", padded=True),
    "timm, fused": EditedModel(lambda: TimmLike(True), "sdpa"),
    "timm by hand": EditedModel(lambda: TimmLike(False), "timm"),
    "einsum": EditedModel(lambda: Projected(einsum), "hand", attend=lambda o: plain(o, bias=BIAS)),
    "einsum, rows first": EditedModel(
        lambda: Projected(rows_first), "hand", attend=lambda o: plain(o, causal(), scale=0.3)
    ),
    "bmm": EditedModel(lambda: Projected(bmm), "hand", attend=lambda o: plain(o, scale=0.3)),
    "soft cap by hand": EditedModel(
        lambda: Projected(soft_capped),
        "hand",
        attend=lambda o: lambda q, k, v: o.attend(q, k, v, causal(), scale=0.3, softcap=2.0),
    ),
    "in place": EditedModel(lambda: Projected(in_place), "hand", attend=lambda o: plain(o, bias=BIAS, scale=0.3)),
    "written into": EditedModel(
        lambda: Projected(written_into), "hand", in_place=True, attend=lambda o: plain(o, causal(), scale=0.3)
    ),
    "grouped by hand": EditedModel(
        lambda: Projected(grouped_by_hand, 2), "hand", group=2, attend=lambda o: plain(o, scale=0.3)
    ),
    "repeated by hand": EditedModel(
        lambda: Projected(repeated_by_hand, 2), "hand", attend=lambda o: plain(o, scale=0.3)
    ),
}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(E, H, 13, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=~REAL)


MODELS["nn.TransformerEncoder"] = EditedModel(Encoder, "sdpa", padded=True, call=1)


def by_oracle(patch: pytest.MonkeyPatch, oracle: Oracle, kind: EditedModel, model: nn.Module) -> None:
    """The oracle in the place of the model's attention."""
    if kind.place == "operator":
        for module in (saccade.nn.attention, saccade.nn.self_attention):
            patch.setattr(module, "attention", oracle.operator)
    elif kind.place == "hand":
        assert kind.attend is not None
        patch.setattr(model, "function", kind.attend(oracle))
    else:
        patch.setattr(F, "scaled_dot_product_attention", oracle.sdpa)
        if isinstance(model, MultiHead):
            patch.setattr(model, "need_weights", False)
        if kind.place == "timm":
            patch.setattr(model, "fused", True)

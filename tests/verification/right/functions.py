"""Correct attention as functions, as they are written in courses, papers and kernels' references."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def textbook(q, k, v, mask=None):
    """softmax(Q K^T / sqrt(d_k)) V of (batch, heads, length, width); mask is True where a key may be seen."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def annotated(query, key, value, mask=None, dropout=None):
    "Compute 'Scaled Dot Product Attention'; mask == 0 is hidden"
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn


def einsum_bhld(q, k, v):
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


def length_before_heads(q, k, v, causal=False):
    """(batch, length, heads, width), as flash attention has it."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + k.shape[1] - q.shape[1])
        scores = scores.masked_fill(later, float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, dim=-1), v)


def causal_function(q, k, v):
    L, S = q.size(-2), k.size(-2)
    bias = torch.zeros(L, S, dtype=q.dtype, device=q.device)
    bias.masked_fill_(torch.ones(L, S, dtype=torch.bool, device=q.device).tril(S - L).logical_not(), float("-inf"))
    weight = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.size(-1))) + bias
    return torch.softmax(weight, dim=-1) @ v


def additive(q, k, v, attn_mask=None):
    """attn_mask is added to the scores: 0 where a key may be seen, -inf where not."""
    scores = torch.matmul(q * q.size(-1) ** -0.5, k.transpose(-1, -2))
    if attn_mask is not None:
        scores = scores + attn_mask
    return F.softmax(scores, dim=-1) @ v


def in_blocks(q, k, v, block=4):
    """The online softmax of Milakov and Gimelshein 2018 over blocks of keys, as flash attention has it.

    Sums are kept in float32 at least: each block rounds them once more.
    """
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(wide) * q.shape[-1] ** -0.5, k.to(wide), v.to(wide)
    top = q.new_full((*q.shape[:-1], 1), float("-inf"))
    total = torch.zeros_like(top)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    for start in range(0, k.shape[-2], block):
        scores = q @ k[..., start : start + block, :].mT
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        shrunk, weights = torch.exp(top - new), torch.exp(scores - new)
        total = total * shrunk + weights.sum(-1, keepdim=True)
        out = out * shrunk + weights @ v[..., start : start + block, :]
        top = new
    return (out / total).to(dtype)


class Recomputed(torch.autograd.Function):
    """Backward by hand, with the weights formed anew (FlashAttention, appendix B)."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = textbook(q, k, v)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out = ctx.saved_tensors
        scale = q.size(-1) ** -0.5
        p = torch.softmax(q @ k.mT * scale, dim=-1)
        dp = grad @ v.mT
        ds = p * (dp - (grad * out).sum(-1, keepdim=True)) * scale
        return ds @ k, ds.mT @ q, p.mT @ grad


def by_hand(q, k, v):
    return Recomputed.apply(q, k, v)


def grouped(q, k, v):
    """Fewer key-value heads than query heads: query head h reads kv head h // groups."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q, k, v)


def no_batch(q, k, v):
    """One sequence, one head: (length, width)."""
    attention = F.softmax(q @ k.T / math.sqrt(k.shape[1]), dim=1)
    return attention @ v


def three_axes(query, key, value, key_padding_mask=None):
    """(batch, length, width); key_padding_mask (batch, length) is True at padding."""
    scores = torch.bmm(query, key.transpose(1, 2)) / math.sqrt(query.size(2))
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None, :], float("-inf"))
    return torch.bmm(scores.softmax(2), value)


def cosine(q, k, v):
    """Cosine similarity at a temperature of 10 (as in Swin v2, ViT-22B's cousins): scale 10 of normalised q and k."""
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return (10 * q @ k.mT).softmax(-1) @ v


def stable_by_hand(q, k, v):
    s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    e = (s - s.max(dim=-1, keepdim=True).values).exp()
    return e / e.sum(dim=-1, keepdim=True) @ v

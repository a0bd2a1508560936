"""Correct attention as modules, in the styles that people learn from and publish."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn


class SingleHead(nn.Module):
    """A course's first one: one head, three projections, no output projection."""

    def __init__(self, embed_dim=23, head_dim=23):
        super().__init__()
        self.query = nn.Linear(embed_dim, head_dim, bias=False)
        self.key = nn.Linear(embed_dim, head_dim, bias=False)
        self.value = nn.Linear(embed_dim, head_dim, bias=False)

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        weights = F.softmax(q @ k.transpose(-2, -1) / k.shape[-1] ** 0.5, dim=-1)
        return weights @ v


class Head(nn.Module):
    """A causal head with a buffer, as in the video course's bigram model."""

    def __init__(self, head_size=16, n_embd=16, block_size=64, dropout=0.1):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        _, T, _ = x.shape
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = F.softmax(wei, dim=-1)
        wei = self.dropout(wei)
        return wei @ self.value(x)


class HeadsInAList(nn.Module):
    def __init__(self, num_heads=4, n_embd=24, block_size=64):
        super().__init__()
        self.heads = nn.ModuleList([Head(n_embd // num_heads, n_embd, block_size, 0.0) for _ in range(num_heads)])
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        return self.proj(torch.cat([h(x) for h in self.heads], dim=-1))


def clones(module, n):
    return nn.ModuleList([copy.deepcopy(module) for _ in range(n)])


class AnnotatedMultiHead(nn.Module):
    """The Annotated Transformer's; mask 0 is hidden."""

    def __init__(self, h=4, d_model=28, dropout=0.1):
        super().__init__()
        assert d_model % h == 0
        self.d_k = d_model // h
        self.h = h
        self.linears = clones(nn.Linear(d_model, d_model), 4)
        for one in self.linears:
            nn.init.xavier_uniform_(one.weight)
        self.attn = None
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        nbatches = query.size(0)
        query, key, value = [
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value), strict=False)
        ]
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
        p_attn = self.dropout(scores.softmax(dim=-1))
        x = torch.matmul(p_attn, value)
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        return self.linears[-1](x)


class NanoGPT(nn.Module):
    """nanoGPT's CausalSelfAttention: fused projections, F.sdpa or a buffer."""

    def __init__(self, n_embd=24, n_head=3, block_size=64, dropout=0.0, flash=True):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=True)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=True)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head, self.n_embd, self.dropout, self.flash = n_head, n_embd, dropout, flash
        if not flash:
            causal = torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size)
            self.register_buffer("bias", causal)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            dropout = self.dropout if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            att = F.softmax(att, dim=-1)
            att = self.attn_dropout(att)
            y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class BertStyle(nn.Module):
    """BERT's: transpose_for_scores, an additive mask (batch, 1, 1, length), post-norm residual."""

    def __init__(self, hidden_size=30, num_attention_heads=5, dropout=0.1):
        super().__init__()
        self.heads, self.size = num_attention_heads, hidden_size // num_attention_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.LayerNorm = nn.LayerNorm(hidden_size)

    def transpose_for_scores(self, x):
        return x.view(*x.size()[:-1], self.heads, self.size).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask=None):
        """attention_mask is additive, (batch, 1, 1, length)."""
        q = self.transpose_for_scores(self.query(hidden_states))
        k = self.transpose_for_scores(self.key(hidden_states))
        v = self.transpose_for_scores(self.value(hidden_states))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.size)
        if attention_mask is not None:
            scores = scores + attention_mask
        probs = self.dropout(F.softmax(scores, dim=-1))
        context = torch.matmul(probs, v).permute(0, 2, 1, 3).contiguous()
        context = context.view(*context.size()[:-2], -1)
        return self.LayerNorm(self.dropout(self.dense(context)) + hidden_states)


class ViTStyle(nn.Module):
    """timm's: one qkv projection, reshape and permute."""

    def __init__(self, dim=32, num_heads=4, qkv_bias=True, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = self.attn_drop(attn.softmax(dim=-1))
        return self.proj_drop(self.proj((attn @ v).transpose(1, 2).reshape(B, N, C)))


class CrossAttention(nn.Module):
    """Stable Diffusion's: to_q, to_k, to_v, a context of another width."""

    def __init__(self, query_dim=24, context_dim=17, heads=4, dim_head=7):
        super().__init__()
        inner = heads * dim_head
        self.heads, self.scale = heads, dim_head**-0.5
        self.to_q = nn.Linear(query_dim, inner, bias=False)
        self.to_k = nn.Linear(context_dim, inner, bias=False)
        self.to_v = nn.Linear(context_dim, inner, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, query_dim), nn.Dropout(0.1))

    def split(self, t):
        b, n, _ = t.shape
        return t.reshape(b, n, self.heads, -1).transpose(1, 2)

    def forward(self, x, context):
        q, k, v = (self.split(t) for t in (self.to_q(x), self.to_k(context), self.to_v(context)))
        attn = (torch.einsum("bhid,bhjd->bhij", q, k) * self.scale).softmax(dim=-1)
        out = torch.einsum("bhij,bhjd->bhid", attn, v)
        return self.to_out(out.transpose(1, 2).flatten(2))


class TalkingHeads(nn.Module):
    """Shazeer et al. 2020: heads are mixed before and after the softmax."""

    def __init__(self, dim=24, heads=4):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.before = nn.Parameter(torch.eye(heads) + 0.1 * torch.randn(heads, heads))
        self.after = nn.Parameter(torch.eye(heads) + 0.1 * torch.randn(heads, heads))
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        logits = torch.einsum("bhij,hg->bgij", q @ k.mT * self.scale, self.before)
        weights = torch.einsum("bhij,hg->bgij", logits.softmax(-1), self.after)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, d))


class Gated(nn.Module):
    """A sigmoid gate on the output of each head (Qiu et al. 2025)."""

    def __init__(self, dim=24, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.gate, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        return self.out(out * torch.sigmoid(self.gate(x)))


class MultiQuery(nn.Module):
    """Shazeer 2019: one head of keys and values, shared by all query heads; causal."""

    def __init__(self, dim=24, heads=4):
        super().__init__()
        self.heads, self.width = heads, dim // heads
        self.q, self.kv, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * self.width), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q = self.q(x).view(b, n, self.heads, self.width).transpose(1, 2)
        k, v = self.kv(x).split(self.width, dim=-1)
        scores = torch.einsum("bhid,bjd->bhij", q, k) / math.sqrt(self.width)
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
        return self.out(torch.einsum("bhij,bjd->bihd", scores.softmax(-1), v).reshape(b, n, d))


class SequenceFirst(nn.Module):
    """(length, batch, width), as fairseq has it; heads folded into the batch."""

    def __init__(self, embed_dim=20, num_heads=4):
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        """x: (length, batch, embed_dim)"""
        tgt_len, bsz, _ = x.shape
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        q = q * self.head_dim**-0.5
        q, k, v = (t.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1) for t in (q, k, v))
        weights = F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1)
        out = torch.bmm(weights, v).transpose(0, 1).contiguous().view(tgt_len, bsz, self.embed_dim)
        return self.out_proj(out)


class CosineModule(nn.Module):
    """Swin v2's: cosine similarity at a learned, clamped temperature for each head."""

    def __init__(self, dim=24, heads=4):
        super().__init__()
        self.heads = heads
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(heads, 1, 1)))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        attn = attn * torch.clamp(self.logit_scale, max=math.log(100.0)).exp()
        return self.out((attn.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))


class PreNormBlock(nn.Module):
    """A whole block: norm, attention, residual, norm, feed-forward, residual; causal."""

    def __init__(self, dim=24, heads=3):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = NanoGPT(dim, heads, 64, 0.1, flash=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(0.1))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class DecoderBlock(nn.Module):
    """The original Transformer's decoder layer: causal self-attention, cross-attention, feed-forward, post-norm."""

    def __init__(self, dim=28, heads=4):
        super().__init__()
        self.self_attn, self.src_attn = AnnotatedMultiHead(heads, dim), AnnotatedMultiHead(heads, dim)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.norms = clones(nn.LayerNorm(dim), 3)

    def forward(self, x, memory):
        mask = torch.ones(1, x.shape[1], x.shape[1], device=x.device).tril()
        x = self.norms[0](x + self.self_attn(x, x, x, mask))
        x = self.norms[1](x + self.src_attn(x, memory, memory))
        return self.norms[2](x + self.feed_forward(x))


class ReturnsWeights(nn.Module):
    """Output and weights of each head; the mask is True where a key may be seen, (batch, length, length)."""

    def __init__(self, embed_dim=24, num_heads=4):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.qkv_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.o_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, mask=None):
        """mask: boolean (batch, length, length), True = may be seen."""
        batch, length, width = x.size()
        qkv = self.qkv_proj(x).reshape(batch, length, self.num_heads, 3 * self.head_dim).permute(0, 2, 1, 3)
        q, k, v = qkv.chunk(3, dim=-1)
        logits = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        if mask is not None:
            logits = logits.masked_fill(~mask.unsqueeze(1), torch.finfo(logits.dtype).min)
        attention = F.softmax(logits, dim=-1)
        values = (attention @ v).permute(0, 2, 1, 3).reshape(batch, length, width)
        return self.o_proj(values), attention

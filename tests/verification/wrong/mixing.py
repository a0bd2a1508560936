"""Heads, samples and projections that are mistaken for each other."""

from __future__ import annotations

from saccade.verification import Promise

from .fault import (
    ALIBI,
    ANNOTATED,
    BERT,
    EINSUM,
    ENCODER_BLOCK,
    FAIRSEQ,
    GPT2,
    GQA_FUNCTION,
    LLAMA,
    LUCIDRAINS,
    NANOGPT,
    SDPA_MODULE,
    TEXTBOOK,
    TIMM,
    Fault,
)  # fmt: skip

AS_PUBLISHED = Promise(kv_order="repeat_interleave")
MIXING = ("mixing",)

FAULTS = (
    Fault(
        "heads merged without transposing", MIXING, TIMM,
        "x = x.transpose(1, 2).reshape(B, N, C)", "x = x.reshape(B, N, C)",
        "heads are merged in the order of memory: positions and heads are scrambled",
    ),
    Fault(
        "heads split without transposing", MIXING, ENCODER_BLOCK,
        "return x.view(batch_size, seq_len, self.n_heads, self.d_head).transpose(1, 2)",
        "return x.view(batch_size, self.n_heads, seq_len, self.d_head)",
        "each head gets a run of positions in place of a slice of the width",
    ),
    Fault(
        "heads merged the wrong way round", MIXING, BERT,
        "context_layer.permute(0, 2, 1, 3).contiguous()",
        "context_layer.permute(0, 2, 1, 3).transpose(2, 3).contiguous()",
        "heads and channels are interleaved in the wrong order",
    ),
    Fault(
        "values split differently", MIXING, NANOGPT,
        "v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)",
        "v = v.view(B, T, C // self.n_head, self.n_head).permute(0, 3, 1, 2)",
        "the values' channels are dealt out to the heads in another order than they are merged",
    ),
    Fault(
        "kv heads tiled", MIXING, GQA_FUNCTION,
        "x = x[:, :, None, :, :].expand(batch, kv_heads, n_rep, length, dim)",
        "x = x[:, None, :, :, :].expand(batch, n_rep, kv_heads, length, dim)",
        "query head h reads kv head h % kv_heads where h // n_rep is meant", promise=AS_PUBLISHED,
    ),
    Fault(
        "kv heads tiled in a module", MIXING, LLAMA,
        "return x[:, :, :, None, :].expand(bs, slen, n_kv_heads, n_rep, head_dim).reshape(bs, slen, -1, head_dim)",
        "return x[:, :, None, :, :].expand(bs, slen, n_rep, n_kv_heads, head_dim).reshape(bs, slen, -1, head_dim)",
        "query head h reads kv head h % n_kv_heads where h // n_rep is meant", promise=AS_PUBLISHED,
    ),
    Fault(
        "only keys are tiled", MIXING, GQA_FUNCTION,
        "k = repeat_kv(k, n_rep)", "k = k.repeat(1, n_rep, 1, 1)",
        "keys are repeated in another order than values",
    ),
    Fault(
        "one projection for query and key", MIXING, ALIBI,
        "        self.k = nn.Linear(embed_dim, embed_dim, bias=False)\n",
        "        self.k = self.q\n",
        "query and key share one projection",
    ),
    Fault(
        "keys from the query's projection", ("mixing", "gradients"), ENCODER_BLOCK,
        "K = self.split_heads(self.W_k(x))", "K = self.split_heads(self.W_q(x))",
        "the key projection is never used",
    ),
    Fault(
        "one layer four times", MIXING, ANNOTATED,
        "return nn.ModuleList([copy.deepcopy(module) for _ in range(N)])", "return nn.ModuleList([module] * N)",
        "all four projections are one",
    ),
    Fault(
        "values are the keys", ("mixing", "gradients"), SDPA_MODULE,
        "v = v.view(batch, length, self.num_heads, -1).transpose(1, 2)", "v = k",
        "the keys are used as values",
    ),
    Fault(
        "no output projection", ("mixing", "gradients"), NANOGPT,
        "y = self.resid_dropout(self.c_proj(y))", "y = self.resid_dropout(y)",
        "the output projection is made and never applied",
    ),
    Fault(
        "samples share a softmax row", MIXING, FAIRSEQ,
        "q = q.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)",
        "q = q.contiguous().transpose(0, 1).reshape(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)",
        "queries of all samples are shuffled by a reshape in the wrong order",
    ),
    Fault(
        "centred over the batch", MIXING, LUCIDRAINS,
        "x = self.norm(x)", "x = self.norm(x - x.mean(dim=0, keepdim=True))",
        "subtracts the mean of the batch",
    ),
    Fault(
        "the first sample's keys", MIXING, EINSUM,
        'torch.einsum("bqhd,bkhd->bhqk", q, k)', 'torch.einsum("bqhd,khd->bhqk", q, k[0])',
        "every sample looks at the first one's keys",
    ),
    Fault(
        "one head reads another's values", MIXING, TEXTBOOK,
        "values = torch.matmul(attention, v)",
        "values = torch.matmul(attention, torch.cat([v[:, :-1], v[:, :1]], dim=1))",
        "the last head weighs the first head's values",
    ),
    Fault(
        "merged with transposed axes", MIXING, GPT2,
        "return x.transpose(1, 2).reshape(b, t, h * d)", "return x.permute(0, 2, 3, 1).reshape(b, t, h * d)",
        "heads and channels are interleaved in the wrong order",
    ),
)  # fmt: skip

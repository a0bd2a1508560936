"""Logits that are not q.k / sqrt(head width)."""

from __future__ import annotations

from .fault import (
    ANNOTATED,
    BERT,
    BLOCKWISE,
    DIFFUSERS,
    EINSUM,
    FAIRSEQ,
    FALCON,
    FROM_SCRATCH,
    KARPATHY_HEAD,
    LLAMA,
    NANOGPT,
    SDPA_MODULE,
    TEXTBOOK,
    TIMM,
    Fault,
)  # fmt: skip

SCALE = ("scale",)

FAULTS = (
    Fault(
        "no scale", SCALE, TEXTBOOK,
        "scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(d_k)",
        "scores = torch.matmul(q, k.transpose(-2, -1))",
        "does not divide by the square root of the head width",
    ),
    Fault(
        "no scale in a fused module", SCALE, TIMM,
        "        q = q * self.scale\n", "",
        "forgot to scale the queries", line="",
    ),
    Fault(
        "model width", SCALE, NANOGPT,
        "(1.0 / math.sqrt(k.size(-1)))", "(1.0 / math.sqrt(C))",
        "divides by the square root of the model width",
    ),
    Fault(
        "model width in the textbook module", SCALE, BERT,
        "math.sqrt(self.attention_head_size)", "math.sqrt(self.all_head_size)",
        "divides by the square root of the width of all heads together",
    ),
    Fault(
        "Karpathy's C", SCALE, KARPATHY_HEAD,
        "k.shape[-1] ** -0.5", "C**-0.5",
        "scales by the embedding width, as the lecture's first version did",
    ),
    Fault(
        "value width", SCALE, TEXTBOOK,
        "d_k = q.size(-1)", "d_k = v.size(-1)",
        "takes d_k from the values", line="math.sqrt(d_k)",
    ),
    Fault(
        "twice", SCALE, FAIRSEQ,
        "attn_weights = torch.bmm(q, k.transpose(1, 2))",
        "attn_weights = torch.bmm(q, k.transpose(1, 2)) * self.scaling",
        "scales the queries and the scores",
    ),
    Fault(
        "twice, by F.scaled_dot_product_attention", SCALE, SDPA_MODULE,
        "y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)",
        "y = F.scaled_dot_product_attention(q * q.size(-1) ** -0.5, k, v, dropout_p=p, is_causal=True)",
        "scales queries that F.scaled_dot_product_attention scales again",
    ),
    Fault(
        "multiplied", SCALE, ANNOTATED,
        "torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)",
        "torch.matmul(query, key.transpose(-2, -1)) * math.sqrt(d_k)",
        "multiplies by the square root of the head width",
    ),
    Fault(
        "off by sqrt(2)", SCALE, EINSUM,
        "* q.shape[-1] ** -0.5", "* (q.shape[-1] // 2) ** -0.5",
        "divides by the square root of half the head width",
    ),
    Fault(
        "off by sqrt(2) in GQA with rotary positions", SCALE, LLAMA,
        "/ math.sqrt(self.head_dim)", "/ math.sqrt(2 * self.head_dim)",
        "divides by the square root of twice the head width",
    ),
    Fault(
        "no square root", SCALE, DIFFUSERS,
        "self.scale = dim_head**-0.5", "self.scale = 1.0 / dim_head",
        "divides by the head width without its square root", line="self.scale",
    ),
    Fault(
        "number of heads", SCALE, FALCON,
        "/ self.head_dim**0.5", "/ self.num_heads**0.5",
        "divides by the square root of the number of heads",
    ),
    Fault(
        "length", SCALE, FROM_SCRATCH,
        "/ d**0.5", "/ n**0.5",
        "divides by the square root of the sequence's length",
    ),
    Fault(
        "the paper's constant", SCALE, BLOCKWISE,
        "scale = D**-0.5", "scale = 64**-0.5",
        "always divides by 8, whatever the head width is", line="scale",
    ),
)  # fmt: skip

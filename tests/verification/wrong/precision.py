"""Right in float32 at small numbers, and wrong in half precision or at large ones."""

from __future__ import annotations

from .fault import (
    ANNOTATED,
    BERT,
    BLOCKWISE,
    EINSUM,
    FROM_SCRATCH,
    GQA_FUNCTION,
    LUCIDRAINS,
    TEXTBOOK,
    Fault,
)

PRECISION = ("precision",)

FAULTS = (
    Fault(
        "-1e20",
        PRECISION,
        EINSUM,
        'mask[:, None] == 0, float("-inf")',
        "mask[:, None] == 0, -1e20",
        "-1e20 does not fit into half precision",
    ),
    Fault(
        "-1e9",
        PRECISION,
        ANNOTATED,
        "torch.finfo(scores.dtype).min",
        "-1e9",
        "-1e9 does not fit into half precision",
    ),
    Fault(
        "float32's smallest number",
        PRECISION,
        LUCIDRAINS,
        "max_neg_value = -torch.finfo(sim.dtype).max",
        "max_neg_value = -torch.finfo(torch.float32).max",
        "float32's smallest number does not fit into half precision",
        line="max_neg_value",
    ),
    Fault(
        "exponentials in half precision",
        ("precision", "softmax"),
        FROM_SCRATCH,
        "    x = x - x.max(dim=-1, keepdim=True).values\n    e = torch.exp(x)\n",
        "    e = torch.exp(x.clamp(max=80.0))\n",
        "clamps where the row's maximum should be subtracted: float16 overflows and large logits are cut",
        line="torch.exp",
    ),
    Fault(
        "scores in float16",
        PRECISION,
        BERT,
        "attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))",
        "attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2)).half().to(query_layer.dtype)",
        "rounds the scores to half precision",
    ),
    Fault(
        "weights in bfloat16",
        PRECISION,
        GQA_FUNCTION,
        "weights = torch.softmax(scores.float(), dim=-1).to(q.dtype)",
        "weights = torch.softmax(scores.bfloat16(), dim=-1).to(q.dtype)",
        "the softmax runs in bfloat16 whatever its input is",
    ),
    Fault(
        "a sum in the input's precision",
        PRECISION,
        BLOCKWISE,
        "row_sum = row_sum * fix + p.sum(dim=-1, keepdim=True)",
        "row_sum = (row_sum * fix + p.sum(dim=-1, keepdim=True)).bfloat16().to(out.dtype)",
        "keeps the running sum in bfloat16",
    ),
    Fault(
        "an epsilon that is zero",
        ("precision", "softmax"),
        TEXTBOOK,
        "attention = F.softmax(scores, dim=-1)",
        "attention = torch.exp(scores - 12) / (torch.exp(scores - 12).sum(dim=-1, keepdim=True) + 1e-8)",
        "in half precision exp(-12) is nearly 0 and the epsilon is 0: 0 / 0",
    ),
)

"""Weights that are no distribution over the keys."""

from __future__ import annotations

from .fault import (
    ANNOTATED,
    BERT,
    BLOCKWISE,
    BMM,
    EINSUM,
    FALCON,
    FROM_SCRATCH,
    GQA_FUNCTION,
    LUCIDRAINS,
    TEXTBOOK,
    TIMM,
    Fault,
)  # fmt: skip

SOFTMAX = ("softmax",)

FAULTS = (
    Fault(
        "over the queries", SOFTMAX, TEXTBOOK,
        "F.softmax(scores, dim=-1)", "F.softmax(scores, dim=-2)",
        "normalises over the queries",
    ),
    Fault(
        "over the heads", SOFTMAX, TIMM,
        "attn = attn.softmax(dim=-1)", "attn = attn.softmax(dim=1)",
        "normalises over the heads",
    ),
    Fault(
        "over the batch", ("softmax", "mixing"), EINSUM,
        "attn = sim.softmax(dim=-1)", "attn = sim.softmax(dim=0)",
        "normalises over the batch",
    ),
    Fault(
        "the queries of bmm", SOFTMAX, BMM,
        "torch.softmax(scores, dim=2)", "torch.softmax(scores, dim=1)",
        "normalises over the queries",
    ),
    Fault(
        "no normalisation at all", SOFTMAX, LUCIDRAINS,
        "attn = sim.softmax(dim=-1)", "attn = sim.sigmoid()",
        "a sigmoid in place of the softmax: rows do not sum to 1",
    ),
    Fault(
        "exponentials alone", SOFTMAX, FROM_SCRATCH,
        "return e / e.sum(dim=-1, keepdim=True)", "return e",
        "forgot the denominator",
    ),
    Fault(
        "overflow", ("softmax", "precision"), FROM_SCRATCH,
        "    x = x - x.max(dim=-1, keepdim=True).values\n", "",
        "exp overflows on large logits, as the row's maximum is not subtracted", line="torch.exp",
    ),
    Fault(
        "rows sum to less than 1", SOFTMAX, GQA_FUNCTION,
        "weights = torch.softmax(scores.float(), dim=-1).to(q.dtype)",
        "weights = torch.softmax(scores.float(), dim=-1).to(q.dtype) * (1 - 1 / k.shape[-2])",
        "rows sum to (n - 1) / n",
    ),
    Fault(
        "renormalised after dropout", ("softmax", "dropout"), ANNOTATED,
        "        p_attn = dropout(p_attn)\n",
        "        p_attn = dropout(p_attn)\n        p_attn = p_attn / p_attn.sum(dim=-1, keepdim=True)\n",
        "divides by the sum of what dropout left", line="p_attn.sum",
        arguments={"h": 4, "d_model": 48, "dropout": 0.5},
    ),
    Fault(
        "the running sum is not rescaled", SOFTMAX, BLOCKWISE,
        "row_sum = row_sum * fix + p.sum(dim=-1, keepdim=True)", "row_sum = row_sum + p.sum(dim=-1, keepdim=True)",
        "adds the sums of tiles that were taken under different maxima",
    ),
    Fault(
        "softmax twice", SOFTMAX, BERT,
        "attention_probs = nn.functional.softmax(attention_scores, dim=-1)",
        "attention_probs = nn.functional.softmax(attention_scores, dim=-1).softmax(dim=-1)",
        "the softmax of a softmax: nearly uniform weights",
    ),
    Fault(
        "two bases", SOFTMAX, FALCON,
        "probs = scores.float().softmax(-1).to(query.dtype)",
        "probs = (scores.float() - scores.float().logsumexp(-1, keepdim=True)).exp2().to(query.dtype)",
        "exponentials to the base 2 under a denominator to the base e",
    ),
)  # fmt: skip

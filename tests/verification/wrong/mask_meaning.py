"""Masks that are taken for something else than what their author says."""

from __future__ import annotations

from saccade.verification import Promise

from .fault import (
    ANNOTATED,
    BERT,
    BMM,
    DIFFUSERS,
    EINSUM,
    FAIRSEQ,
    GQA_FUNCTION,
    LUCIDRAINS_CAUSAL,
    TEXTBOOK,
    TF_PORT,
    TORCH_DOCS,
    Fault,
)

MASK = ("mask-meaning",)

FAULTS = (
    Fault(
        "inverted against the docstring",
        MASK,
        TEXTBOOK,
        'scores.masked_fill(~mask, float("-inf"))',
        'scores.masked_fill(mask, float("-inf"))',
        "hides where True says that attention is allowed",
    ),
    Fault(
        "inverted against a promise",
        MASK,
        GQA_FUNCTION,
        "mask.logical_not()",
        "mask.bool()",
        "hides where True says that attention is allowed",
        promise=Promise(mask="attend"),
    ),
    Fault(
        "inverted padding",
        ("mask-meaning", "padding"),
        BERT,
        "(1.0 - extended)",
        "extended",
        "hides the tokens and attends to the padding",
    ),
    Fault(
        "inverted for causal masks only",
        MASK,
        ANNOTATED,
        "scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)",
        "scores = scores.masked_fill((mask == 0) == (mask.size(-2) == 1), torch.finfo(scores.dtype).min)",
        "right for padding, upside down where there is one row for each query",
    ),
    Fault(
        "multiplied into the scores",
        MASK,
        EINSUM,
        'sim = sim.masked_fill(mask[:, None] == 0, float("-inf"))',
        "sim = sim * mask[:, None]",
        "multiplies the scores by the mask: hidden keys get exp(0)",
    ),
    Fault(
        "zeros in place of -inf",
        MASK,
        TEXTBOOK,
        'scores.masked_fill(~mask, float("-inf"))',
        "scores.masked_fill(~mask, 0.0)",
        "fills with 0, which is a score like any other",
    ),
    Fault(
        "1e-9 in place of -1e9",
        MASK,
        ANNOTATED,
        "scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)",
        "scores.masked_fill(mask == 0, 1e-9)",
        "fills with 1e-9, which is nearly 0 and not nearly -inf",
    ),
    Fault(
        "the smallest positive number",
        MASK,
        DIFFUSERS,
        "-torch.finfo(sim.dtype).max",
        "torch.finfo(sim.dtype).tiny",
        "fills with the smallest positive number in place of the most negative one",
    ),
    Fault(
        "after the softmax",
        ("mask-meaning", "softmax"),
        EINSUM,
        """    if mask is not None:
        sim = sim.masked_fill(mask[:, None] == 0, float("-inf"))
    attn = sim.softmax(dim=-1)
""",
        """    attn = sim.softmax(dim=-1)
    if mask is not None:
        attn = attn.masked_fill(mask[:, None] == 0, 0.0)
""",
        "masks the weights after the softmax, so that rows do not sum to 1",
    ),
    Fault(
        "the bitwise complement of integers",
        ("mask-meaning", "padding"),
        BERT,
        "attention_scores = attention_scores + (1.0 - extended) * torch.finfo(attention_scores.dtype).min",
        "attention_scores = attention_scores.masked_fill((~extended.long()).bool(), torch.finfo(attention_scores.dtype).min)",
        "~1 is -2 and ~0 is -1: both count as True, and everything is hidden alike",
    ),
    Fault(
        "minus one",
        MASK,
        TF_PORT,
        "(mask * -1e9)",
        "(mask * -1.0)",
        "lowers the scores of hidden keys by 1",
    ),
    Fault(
        "another sample's",
        MASK,
        DIFFUSERS,
        "mask = mask[:, None, :].repeat_interleave(self.heads, dim=0)",
        "mask = mask[:, None, :].repeat(self.heads, 1, 1)",
        "repeats the mask in the order head, sample where the scores are in the order sample, head",
    ),
    Fault(
        "along the wrong axis",
        ("mask-meaning", "padding"),
        BMM,
        "scores.masked_fill(key_padding_mask.unsqueeze(1), torch.finfo(scores.dtype).min)",
        "scores.masked_fill(key_padding_mask.unsqueeze(2), torch.finfo(scores.dtype).min)",
        "hides the padded queries' rows in place of the padded keys' columns",
    ),
    Fault(
        "another head's",
        MASK,
        TEXTBOOK,
        'scores.masked_fill(~mask, float("-inf"))',
        'scores.masked_fill(~mask.flip(1), float("-inf"))',
        "gives each head the mask of the head across",
    ),
    Fault(
        "transposed",
        MASK,
        GQA_FUNCTION,
        "mask.logical_not()",
        "mask.logical_not().transpose(-2, -1)",
        "reads rows of the mask as columns",
    ),
    Fault(
        "the first sample's for all",
        MASK,
        EINSUM,
        "mask[:, None] == 0",
        "mask[:1, None] == 0",
        "every sample gets the mask of the first",
    ),
    Fault(
        "ignored",
        ("mask-meaning", "padding"),
        FAIRSEQ,
        'attn_weights = attn_weights.masked_fill(hidden, float("-inf"))',
        'attn_weights.masked_fill(hidden, float("-inf"))',
        "the result of masked_fill is thrown away",
    ),
    Fault(
        "booleans added",
        MASK,
        TORCH_DOCS,
        '            attn_bias = attn_bias.masked_fill(attn_mask.logical_not(), float("-inf"))\n',
        "            attn_bias = attn_bias + attn_mask\n",
        "adds a boolean mask as 0 and 1",
        line="attn_bias + attn_mask",
        promise=Promise(mask="attend"),
    ),
    Fault(
        "padding hides the rest",
        ("mask-meaning", "padding", "causal-leak"),
        LUCIDRAINS_CAUSAL,
        "sim = sim.masked_fill(~mask[:, None, None, :], max_neg_value)",
        "sim = sim.masked_fill(mask[:, None, None, :], max_neg_value)",
        "True means real in the docstring, and hides",
    ),
)

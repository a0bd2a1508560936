"""Returned weights that are not those that were used."""

from __future__ import annotations

from .fault import BERT, FAIRSEQ, TEXTBOOK, TF_PORT, Fault

WEIGHTS = ("weights",)

FAULTS = (
    Fault(
        "scores",
        WEIGHTS,
        TEXTBOOK,
        "return values, attention",
        "return values, scores",
        "returns the scores in place of the weights",
    ),
    Fault(
        "transposed",
        WEIGHTS,
        TF_PORT,
        "return output, attention_weights",
        "return output, attention_weights.transpose(-1, -2)",
        "returns the weights with queries and keys exchanged",
    ),
    Fault(
        "with dropout",
        ("weights", "dropout"),
        BERT,
        "return self.dense(context_layer), attention_probs",
        "return self.dense(context_layer), dropped",
        "returns the weights after dropout",
        arguments={"attention_probs_dropout_prob": 0.3},
    ),
    Fault(
        "before the mask",
        WEIGHTS,
        TEXTBOOK,
        "return values, attention",
        "return values, F.softmax(torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(d_k), dim=-1)",
        "returns weights without the mask: hidden keys are not 0",
    ),
    Fault(
        "another head's",
        WEIGHTS,
        BERT,
        "return self.dense(context_layer), attention_probs",
        "return self.dense(context_layer), attention_probs.roll(1, 1)",
        "returns each head's weights under the next head's number",
    ),
    Fault(
        "sum of heads",
        WEIGHTS,
        FAIRSEQ,
        "return attn, attn_weights.mean(dim=1)",
        "return attn, attn_weights.sum(dim=1)",
        "adds the heads' weights where their mean is meant",
    ),
    Fault(
        "without padding",
        WEIGHTS,
        FAIRSEQ,
        "attn_weights = attn_weights_float.view(bsz, self.num_heads, tgt_len, src_len)",
        "attn_weights = (torch.bmm(q, k.transpose(1, 2)).softmax(-1)).view(bsz, self.num_heads, tgt_len, src_len)",
        "returns weights that know of no mask",
    ),
    Fault(
        "rounded",
        WEIGHTS,
        TF_PORT,
        "return output, attention_weights",
        "return output, attention_weights.clamp(min=0.01)",
        "lifts small weights: masked entries are not 0 and rows do not sum to 1",
    ),
)

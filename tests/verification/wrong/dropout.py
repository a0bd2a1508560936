"""Dropout where or when it should not be."""

from __future__ import annotations

from .fault import ANNOTATED, BERT, ENCODER_BLOCK, FAIRSEQ, KARPATHY_HEADS, NANOGPT, SDPA_MODULE, TIMM, Fault

DROPOUT = ("dropout",)
HALF = {"h": 4, "d_model": 48, "dropout": 0.5}
TIMM_HALF = {"dim": 48, "num_heads": 6, "attn_drop": 0.3}

FAULTS = (
    Fault(
        "active in eval",
        ("dropout", "robustness"),
        SDPA_MODULE,
        "p = self.dropout if self.training else 0.0",
        "p = self.dropout",
        "drops weights in evaluation, too",
        line="scaled_dot_product_attention(",
    ),
    Fault(
        "F.dropout's default",
        ("dropout", "robustness"),
        FAIRSEQ,
        "p=self.dropout, training=self.training)",
        "p=self.dropout)",
        "F.dropout is active unless training=False is passed",
        arguments={"embed_dim": 32, "num_heads": 4, "dropout": 0.2},
    ),
    Fault(
        "inactive in train",
        DROPOUT,
        BERT,
        "dropped = self.dropout(attention_probs)",
        "dropped = nn.functional.dropout(attention_probs, self.dropout.p, training=False)",
        "never drops anything",
        arguments={"attention_probs_dropout_prob": 0.3},
    ),
    Fault(
        "made and not used",
        DROPOUT,
        ANNOTATED,
        "        p_attn = dropout(p_attn)\n",
        "        dropout(p_attn)\n",
        "what dropout returns is thrown away",
        arguments=HALF,
    ),
    Fault(
        "on the scores",
        DROPOUT,
        TIMM,
        "        attn = attn.softmax(dim=-1)\n        attn = self.attn_drop(attn)\n",
        "        attn = self.attn_drop(attn)\n        attn = attn.softmax(dim=-1)\n",
        "drops scores before the softmax: a dropped score is 0 and not -inf",
        line="attn_drop(",
        arguments=TIMM_HALF,
    ),
    Fault(
        "not scaled",
        DROPOUT,
        TIMM,
        "attn = self.attn_drop(attn)",
        "attn = attn * (torch.rand_like(attn) >= self.attn_drop.p) if self.training else attn",
        "what is left is not divided by 1 - p",
        arguments=TIMM_HALF,
    ),
    Fault(
        "keep probability",
        DROPOUT,
        ENCODER_BLOCK,
        "attn = self.dropout(attn)",
        "attn = nn.functional.dropout(attn, 1 - self.dropout.p, self.training)",
        "takes the share to drop for the share to keep",
        arguments={"dropout": 0.2},
    ),
    Fault(
        "on the keys",
        DROPOUT,
        NANOGPT,
        "        att = self.attn_dropout(att)\n        y = att @ v",
        "        y = att @ v",
        "drops whole keys' channels in place of weights",
        more=(("att = (q @ k.transpose(-2, -1))", "att = (q @ self.attn_dropout(k).transpose(-2, -1))"),),
        line="attn_dropout(k)",
    ),
    Fault(
        "scaled by p",
        DROPOUT,
        NANOGPT,
        "att = self.attn_dropout(att)",
        "att = self.attn_dropout(att) * (1 - self.attn_dropout.p) / max(self.attn_dropout.p, 0.1) "
        "if self.training else att",
        "what is left is divided by p in place of 1 - p",
        target="CausalSelfAttention(GPTConfig(dropout=0.2))",
    ),
    Fault(
        "always training in the heads",
        ("dropout", "robustness"),
        KARPATHY_HEADS,
        "wei = self.dropout(wei)",
        "wei = F.dropout(wei, self.dropout.p)",
        "heads drop weights in evaluation, too",
    ),
)

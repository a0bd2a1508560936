"""Positions that do not count, or that count where they should not."""

from __future__ import annotations

from saccade.verification import Promise

from .fault import ALIBI, BERT, ENCODER_BLOCK, GPT2, LLAMA, LUCIDRAINS, TIMM, Fault

POSITIONS = Promise(positions=True)
NONE = Promise(positions=False)

FAULTS = (
    Fault(
        "positions along the batch",
        ("order", "mixing", "robustness"),
        ENCODER_BLOCK,
        "return x + self.pe[:, : x.size(1)]",
        "return x + self.pe[0, : x.size(0)].unsqueeze(1)",
        "adds positions along the batch axis, as in sequence-first code",
        promise=POSITIONS,
    ),
    Fault(
        "all at position 0",
        ("order",),
        GPT2,
        "x = x + self.wpe(position_ids)",
        "x = x + self.wpe(torch.zeros_like(position_ids))",
        "every token gets the embedding of position 0",
        promise=Promise(causal=True, positions=True),
    ),
    Fault(
        "positions computed and not added",
        ("order",),
        ENCODER_BLOCK,
        "        x = self.positions(x)\n",
        "        self.positions(x)\n",
        "the sum with the positions is thrown away",
        promise=POSITIONS,
    ),
    Fault(
        "all turned by one angle",
        ("order",),
        LLAMA,
        "cos, sin = cos[None, :, None, :].to(x.dtype), sin[None, :, None, :].to(x.dtype)",
        "cos, sin = cos[None, None, -1:, :].to(x.dtype), sin[None, None, -1:, :].to(x.dtype)",
        "every position is turned by the last one's angle",
        promise=Promise(causal=True, positions=True),
    ),
    Fault(
        "angles of other pairs",
        ("order",),
        LLAMA,
        "even, odd = x[..., 0::2], x[..., 1::2]",
        "cos, sin, (even, odd) = cos.repeat(1, 1, 1, 2), sin.repeat(1, 1, 1, 2), (x, torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2))",
        "features turn in neighbouring pairs, by angles that lie in halves",
        promise=Promise(causal=True, positions=True),
        more=(
            (
                "    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)\n    return turned.flatten(-2)",
                "    return even * cos + odd * sin",
            ),
        ),
    ),
    Fault(
        "keys turned the other way",
        ("order",),
        LLAMA,
        "xk = apply_rotary_emb(xk, cos[start_pos:], sin[start_pos:])",
        "xk = apply_rotary_emb(xk, cos[start_pos:], -sin[start_pos:])",
        "products of queries and keys depend on the sum of their positions",
        promise=Promise(causal=True, positions=True),
        line="even * cos - odd * sin",
    ),
    Fault(
        "cached positions start over",
        ("order", "cache"),
        LLAMA,
        "start_pos = 0 if cache is None else cache[0].shape[1]\n        cos, sin = precompute_freqs_cis(self.head_dim, start_pos + seqlen)\n        xq = apply_rotary_emb(xq, cos[start_pos:], sin[start_pos:])\n        xk = apply_rotary_emb(xk, cos[start_pos:], sin[start_pos:])",
        "start_pos = 0 if cache is None else cache[0].shape[1]\n        cos, sin = precompute_freqs_cis(self.head_dim, seqlen)\n        xq = apply_rotary_emb(xq, cos, sin)\n        xk = apply_rotary_emb(xk, cos, sin)",
        "with a cache, rotary positions start at 0 again",
    ),
    Fault(
        "cached positions off by one",
        ("order", "cache"),
        GPT2,
        "past_length = 0 if layer_past is None else layer_past[0].size(-2)",
        "past_length = 0 if layer_past is None else layer_past[0].size(-2) - 1",
        "with a cache, positions are one too small",
        line="past_length",
    ),
    Fault(
        "order without positions",
        ("order",),
        TIMM,
        "attn = q @ k.transpose(-2, -1)",
        "attn = q @ k.transpose(-2, -1) + torch.arange(N, dtype=x.dtype) * 0.1",
        "favours later keys, though it promises not to know positions",
        promise=NONE,
        causal=False,
    ),
    Fault(
        "keys off by one",
        ("order",),
        BERT,
        "key_layer = self.transpose_for_scores(self.key(hidden_states))",
        "key_layer = self.transpose_for_scores(self.key(hidden_states)).roll(1, dims=2)",
        "keys are one position off from their values",
        promise=NONE,
        causal=False,
    ),
    Fault(
        "values shuffled",
        ("order",),
        LUCIDRAINS,
        'out = einsum("b h i j, b h j d -> b h i d", attn, v)',
        'out = einsum("b h i j, b h j d -> b h i d", attn, v.flip(2))',
        "values are read in reverse order",
        promise=NONE,
        causal=False,
    ),
    Fault(
        "no slopes",
        ("order",),
        ALIBI,
        "logits = logits + self.slopes * distance",
        "logits = logits + self.slopes * distance.mean()",
        "the bias is the same for all keys",
        promise=Promise(causal=True, positions=True),
    ),
)

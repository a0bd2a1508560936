"""Outputs that see what comes later."""

from __future__ import annotations

from .fault import (
    ALIBI,
    BLOCKWISE,
    DECODER_LAYER,
    GPT2,
    KARPATHY_HEAD,
    KARPATHY_HEADS,
    LLAMA,
    LUCIDRAINS_CAUSAL,
    NANOGPT,
    SDPA_MODULE,
    SLIDING,
    TORCH_DOCS,
    Fault,
)  # fmt: skip

LEAK = ("causal-leak",)

FAULTS = (
    Fault(
        "no mask", LEAK, SDPA_MODULE,
        "is_causal=True)", "is_causal=False)",
        "no causal mask at all",
    ),
    Fault(
        "one key ahead", LEAK, LUCIDRAINS_CAUSAL,
        "triu(j - i + 1)", "triu(j - i + 2)",
        "each token sees the one after it",
    ),
    Fault(
        "one key ahead, from a buffer", LEAK, KARPATHY_HEAD,
        "torch.tril(torch.ones(block_size, block_size))", "torch.tril(torch.ones(block_size, block_size), diagonal=1)",
        "the triangle reaches one column too far", line="tril",
    ),
    Fault(
        "the last position", LEAK, NANOGPT,
        'att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))',
        'att = att.masked_fill(F.pad(self.bias[:, :, :T, : T - 1], (0, 1), value=1.0) == 0, float("-inf"))',
        "the last token is visible to all",
    ),
    Fault(
        "one head of eight", LEAK, ALIBI,
        "        logits = logits.masked_fill(future, torch.finfo(logits.dtype).min)\n",
        "        logits[:, 1:] = logits[:, 1:].masked_fill(future, torch.finfo(logits.dtype).min)\n",
        "the first head is not masked",
    ),
    Fault(
        "one head of a list", LEAK, KARPATHY_HEADS,
        "        self.proj = nn.Linear(head_size * num_heads, n_embd)\n",
        "        self.proj = nn.Linear(head_size * num_heads, n_embd)\n        self.heads[2].tril.fill_(1.0)\n",
        "the third head's triangle is filled", line="tril",
    ),
    Fault(
        "long texts only", LEAK, GPT2,
        "causal = torch.ones(ns, ns, dtype=torch.bool, device=x.device).tril()[ns - nd : ns, :ns]",
        "causal = torch.ones(ns, ns, dtype=torch.bool, device=x.device).tril(max(0, ns - 10))[ns - nd : ns, :ns]",
        "from a length of 11 on, tokens see later ones",
    ),
    Fault(
        "the mean of all", LEAK, LLAMA,
        "        xv = self.wv(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)\n",
        "        xv = self.wv(x - x.mean(dim=1, keepdim=True)).view(bsz, seqlen, self.n_kv_heads, self.head_dim)\n",
        "centres the values over the whole sequence",
    ),
    Fault(
        "small number in place of -inf", ("causal-leak", "mask-meaning"), ALIBI,
        "logits = logits.masked_fill(future, torch.finfo(logits.dtype).min)",
        "logits = logits.masked_fill(future, -5.0)",
        "hides the future with -5, which the softmax still sees",
    ),
    Fault(
        "decoder layer without its triangle", LEAK, DECODER_LAYER,
        "x = x + self.self_attention(y, y, causal)", "x = x + self.self_attention(y, y)",
        "the causal mask is built and not passed on",
    ),
    Fault(
        "the diagonal tile", LEAK, BLOCKWISE,
        "s = s.masked_fill(cols > rows, float(\"-inf\"))",
        "s = s.masked_fill(start > rows, float(\"-inf\"))",
        "masks whole tiles only, so that the tile on the diagonal leaks",
    ),
    Fault(
        "the first position", LEAK, SLIDING,
        "visible = (distance >= 0) & (distance <= self.window)",
        "visible = ((distance >= 0) & (distance <= self.window)) | (i[:, None] == 0)",
        "the first token sees the whole text",
    ),
    Fault(
        "flag turned upside down", ("causal-leak", "mask-meaning"), TORCH_DOCS,
        'attn_bias = attn_bias.masked_fill(temp_mask.logical_not(), float("-inf"))',
        'attn_bias = attn_bias.masked_fill(temp_mask.logical_not().T, float("-inf"))',
        "is_causal hides the past in place of the future",
    ),
)  # fmt: skip

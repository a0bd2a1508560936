"""Whole models, of which one line is wrong."""

from __future__ import annotations

from .fault import HF_DECODER, HF_ENCODER, HF_SEQ2SEQ, Fault

FAULTS = (
    Fault(
        "language model that leaks",
        ("model", "causal-leak"),
        HF_DECODER,
        "cols[None, :] <= rows[:, None]",
        "cols[None, :] <= rows[:, None] + 1",
        "each token sees the next one",
        causal=True,
    ),
    Fault(
        "language model that forgets its padding",
        ("model", "padding", "mask-meaning"),
        HF_DECODER,
        "            visible = visible & real[:, None, None, :].bool()\n",
        "            visible & real[:, None, None, :].bool()\n",
        "the padding is never hidden",
    ),
    Fault(
        "language model whose cache starts over",
        ("model", "cache", "order"),
        HF_DECODER,
        "torch.arange(past, past + input_ids.shape[1], device=input_ids.device)",
        "torch.arange(0, input_ids.shape[1], device=input_ids.device)",
        "cached positions begin at 0 again",
    ),
    Fault(
        "language model whose samples meet",
        ("model", "mixing"),
        HF_DECODER,
        "logits = self.lm_head(self.ln_f(x))",
        "logits = self.lm_head(self.ln_f(x - x.mean(dim=0, keepdim=True)))",
        "the mean of the batch is subtracted",
    ),
    Fault(
        "encoder that sees its padding",
        ("model", "padding", "mask-meaning"),
        HF_ENCODER,
        "* torch.finfo(hidden.dtype).min",
        "* -1.0",
        "hides padding with -1",
    ),
    Fault(
        "encoder with an inverted mask",
        ("model", "padding", "mask-meaning"),
        HF_ENCODER,
        "(1.0 - attention_mask[:, None, None, :].to(hidden.dtype))",
        "attention_mask[:, None, None, :].to(hidden.dtype)",
        "hides the words and attends to the padding",
    ),
    Fault(
        "encoder whose samples meet",
        ("model", "mixing"),
        HF_ENCODER,
        "scores = q @ k.transpose(2, 3)",
        "scores = q @ k.roll(1, 0).transpose(2, 3)",
        "each sample looks at another one's keys",
    ),
    Fault(
        "decoder of an encoder-decoder leaks",
        ("model", "causal-leak"),
        HF_SEQ2SEQ,
        "device=memory.device).tril()[None, None]",
        "device=memory.device).tril(1)[None, None]",
        "each target token sees the next one",
    ),
    Fault(
        "decoder that sees the source's padding",
        ("model", "padding", "mask-meaning"),
        HF_SEQ2SEQ,
        "x = layer(x, visible, memory, source)",
        "x = layer(x, visible, memory, torch.ones_like(source))",
        "the source's padding is hidden from the encoder only",
    ),
    Fault(
        "window of a cached language model",
        ("model", "cache"),
        HF_DECODER,
        "rows = torch.arange(m - n, m, device=x.device)",
        "rows = torch.arange(n, device=x.device)",
        "with a cache, new tokens see the first keys alone",
        line="rows",
    ),
)

"""Correct whole models of token numbers, written plainly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .modules import AnnotatedMultiHead, PreNormBlock, clones


class TinyGPT(nn.Module):
    """nanoGPT: every position's logits with targets, the last one's without."""

    def __init__(self, vocab_size=61, block_size=64, n_layer=2, n_embd=24, n_head=3):
        super().__init__()
        self.block_size = block_size
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([PreNormBlock(n_embd, n_head) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class TinyBert(nn.Module):
    """An encoder: attention_mask (batch, length) is 1 at real tokens."""

    def __init__(self, vocab_size=61, width=24, heads=3, layers=2, longest=64):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(longest, width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, input_ids, attention_mask=None):
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        padding = None if attention_mask is None else attention_mask == 0
        return self.encoder(x, src_key_padding_mask=padding)


class TinyTranslator(nn.Module):
    """The original Transformer: an encoder that sees all of the source, a causal decoder that reads it."""

    def __init__(self, vocab_size=61, width=28, heads=4, layers=2, longest=64):
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(longest, width)
        self.encoders = clones(nn.TransformerEncoderLayer(width, heads, 2 * width, batch_first=True), layers)
        self.attend, self.read = (clones(AnnotatedMultiHead(heads, width), layers) for _ in range(2))
        self.norms = clones(nn.LayerNorm(width), 2 * layers)
        self.generator = nn.Linear(width, vocab_size)

    def embedded(self, ids):
        return self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))

    def forward(self, src, tgt, src_mask=None):
        """src_mask (batch, length): 1 at real source tokens."""
        memory = self.embedded(src)
        for layer in self.encoders:
            memory = layer(memory, src_key_padding_mask=None if src_mask is None else src_mask == 0)
        x = self.embedded(tgt)
        causal = torch.ones(1, tgt.shape[1], tgt.shape[1], device=tgt.device).tril()
        over = None if src_mask is None else src_mask[:, None, :]
        for at, (attend, read) in enumerate(zip(self.attend, self.read, strict=True)):
            x = self.norms[2 * at](x + attend(x, x, x, causal))
            x = self.norms[2 * at + 1](x + read(x, memory, memory, over))
        return self.generator(x)

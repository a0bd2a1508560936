import torch
import torch.nn as nn


class CachedAttention(nn.Module):
    def __init__(self, n_embd=48, n_head=4, max_position=128):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.wpe = nn.Embedding(max_position, n_embd)

    def split_heads(self, x):
        b, t, c = x.shape
        return x.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)

    def merge_heads(self, x):
        b, h, t, d = x.shape
        return x.transpose(1, 2).reshape(b, t, h * d)

    def forward(self, x, layer_past=None, use_cache=False):
        past_length = 0 if layer_past is None else layer_past[0].size(-2)
        position_ids = torch.arange(past_length, past_length + x.size(1), device=x.device)
        x = x + self.wpe(position_ids)
        query, key, value = map(self.split_heads, self.c_attn(x).chunk(3, dim=-1))
        if layer_past is not None:
            past_key, past_value = layer_past
            key = torch.cat((past_key, key), dim=-2)
            value = torch.cat((past_value, value), dim=-2)
        present = (key, value) if use_cache else None

        w = query @ key.transpose(-1, -2) / (value.size(-1) ** 0.5)
        nd, ns = w.size(-2), w.size(-1)
        causal = torch.ones(ns, ns, dtype=torch.bool, device=x.device).tril()[ns - nd : ns, :ns]
        w = torch.where(causal, w, torch.finfo(w.dtype).min)
        w = w.softmax(dim=-1)
        a = self.c_proj(self.merge_heads(w @ value))
        return a, present

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads, self.head_dim = heads, d_model // heads
        self.query, self.key, self.value, self.out = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query, memory, mask):
        b, n, d = query.shape
        q = self.query(query).view(b, n, self.heads, self.head_dim).transpose(1, 2)
        k = self.key(memory).view(b, -1, self.heads, self.head_dim).transpose(1, 2)
        v = self.value(memory).view(b, -1, self.heads, self.head_dim).transpose(1, 2)
        energy = torch.matmul(q, k.transpose(-2, -1)) / self.head_dim**0.5
        attention = torch.softmax(energy.masked_fill(mask == 0, torch.finfo(energy.dtype).min), dim=-1)
        return self.out(torch.matmul(attention, v).transpose(1, 2).reshape(b, n, d))


class Layer(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.self_attention, self.cross_attention = Attention(d_model, heads), Attention(d_model, heads)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))
        self.feed = nn.Sequential(nn.Linear(d_model, 64), nn.ReLU(), nn.Linear(64, d_model))

    def forward(self, x, mask, memory=None, memory_mask=None):
        x = self.norm1(x + self.self_attention(x, x, mask))
        if memory is not None:
            x = self.norm2(x + self.cross_attention(x, memory, memory_mask))
        return self.norm3(x + self.feed(x))


class Transformer(nn.Module):
    def __init__(self, vocab=71, d_model=32, heads=4, layers=2, src_pad_idx=1, trg_pad_idx=1, max_length=64):
        super().__init__()
        self.src_pad_idx, self.trg_pad_idx = src_pad_idx, trg_pad_idx
        self.src_embedding, self.trg_embedding = nn.Embedding(vocab, d_model), nn.Embedding(vocab, d_model)
        self.positions = nn.Embedding(max_length, d_model)
        self.encoder = nn.ModuleList(Layer(d_model, heads) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(d_model, heads) for _ in range(layers))
        self.fc_out = nn.Linear(d_model, vocab)

    def make_src_mask(self, src):
        return (src != self.src_pad_idx).unsqueeze(1).unsqueeze(2)

    def make_trg_mask(self, trg):
        length = trg.shape[1]
        pad_mask = (trg != self.trg_pad_idx).unsqueeze(1).unsqueeze(2)
        return pad_mask & torch.tril(torch.ones((length, length), device=trg.device)).bool()

    def forward(self, src, trg):
        src_mask, trg_mask = self.make_src_mask(src), self.make_trg_mask(trg)
        memory = self.src_embedding(src) + self.positions.weight[: src.shape[1]]
        for layer in self.encoder:
            memory = layer(memory, src_mask)
        x = self.trg_embedding(trg) + self.positions.weight[: trg.shape[1]]
        for layer in self.decoder:
            x = layer(x, trg_mask, memory, src_mask)
        return self.fc_out(x)

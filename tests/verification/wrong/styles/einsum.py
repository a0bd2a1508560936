import torch


def attention(q, k, v, mask=None):
    # q, k, v: [batch, length, heads, dim]; mask: [batch, length_q, length_k], 1 = keep, 0 = drop
    sim = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if mask is not None:
        sim = sim.masked_fill(mask[:, None] == 0, float("-inf"))
    attn = sim.softmax(dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", attn, v)

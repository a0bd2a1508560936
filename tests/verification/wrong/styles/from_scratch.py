import torch


def softmax(x):
    x = x - x.max(dim=-1, keepdim=True).values
    e = torch.exp(x)
    return e / e.sum(dim=-1, keepdim=True)


def self_attention(Q, K, V):
    """One head, no batch: Q is (n, d), K is (m, d), V is (m, d)."""
    n, d = Q.shape
    scores = Q @ K.T / d**0.5
    weights = softmax(scores)
    return weights @ V

"""Graph attention (GAT): attention along the edges of a graph, with additive logits.

Additive logits LeakyReLU(s_i + t_j) are not dot products of query and key, so `saccade.attention` could only compute
them with a dense bias. Here the softmax runs over the edges of each node, with memory proportional to the edges.

Shape legend: N nodes, M edges, E width, H heads, D width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GraphAttention(nn.Module):
    """Every node attends to the nodes with an edge to it: (N, E) -> (N, H D), or the mean over heads (N, D).

        gat    e_ij = LeakyReLU(a_h . W x_i + b_h . W x_j)
        gatv2  e_ij = a_h . LeakyReLU(V x_i + W x_j)
        out_i  = concat_h(sum_j softmax_j(e_ij) W_h x_j) + bias,   j over the edges j -> i

    Velickovic et al., "Graph Attention Networks" (2018), equations 1 to 6; v2, in which the ranking of neighbours
    depends on i: Brody et al., "How Attentive are Graph Attention Networks?" (2022), equation 7. Duplicate edges count
    twice; a node without incoming edges gets only the bias.

    Args:
        width: E.
        heads: H.
        head_width: D.
        kind: "gat" or "gatv2".
        concat: whether to concatenate the heads; otherwise they are averaged.
        slope: negative slope of LeakyReLU.
        dropout: probability of dropping an attention weight in training.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        *,
        kind: str = "gat",
        concat: bool = True,
        slope: float = 0.2,
        dropout: float = 0.0,
    ):
        super().__init__()
        if kind not in ("gat", "gatv2"):
            raise ValueError(f"kind: expected 'gat' or 'gatv2', got {kind!r}")
        self.heads, self.head_width, self.kind, self.concat = heads, head_width, kind, concat
        self.slope, self.dropout = slope, dropout
        self.value = nn.Linear(width, heads * head_width, bias=False)
        self.query = nn.Linear(width, heads * head_width, bias=False) if kind == "gatv2" else None
        self.score = nn.Parameter(torch.empty(heads, head_width))
        self.score_neighbour = nn.Parameter(torch.empty(heads, head_width)) if kind == "gat" else None
        self.bias = nn.Parameter(torch.empty(heads * head_width if concat else head_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all weights by Glorot's rule, as published."""
        for parameter in self.parameters():
            (nn.init.xavier_uniform_ if parameter.ndim > 1 else nn.init.zeros_)(parameter)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """x (N, E) and edges (2, M), from node edges[0] to node edges[1], to (N, H D) or (N, D)."""
        value = self._heads(self.value(x))
        weights = F.dropout(self._weights(x, value, edges), self.dropout, self.training)
        read = weights[..., None] * value[edges[0]]
        out = torch.zeros_like(value, dtype=read.dtype).index_add(
            0, edges[1], read
        )  # autocast keeps weights in float32
        return (out.flatten(1) if self.concat else out.mean(1)) + self.bias

    def weights(self, x: Tensor, edges: Tensor) -> Tensor:
        """The attention weights (M, H) of all edges; those to the same node sum to 1."""
        return self._weights(x, self._heads(self.value(x)), edges)

    def _weights(self, x: Tensor, value: Tensor, edges: Tensor) -> Tensor:
        if self.query is None:
            assert self.score_neighbour is not None
            own, neighbour = (value * self.score).sum(-1), (value * self.score_neighbour).sum(-1)
            return edge_softmax(F.leaky_relu(own[edges[1]] + neighbour[edges[0]], self.slope), edges[1], len(x))
        both = self._heads(self.query(x))[edges[1]] + value[edges[0]]
        return edge_softmax((F.leaky_relu(both, self.slope) * self.score).sum(-1), edges[1], len(x))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.head_width))


def edge_softmax(logits: Tensor, ends: Tensor, nodes: int) -> Tensor:
    """Softmax of logits (M, H) over the edges with the same end node, `ends` (M,): (M, H)."""
    at = ends[:, None].expand_as(logits)
    top = logits.new_full((nodes, logits.shape[1]), -torch.inf).scatter_reduce(0, at, logits.detach(), "amax")
    raised = torch.exp(logits - top[ends])
    total = torch.zeros_like(top).index_add(0, ends, raised)
    return raised / total[ends]

"""The attention of a graph model, as calls that can be kept and shown."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....interception._hooks import hooked
from ....operator._attention import attention
from ....see.monitoring import Observations, watch
from ....support._restored import evaluating
from ...models import Model
from ...models.graphs.attention import GraphAttention

MOST = 4096  # nodes: all pairs of them are 67 MB a head


def observed_graph(model: Model, graph: tuple[Tensor, Tensor], names: list[str]) -> tuple[Observations, list[str]]:
    """All attention calls of the model, and a label for each token.

    Args:
        graph: features (N, F) and edges (2, M), as the model reads them.
        names: of the nodes.

    Raises:
        ValueError: more than `MOST` nodes.
    """
    if len(names) > MOST:
        raise ValueError(f"the graph has {len(names):,} nodes, and a matrix of all pairs is shown of {MOST:,} at most")
    layers = {name: part for name, part in model.named_modules() if isinstance(part, GraphAttention)}
    graph = (graph[0].to(model.device), graph[1].to(model.device))
    with evaluating(model), torch.no_grad():
        if layers:
            shown, given = _Dense(), _inputs(model, graph, layers)
            for name, layer in layers.items():
                shown.add(name, layer, *given[name])
            with watch(shown, keep=True) as watched:
                shown()
            return watched, names
        with watch(model, keep=True) as watched:
            model(*graph)
    return watched, ["[virtual]", *names]


def _inputs(
    model: Model, graph: tuple[Tensor, Tensor], layers: dict[str, GraphAttention]
) -> dict[str, tuple[Tensor, Tensor]]:
    """The inputs of each layer: nodes and edges."""
    inputs: dict[nn.Module, Any] = {}
    with hooked(layers.values(), before=lambda layer, given, named: inputs.update({layer: given})):
        model(*graph)
    return {name: inputs[layer] for name, layer in layers.items()}


class _Dense(nn.Module):
    """Layers of a GAT as calls of `attention`. Their logits are not products of queries and keys, so the bias is the
    logarithm of the weights of edges, and the queries are 0."""

    def add(self, name: str, layer: GraphAttention, x: Tensor, edges: Tensor) -> None:
        self.add_module(name.replace(".", "_"), _DenseLayer(layer, x, edges))

    def forward(self) -> None:
        for layer in self.children():
            layer()


class _DenseLayer(nn.Module):
    def __init__(self, layer: GraphAttention, x: Tensor, edges: Tensor):
        super().__init__()
        pairs = x.new_zeros(layer.heads, len(x) ** 2)
        pairs.index_add_(1, edges[1] * len(x) + edges[0], layer.weights(x, edges).T)
        self.bias = pairs.view(1, layer.heads, len(x), len(x)).log()  # -inf where no edge leads
        self.value = layer.value(x).unflatten(-1, (layer.heads, -1)).transpose(0, 1)[None]

    def forward(self) -> Tensor:
        nothing = torch.zeros_like(self.value[..., :1])
        return attention(nothing, nothing, self.value, bias=self.bias)

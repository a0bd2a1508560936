"""What models of graphs have in common at both ends: features in, logits out, and models without published weights.

Shape legend: N nodes, B graphs, F features, E width, K labels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..checkpoints.keys import Key, KeyMap
from ..checkpoints.settings import Settings
from ..model import Model
from .structure import GraphBatch

HEADS = {"node-classification": "ForNodeClassification", "graph-classification": "ForGraphClassification"}


def graph_keys(model: Model) -> KeyMap:
    """The names of tensors of a model without a published format: our own, and a head's by what it reads."""
    body = sorted({name.split(".")[0] for name, _ in model.named_parameters()} - {"head"})
    names = {"node-classification": "node_head", "graph-classification": "graph_head"}
    mine = names.pop(model.request.head or "", None)
    head = () if mine is None else (Key("head", mine),)
    return KeyMap(tuple(Key(name, name) for name in body), head, unused=tuple(names.values()))


class GraphHead(nn.Module):
    """Logits (B, K) of graphs from one vector (B, E) of each."""

    def __init__(self, width: int, labels: int):
        super().__init__()
        self.out = nn.Linear(width, labels)

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) to (..., K)."""
        return self.out(x)


def graph_layers(settings: Settings, default: int) -> int:
    """How many layers: no more than the files have tensors for, where there are files."""
    return (settings.layers if settings.stored else settings.count)("num_hidden_layers", default)


def graph_mean(x: Tensor, graphs: GraphBatch) -> Tensor:
    """The mean (B, E) of each graph's nodes (N, E)."""
    total = x.new_zeros(len(graphs.sizes), x.shape[1]).index_add(0, graphs.batch, x)
    return total / graphs.sizes[:, None]


def feature_dropout(x: Tensor, dropout: nn.Dropout) -> Tensor:
    """`dropout(x)`, drawn only for what is not 0 where x is given and not computed.

    Features that count words are nearly all 0, and to draw for each of them takes longer than a layer.
    """
    if not dropout.training or x.requires_grad:  # a gradient reaches zeros, too
        return dropout(x)
    places = x.flatten().nonzero()[:, 0]
    kept = dropout(x.flatten()[places])
    return x.new_zeros(x.numel()).index_copy_(0, places, kept).view_as(x)


def check_features(name: str, given: object, features: int, dtype: torch.dtype, count: int | None = None) -> None:
    """TypeError or ValueError unless it is (count, features) in the weights' dtype, all finite."""
    if not isinstance(given, Tensor) or given.dtype != dtype:
        came = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise TypeError(f"{name}: expected a tensor of the weights' {dtype}, got {came}")
    rows = "n" if count is None else count
    if given.ndim != 2 or given.shape[1] != features or count not in (None, len(given)):
        raise ValueError(f"{name}: expected shape ({rows}, {features}), got {tuple(given.shape)}")
    # NaN is the smallest and the largest, too; one pass over many features is worth it in each step.
    if given.numel() and not bool(torch.stack(given.aminmax()).isfinite().all()):
        raise ValueError(f"{name}: holds NaN or infinite values")

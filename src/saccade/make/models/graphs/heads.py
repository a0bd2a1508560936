"""Parts shared by the graph models: input features, output heads, and key maps of models without published weights.

Shape legend: N nodes, B graphs, F features, E width, K labels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..checkpoints.keys import Key, KeyMap
from ..checkpoints.settings import CheckpointSettings
from ..model import Model
from .structure import GraphBatch

HEADS = {"node-classification": "ForNodeClassification", "graph-classification": "ForGraphClassification"}


def graph_keys(model: Model) -> KeyMap:
    """Key map of a model without a published format: Saccade's names, with heads named by their input."""
    body = sorted({name.split(".")[0] for name, _ in model.named_parameters()} - {"head"})
    names = {"node-classification": "node_head", "graph-classification": "graph_head"}
    mine = names.pop(model.request.head or "", None)
    head = () if mine is None else (Key("head", mine),)
    return KeyMap(tuple(Key(name, name) for name in body), head, unused=tuple(names.values()))


class GraphHead(nn.Module):
    """Classifies graphs: logits (B, K) from a vector (B, E) of each."""

    def __init__(self, width: int, labels: int):
        super().__init__()
        self.out = nn.Linear(width, labels)

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) to (..., K)."""
        return self.out(x)


def graph_layers(settings: CheckpointSettings, default: int) -> int:
    """The number of layers; at most the number of stored tensors, if there are files."""
    return (settings.layers if settings.stored else settings.count)("num_hidden_layers", default)


def graph_mean(x: Tensor, graphs: GraphBatch) -> Tensor:
    """The mean (B, E) of each graph's nodes (N, E)."""
    total = x.new_zeros(len(graphs.sizes), x.shape[1]).index_add(0, graphs.batch, x)
    return total / graphs.sizes[:, None]


def feature_dropout(x: Tensor, dropout: nn.Dropout) -> Tensor:
    """`dropout(x)` that draws random numbers only for entries other than 0, if x is an input without gradient.

    Bag-of-words features are nearly all 0, and random numbers for all of them take longer than a layer.
    """
    if not dropout.training or x.requires_grad:  # zeros have gradients, too
        return dropout(x)
    places = x.flatten().nonzero()[:, 0]
    kept = dropout(x.flatten()[places])
    return x.new_zeros(x.numel()).index_copy_(0, places, kept).view_as(x)


def check_features(name: str, given: object, features: int, dtype: torch.dtype, count: int | None = None) -> None:
    """TypeError or ValueError unless a tensor is (count, features), of the weights' dtype and finite."""
    if not isinstance(given, Tensor) or given.dtype != dtype:
        came = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise TypeError(f"{name}: expected a tensor of the weights' {dtype}, got {came}")
    rows = "n" if count is None else count
    if given.ndim != 2 or given.shape[1] != features or count not in (None, len(given)):
        raise ValueError(f"{name}: expected shape ({rows}, {features}), got {tuple(given.shape)}")
    # Minimum and maximum are NaN if any entry is. One pass over large features is affordable in every step.
    if given.numel() and not bool(torch.stack(given.aminmax()).isfinite().all()):
        raise ValueError(f"{name}: contains NaN or infinite values")

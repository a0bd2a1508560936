"""The baselines of graphs: a graph-convolutional network, and the features that it averages.

Shape legend: N nodes, n of them tested, F features, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models.graphs.heads import feature_dropout

Input = tuple[Tensor, Tensor]
"""Features (N, F) and edges (2, M) of a graph."""


def propagation(edges: Tensor, nodes: int) -> Tensor:
    """D^(-1/2) (A + I) D^(-1/2), sparse (N, N), D the row sums of A + I; every edge counts in both directions."""
    own = torch.arange(nodes).expand(2, -1)
    pairs = torch.cat((edges, edges.flip(0), own), 1).unique(dim=1)
    scale = torch.bincount(pairs[0], minlength=nodes).float().rsqrt()
    values = scale[pairs[0]] * scale[pairs[1]]
    return torch.sparse_coo_tensor(pairs, values, (nodes, nodes), check_invariants=False).coalesce()


def two_hops(x: Tensor, edges: Tensor) -> Tensor:
    """The features (N, F) averaged over neighbours twice: a GCN without its layers (Wu et al. 2019, "SGC")."""
    spread = propagation(edges, len(x))
    return torch.sparse.mm(spread, torch.sparse.mm(spread, x))


class GCN(nn.Module):
    """Two layers: A relu(A x W1) W2, with dropout of what each layer reads. Kipf and Welling (2017), equation 9.

    Args:
        features: F.
        hidden: width between the layers.
        labels: K.
    """

    def __init__(self, features: int, hidden: int, labels: int, dropout: float = 0.5):
        super().__init__()
        self.first, self.second = nn.Linear(features, hidden, bias=False), nn.Linear(hidden, labels, bias=False)
        self.dropout = nn.Dropout(dropout)
        for layer in (self.first, self.second):
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Tensor, spread: Tensor) -> Tensor:
        """Logits (N, K) from x (N, F) and the propagation (N, N)."""
        hidden = F.relu(torch.sparse.mm(spread, self.first(feature_dropout(x, self.dropout))))
        return torch.sparse.mm(spread, self.second(self.dropout(hidden)))


def graph_convolution(
    training: Input, numbers: Sequence[int], classes: Sequence[int], tested: Input, labels: int
) -> np.ndarray:
    """The probabilities (N, K) of all nodes of the graph `tested`, by a GCN trained as published.

    16 hidden units, dropout 0.5, 200 steps of Adam at a rate of 0.01 on the whole graph, L2 5e-4 on the first layer.
    The weights are those of the last step, so no validation data are used. PyTorch's generator draws them.

    Args:
        numbers, classes: of the nodes that are learned from.
    """
    x, known = training[0], torch.tensor(numbers)
    spread, truth = propagation(training[1], len(x)), torch.tensor(classes)
    model = GCN(x.shape[1], 16, labels)
    groups = [
        {"params": model.first.parameters(), "weight_decay": 5e-4},
        {"params": model.second.parameters(), "weight_decay": 0.0},
    ]
    optimizer = torch.optim.Adam(groups, lr=0.01)  # its decay is L2: it is added to the gradient
    for _ in range(200):
        optimizer.zero_grad()
        F.cross_entropy(model(x, spread)[known], truth).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        logits = model(tested[0], propagation(tested[1], len(tested[0])))
    found: np.ndarray = logits.double().softmax(-1).numpy()
    return found

"""GAT: attention along the edges of a graph. Velickovic et al., "Graph Attention Networks" (2018).

No residual stream, no norm and no feed-forward layer: x = ELU(attention(dropout(x))), layer after layer. There is no
published format; config.json and the names of tensors are Saccade's own.

Shape legend: N nodes of all graphs, M edges, B graphs, F features, E width, K labels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.settings import CheckpointSettings
from ..graphs.attention import GraphAttention
from ..graphs.heads import HEADS, GraphHead, check_features, feature_dropout, graph_keys, graph_layers, graph_mean
from ..graphs.structure import check_graphs, with_loops
from ..model import Family, Model, Request
from ..output import ModelOutput
from ..output_heads import classification_loss, refuse_labels

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"elu": F.elu, "relu": F.relu}
KINDS = {"gat": "gat", "gatv2": "gatv2"}


class GAT(Model):
    """GAT with one of its heads, or none.

    Attributes:
        layers: a `GraphAttention` each, heads side by side.
        head: of nodes one more layer, the mean of its heads (section 3.3 of the paper); of graphs a linear map of the
            mean of their nodes.
    """

    def __init__(self, settings: CheckpointSettings, request: Request):
        super().__init__()
        if request.mechanism is not None:
            raise ValueError("mechanism: GAT's logits are not dot products, so no other mechanism can replace them")
        self.features = settings.count("num_features")
        self.loops = settings.flag("self_loops", True)
        self.activation = settings.choice("hidden_act", ACTIVATIONS, "elu")
        self.dropout = nn.Dropout(settings.share("hidden_dropout_prob", 0.0))
        heads, width = settings.count("num_attention_heads", 8), settings.count("hidden_size", 64)
        if width % heads:
            raise settings.error("hidden_size", f"a multiple of the {heads} heads")

        def layer(of: int, heads: int, head_width: int, *, concat: bool) -> GraphAttention:
            return GraphAttention(
                of,
                heads,
                head_width,
                kind=settings.choice("attention_type", KINDS, "gat"),
                concat=concat,
                slope=settings.number("negative_slope", 0.2),
                dropout=settings.share("attention_probs_dropout_prob", 0.0),
            )

        widths = [self.features, *[width] * (graph_layers(settings, 1) - 1)]
        self.layers = nn.ModuleList(layer(of, heads, width // heads, concat=True) for of in widths)
        self.head: nn.Module | None = None
        if request.head == "node-classification":
            self.head = layer(width, settings.count("num_output_heads", 1), request.labels, concat=False)
        elif request.head == "graph-classification":
            self.head = GraphHead(width, request.labels)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        batch: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        hidden_states: bool = False,
    ) -> ModelOutput:
        """The hidden states of all nodes, and the output of the head.

        Args:
            x: (N, F), features of the nodes of all graphs.
            edge_index: (2, M), of each edge the node it leads from and the node it leads to, which reads the other.
            batch: (N,), the graph of each node, in rising order; None: one graph.
            labels: (N,) of nodes, -100 where nothing is to be learned; (B,) or (B, K) of graphs.
            hidden_states: whether to return what each layer reads and the last one gives.

        Returns:
            `last_hidden_state` (N, E), `logits` (N, K) or (B, K), `loss`.

        Raises:
            TypeError, ValueError: other features, edges outside of the graph, a graph without nodes.
        """
        if self.head is None:
            refuse_labels(None, labels=labels)
        check_features("x", x, self.features, self.dtype)
        graphs = check_graphs(len(x), edge_index, batch)
        edges = with_loops(graphs) if self.loops else graphs.edges
        states = [x]
        for layer in self.layers:
            x = self.activation(layer(feature_dropout(x, self.dropout), edges))
            states.append(x)
        out = ModelOutput(last_hidden_state=x, hidden_states=tuple(states) if hidden_states else None)
        if self.head is None:
            return out
        if isinstance(self.head, GraphAttention):
            out.logits = self.head(self.dropout(x), edges)
        else:
            out.logits = self.head(graph_mean(x, graphs))
        out.loss = None if labels is None else classification_loss(out.logits, labels)
        return out


FAMILY = Family("GAT", {"saccade-gat": "SaccadeGAT"}, HEADS, GAT, graph_keys, tuple(HEADS))

"""Graphormer: graphs. Ying et al., "Do Transformers Really Perform Bad for Graph Representation?" (2021).

The block with its norms first. What a graph is enters in three ways: a node's degrees are embedded with it, logits get
a bias by the length of the shortest path between two nodes, and one by the edges on that path. A virtual node that all
others see stands for the graph. There is no published format; config.json and the names of tensors are Saccade's own.

Shape legend: N nodes of all graphs, M edges, B graphs, T = N + B tokens, P pairs, E width, H heads, K labels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....operator._biases import Bias
from ....operator._masks import Documents, Edges, Mask
from ....operator.nn import AttentionConfig, BlockConfig, Encoder
from ....operator.nn.stacks import LayerObserver
from ..checkpoints.settings import CheckpointSettings
from ..graphs.heads import HEADS, GraphHead, check_features, graph_keys, graph_layers
from ..graphs.pair_bias import PairBias
from ..graphs.structure import UNREACHED, GraphBatch, Pairs, check_graphs, shortest_paths
from ..inputs import check_kinds
from ..model import Family, Model, Request
from ..output import ModelOutput
from ..output_heads import classification_loss, refuse_labels
from .bert import ACTIVATIONS


class Graphormer(Model):
    """Graphormer with one of its heads, or none.

        A_ij = q_i . k_j / sqrt(D) + b_hops(i, j) + 1 / n sum_n x_(e_n) . w_n,   e_1 ... e_n the path from i to j

    Equations 6 and 7 of the paper. Paths follow the edges' directions. Nodes of all graphs run in one row, with the
    biases of pairs of one graph alone: memory is H P, and P the sum of the squares of the sizes of the graphs. With
    `attention_hops` a node attends only to nodes that near, and to the virtual one: P is the number of those pairs.

    Attributes:
        nodes: a linear map of features, or an embedding of kinds of nodes.
        edges: the same of edges, or None.
        into, out_of: (degrees, E), embeddings of how many edges lead to a node and from it.
        hops: (hops + 2, H), biases by the length of the path; the last but one is of all longer ones, the last of none.
        steps: (D, width of edges, H), w_n of the first D edges of a path, or None.
        virtual: (1, E), the virtual node; `virtual_bias` (1, H) is of all pairs with it.
    """

    def __init__(self, settings: CheckpointSettings, request: Request):
        super().__init__()
        if request.mechanism is not None:
            raise ValueError(
                "mechanism: nodes have no order, and only softmax attention takes the biases of their pairs"
            )
        block = _block(settings)
        width, heads, kept = block.width, block.attention.heads, settings.count("path_length", 5)
        self.nodes = _reader(settings, "node", width)
        inner = settings.count("edge_width", heads)
        self.edges = (
            _reader(settings, "edge", inner) if {"edge_types", "edge_features"} & settings.values.keys() else None
        )
        degrees = settings.count("max_degree", 512) + 1
        self.into, self.out_of = nn.Embedding(degrees, width), nn.Embedding(degrees, width)
        self.hops = nn.Parameter(torch.empty(settings.count("max_hops", 20) + 2, heads))
        self.steps = None if self.edges is None else nn.Parameter(torch.empty(kept, inner, heads))
        self.reach = settings.count("attention_hops") if "attention_hops" in settings else None
        self.virtual, self.virtual_bias = nn.Parameter(torch.empty(1, width)), nn.Parameter(torch.empty(1, heads))
        self.dropout = nn.Dropout(block.dropout)
        self.encoder = Encoder(block, graph_layers(settings, 12))
        self.head = None if request.head is None else GraphHead(width, request.labels)
        for parameter in (self.hops, self.steps, self.virtual, self.virtual_bias):
            if parameter is not None:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        hidden_states: bool = False,
        observe: LayerObserver | None = None,
    ) -> ModelOutput:
        """The hidden states of all nodes and graphs, and the output of the head.

        Args:
            x: (N, F) features of the nodes of all graphs; (N,) ints where nodes are of kinds.
            edge_index: (2, M), of each edge the node it leads from and the node it leads to; undirected graphs have
                each edge in both directions.
            edge_attr: (M, F) features or (M,) kinds of edges, in models that read them.
            batch: (N,), the graph of each node, in rising order; None: one graph.
            labels: (N,) of nodes, -100 where nothing is to be learned; (B,) or (B, K) of graphs.
            hidden_states: whether to return what each layer reads and the last one gives.
            observe: `observe(layer, observation)` is called in each layer; the virtual node stands before its graph.

        Returns:
            `last_hidden_state` (N, E), `pooler_output` (B, E) of the virtual nodes, `logits` (N, K) or (B, K), `loss`.

        Raises:
            TypeError, ValueError: other features, edges outside of the graph, a graph without nodes.
        """
        if self.head is None:
            refuse_labels(None, labels=labels)
        given = _read(self.nodes, "x", x, None)
        graphs = check_graphs(len(given), edge_index, batch)
        along = self._along(graphs, edge_attr)
        tokens = torch.arange(len(given), device=given.device) + graphs.batch + 1
        row = self.virtual.expand(len(given) + len(graphs.sizes), -1)
        row = row.index_copy(0, tokens, given + self._degrees(graphs))
        mask, bias = self._pairs(graphs, tokens, along)
        states: list[Tensor] | None = [] if hidden_states else None
        read = self.encoder(self.dropout(row[None]), mask, bias=bias, observe=observe, hidden_states=states)[0]
        virtual = torch.ones(len(row), dtype=torch.bool, device=row.device)
        virtual[tokens] = False
        out = ModelOutput(
            last_hidden_state=read[tokens],
            pooler_output=read[virtual],
            hidden_states=None if states is None else tuple(state[0, tokens] for state in states),
        )
        if self.head is not None:
            of_nodes = self.request.head == "node-classification"
            out.logits = self.head(out.last_hidden_state if of_nodes else out.pooler_output)
            out.loss = None if labels is None else classification_loss(out.logits, labels)
        return out

    def _degrees(self, graphs: GraphBatch) -> Tensor:
        """(N, E): equation 5."""
        most, nodes = self.into.num_embeddings - 1, len(graphs.batch)
        ends, starts = (torch.bincount(graphs.edges[side], minlength=nodes).clamp(max=most) for side in (1, 0))
        return self.into(ends) + self.out_of(starts)

    def _along(self, graphs: GraphBatch, edge_attr: Tensor | None) -> Tensor | None:
        """x_e . w_n of each edge and place on a path (D, M + 1, H), 0 behind the last edge; None without features."""
        if (edge_attr is None) != (self.edges is None):
            raise ValueError("edge_attr: this model reads no edges" if self.edges is None else "edge_attr: missing")
        if self.edges is None or self.steps is None or edge_attr is None:
            return None
        read = _read(self.edges, "edge_attr", edge_attr, graphs.edges.shape[1])
        return nn.functional.pad(read @ self.steps, (0, 0, 0, 1))

    def _pairs(self, graphs: GraphBatch, tokens: Tensor, along: Tensor | None) -> tuple[Mask, Bias]:
        """The visible pairs and their biases."""
        pairs = shortest_paths(graphs, kept=0 if self.steps is None else len(self.steps), most=self.reach)
        scores = self._scores(pairs, along)
        first, second = tokens[pairs.first], tokens[pairs.second]
        ends = (graphs.sizes + 1).cumsum(0)
        head = ends - graphs.sizes - 1  # the token of each graph's virtual node
        of_node = head[graphs.batch]
        rows = torch.cat((first, of_node, tokens, head))
        keys = torch.cat((second, tokens, of_node, head))
        scores = torch.cat((scores, self.virtual_bias.expand(len(rows) - len(scores), -1)))
        order = (rows * len(tokens) * 2 + keys).argsort()
        rows, keys = rows[order], keys[order]
        mask = Documents.from_cu_seqlens([0, *ends.tolist()]) if self.reach is None else Edges(rows, keys)
        return mask, PairBias(scores[order], rows, keys)

    def _scores(self, pairs: Pairs, along: Tensor | None) -> Tensor:
        """(P, H): by the length of each path, and by its edges."""
        most = len(self.hops) - 2
        scores = self.hops[torch.where(pairs.hops == UNREACHED, most + 1, pairs.hops.clamp(max=most))]
        if along is None:
            return scores
        total = torch.zeros_like(scores)
        for place, edges in enumerate(pairs.path.t()):
            total = total + along[place, edges]  # -1 is the row of zeros
        return scores + total / pairs.hops.clamp(min=1, max=len(along))[:, None]


def _reader(settings: CheckpointSettings, what: str, width: int) -> nn.Module:
    """The embedding of nodes or edges: of kinds, or of features."""
    kinds, features = f"{what}_types", f"{what}_features"
    if (kinds in settings) == (features in settings):
        given = "both" if kinds in settings else "neither"
        raise ValueError(f"{settings.path}: expected either {kinds} or {features}, got {given}")
    return (
        nn.Embedding(settings.count(kinds), width) if kinds in settings else nn.Linear(settings.count(features), width)
    )


def _read(reader: nn.Module, name: str, given: Tensor, count: int | None) -> Tensor:
    if isinstance(reader, nn.Embedding):
        check_kinds(name, given, reader.num_embeddings, count)
    else:
        assert isinstance(reader, nn.Linear)
        check_features(name, given, reader.in_features, reader.weight.dtype, count)
    read: Tensor = reader(given)
    return read


def _block(settings: CheckpointSettings) -> BlockConfig:
    attention = AttentionConfig(
        settings.count("hidden_size", 768),
        settings.count("num_attention_heads", 32),
        bias=True,
        dropout=settings.share("attention_probs_dropout_prob", 0.1),
    )
    return BlockConfig(
        attention,
        hidden=settings.count("intermediate_size", 768),
        activation=settings.choice("hidden_act", ACTIVATIONS, "gelu"),
        norm="layer",
        placement="pre",
        dropout=settings.share("hidden_dropout_prob", 0.0),
        bias=True,
        eps=settings.eps("layer_norm_eps", 1e-5),
    )


FAMILY = Family("Graphormer", {"saccade-graphormer": "SaccadeGraphormer"}, HEADS, Graphormer, graph_keys, tuple(HEADS))

"""`graph`: classes of the nodes of a graph. GAT, or a graph transformer, on one graph that is read as a whole.

Learning is transductive: nodes whose labels are unknown take part in training with their features and edges.

Shape legend: N nodes, n of them predicted, M edges, F features, K classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...see.monitoring import Observations
from ...support._numbers import named_values
from ...support._restored import evaluating
from .._task_registry import GraphOptions
from ..models import Model, load, new_graph_model
from ..training import Objective, Settings
from ..training.memory import INPUT_SMALLER, memory_told
from ._baselines import MOST_FREQUENT, most_frequent_class, strongest_regression
from ._classes._results import class_details, class_scores, listed, stratified
from ._examples import read_lines
from ._graphs._baselines import graph_convolution, two_hops
from ._graphs._data import Graph, Node, Nodes
from ._graphs._files import graph_files, read_graph
from ._graphs._objective import GraphObjective, node_logits
from ._graphs._observed import observed_graph
from ._graphs._picture import neighbourhoods
from ._task import Baseline, Details, Task, Tested

KINDS = ("gat", "gatv2", "graphormer")
SCALES = ("auto", "columns", "rows", "none")
METRICS = {"loss": "accuracy", "accuracy": "accuracy", "f1": "macro F1"}  # by option: what reports compare by


@dataclasses.dataclass(frozen=True)
class ClassifyNodes(GraphOptions, Task):
    """Classes of the nodes of a graph.

    A test reads the nodes that are marked `test`, usually of the same file; another graph needs the same features.
    Each step reads the whole graph and learns from all training nodes, so an epoch is a step; looks come every 20
    steps. Graphormer takes seconds a step from some thousand nodes on. In a picture, lines are as wide as attention
    weights.

    Args:
        kind: "gat" (Velickovic et al. 2018), "gatv2" (Brody et al. 2022) or "graphormer" (Ying et al. 2021).
        layers: of a new model; GAT's last one gives the classes.
        heads: of each layer; GAT's last one has one.
        width: of all heads together.
        dropout: on the input of each layer; in Graphormer on what its blocks add.
        attention_dropout: of attention weights.
        hops: how far a node of Graphormer sees, beside the virtual node; GAT sees one hop in each layer.
        scale: of features: "columns" makes each have mean 0 and deviation 1 over the training graph; "rows" divides
            those of a node by the sum of their sizes, as is usual for counts of words; "none"; "auto" takes "rows" for
            20 or more features that are nowhere negative and each 0 for at least half of the nodes, else "columns".
        directed: whether only an edge's target reads its source; otherwise both read each other.
        l2: the penalty on large weights in training: l2 / 2 times the sum of their squares, without vectors. It is
            added to AdamW's own decay, which `decay=0` switches off.
        metric: what the best weights are chosen by: "loss", "accuracy" or "f1" (the mean over classes). Accuracy on
            some hundred nodes is a coarse number; it peaks by chance while the loss still falls.
        labels: the classes, in the order of the model's logits; learned from the training nodes, like the fields below.
        means, deviations: of the features, where `scale` is "columns".
        features: how many there are.
        source: the training graph, in which `predict` looks up nodes by name.

    Raises:
        ValueError: an option outside of its range.

    Example:
        >>> import pathlib, tempfile, numpy, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "graph.npz")
        ...     numpy.savez(
        ...         path,
        ...         features=numpy.eye(3),
        ...         edges=numpy.array([[0, 1], [1, 2]]),
        ...         labels=numpy.array(["left", "left", "right"]),
        ...     )
        ...     nodes = saccade.tasks.ClassifyNodes().read(path)
        >>> [node.label for node in nodes]
        ['left', 'left', 'right']
    """

    labels: tuple[str, ...] = ()
    means: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()
    features: int = 0
    source: str = ""

    unit = "nodes"
    learned = ("labels", "means", "deviations", "features", "source")
    requires = ("sklearn.metrics",)
    protocol = "all features and edges are read, labels of test nodes are not"

    def __post_init__(self) -> None:
        for name, known in (("kind", KINDS), ("scale", SCALES), ("metric", tuple(METRICS))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {', '.join(map(repr, known))}, got {getattr(self, name)!r}")
        for name in ("layers", "heads", "width", "hops"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}: must be in [0, 1), got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"heads: must divide the width, got heads={self.heads} and width={self.width}")
        if self.kind != "graphormer" and self.layers < 2:
            raise ValueError(f"layers: GAT has two or more, the last of which names the classes; got {self.layers}")
        if not (np.isfinite(self.l2) and self.l2 >= 0):
            raise ValueError(f"l2: must be finite and not negative, got {self.l2}")

    # --- data ---------------------------------------------------------------------------------------------------------

    def read(self, path: Path) -> Nodes:
        """The nodes to train and to validate on."""
        graph = self._graph(path)
        nodes = Nodes(graph, graph.learning)  # none where a graph is only tested
        self._check_labels(nodes)
        return nodes

    def tested(self, data: Sequence[Any]) -> Nodes:
        """The test nodes of the same graph."""
        graph = _nodes(data).graph
        if not len(graph.parts.get("test", ())):
            raise ValueError(
                f"{graph.place}: no node to test; expected 'test' in the column 'split' of nodes.csv, or an array "
                "'test' in an .npz"
            )
        nodes = Nodes(graph, graph.parts["test"])
        self._check_labels(nodes)
        return nodes

    def files(self, path: Path) -> Sequence[Path]:
        return graph_files(path)

    def split(self, data: Sequence[Any], share: float, seed: int) -> tuple[Nodes, Nodes]:
        """The file's validation nodes; without any, a share of each class."""
        nodes = _nodes(data)
        judged = nodes.graph.parts.get("validation")
        if judged is None or not len(judged):
            judged = nodes.numbers[sorted(stratified(nodes.labels, share, seed))]
        return Nodes(nodes.graph, np.setdiff1d(nodes.numbers, judged)), Nodes(nodes.graph, judged)

    def fitted(self, training: Sequence[Any]) -> ClassifyNodes:
        nodes = _nodes(training)
        labels = tuple(sorted({label for label in nodes.labels if label is not None}))
        if len(labels) < 2:
            none = "there is no node to learn from, with a label or named by 'train'"
            named = f"every training node is {labels[0]!r}" if labels else none
            raise ValueError(f"{nodes.graph.place}: label: expected two classes or more, {named}")
        features, means, deviations = nodes.graph.features, (), ()
        scale = ("rows" if _of_words(features) else "columns") if self.scale == "auto" else self.scale
        if scale == "columns":
            means = tuple(features.mean(0, dtype=np.float64).tolist())
            spread = features.std(0, dtype=np.float64)
            deviations = tuple(np.where(spread > 0, spread, 1.0).tolist())
        task = dataclasses.replace(
            self,
            labels=labels,
            scale=scale,
            means=means,
            deviations=deviations,
            features=features.shape[1],
            source=str(Path(nodes.graph.place).resolve()),
        )
        task._check_labels(Nodes(nodes.graph, nodes.graph.parts.get("validation", np.array([], np.int64))))
        return task

    def inputs(self, texts: Sequence[str]) -> Nodes:
        """Nodes of the training graph by their names."""
        graph = self._graph(Path(self.source), labelled=False)
        numbers = {name: number for number, name in enumerate(graph.ids)}
        for text in texts:
            if text not in numbers:
                raise ValueError(
                    f"node {text!r:.60}: is not in {graph.place}, which has {len(numbers):,}: "
                    f"{', '.join(map(repr, graph.ids[:3]))}, ..."
                )
        return Nodes(graph, np.array([numbers[text] for text in texts], np.int64))

    def read_inputs(self, path: Path) -> Nodes:
        """The unlabelled nodes of a graph; for a .txt the nodes of the training graph that its lines name."""
        if path.suffix.lower() == ".txt":
            return self.inputs(read_lines(path))
        graph = self._graph(path, labelled=False)
        unknown = np.array([number for number, label in enumerate(graph.labels) if label is None], np.int64)
        if not len(unknown):
            raise ValueError(f"{path}: every node has a label; name those to predict, or list them in a .txt")
        return Nodes(graph, unknown)

    def tensors(self, graph: Graph) -> tuple[Tensor, Tensor]:
        """The model's inputs: scaled features (N, F) and edges (2, M)."""
        x = graph.features
        if self.scale == "columns":
            x = ((x - np.array(self.means)) / np.array(self.deviations)).astype(np.float32)
        elif self.scale == "rows":
            total = np.abs(x).sum(1, keepdims=True)
            x = x / np.where(total > 0, total, 1)
        return torch.from_numpy(x), torch.from_numpy(graph.edges)

    def truth(self, nodes: Nodes) -> np.ndarray:
        """The numbers (n,) of the classes of nodes."""
        numbers = {label: number for number, label in enumerate(self.labels)}
        return np.array([numbers[label or ""] for label in nodes.labels], np.int64)

    def _graph(self, path: Path, *, labelled: bool = True) -> Graph:
        graph = read_graph(path, directed=self.directed, labelled=labelled)
        if self.features and graph.features.shape[1] != self.features:
            raise ValueError(
                f"{path}: expected the {self.features:,} features of training, got {graph.features.shape[1]:,}"
            )
        return graph

    def _check_labels(self, nodes: Nodes) -> None:
        for node in nodes if self.labels else ():
            if node.label not in self.labels:
                raise ValueError(
                    f"{nodes.graph.place}: node {node.id!r}: no training node has the label {node.label!r}; they have "
                    f"{listed(self.labels)}"
                )

    # --- model --------------------------------------------------------------------------------------------------------

    def new_model(self, training: Sequence[Any]) -> Model:
        sizes = {"hidden_size": self.width, "num_attention_heads": self.heads}
        dropouts = {
            "hidden_dropout_prob": self.dropout,
            "attention_probs_dropout_prob": self.attention_dropout,
        }
        settings: dict[str, Any] = {**sizes, **dropouts}
        if self.kind == "graphormer":
            settings |= {"node_features": self.features, "num_hidden_layers": self.layers}
            settings |= {"intermediate_size": 2 * self.width, "attention_hops": self.hops}
        else:
            settings |= {"num_features": self.features, "num_hidden_layers": self.layers - 1}
            settings |= {"attention_type": self.kind}
        family = "saccade-graphormer" if self.kind == "graphormer" else "saccade-gat"
        return new_graph_model(family, head="node-classification", labels=list(self.labels), **settings)

    def open_model(self, source: Path | str) -> Model:
        model = load(source, head="node-classification", labels=list(self.labels), dtype=torch.float32)
        found = model.settings.get("num_features", model.settings.get("node_features"))
        if found != self.features:
            raise ValueError(f"{source}: reads {found} features, and the graph has {self.features:,}")
        return model

    def objective(
        self, model: Model, training: Sequence[Any], validation: Sequence[Any], settings: Settings
    ) -> Objective:
        return GraphObjective(self, model, _nodes(training), _nodes(validation), settings)

    def predict(self, model: Model, data: Sequence[Any]) -> list[np.ndarray]:
        """The probabilities (K,) of each node, float64."""
        nodes = _nodes(data)
        x, edges = self.tensors(nodes.graph)
        with memory_told("graph: the whole graph", lambda: INPUT_SMALLER), evaluating(model), torch.no_grad():
            logits = node_logits(model, (x.to(model.device), edges.to(model.device))).cpu()
        return list(logits[nodes.numbers].double().softmax(-1).numpy())

    def read_observed(self, path: Path) -> Nodes:
        graph = self._graph(path, labelled=False)
        return Nodes(graph, np.arange(len(graph.ids)))

    def observed(self, model: Model, data: Sequence[Any]) -> tuple[Observations, list[str]]:
        graph = _nodes(data).graph
        return observed_graph(model, self.tensors(graph), list(graph.ids))

    # --- results ------------------------------------------------------------------------------------------------------

    def scores(self, outputs: Sequence[np.ndarray], data: Sequence[Any]) -> dict[str, float]:
        return class_scores(outputs, self.truth(_nodes(data)))

    def validated_by(self, share: float, seed: int) -> str:
        return f"its validation nodes, or where it names none {super().validated_by(share, seed)}"

    def cost(self, scores: Mapping[str, float]) -> float:
        return -scores[METRICS[self.metric]]

    def constant(self, model: Model, training: Sequence[Any], tested: Sequence[Any]) -> Baseline:
        return Baseline(MOST_FREQUENT, most_frequent_class(self.truth(_nodes(training)), len(self.labels), len(tested)))

    def baselines(
        self, model: Model, training: Sequence[Any], validation: Sequence[Any], tested: Sequence[Any]
    ) -> list[Baseline]:
        known, asked = _nodes(training), _nodes(tested)
        graph, other = (self.tensors(nodes.graph) for nodes in (known, asked))
        spread = graph_convolution(graph, known.numbers.tolist(), self.truth(known).tolist(), other, len(self.labels))
        return [
            self._regression("features alone", lambda x, edges: x, training, validation, tested),
            Baseline("GCN (two layers, 16 wide)", list(spread[asked.numbers])),
        ]

    def quick_baselines(
        self, model: Model, training: Sequence[Any], validation: Sequence[Any], tested: Sequence[Any]
    ) -> list[Baseline]:
        kinds = {"features alone": lambda x, edges: x, "features averaged over two hops": two_hops}
        return [self._regression(name, read, training, validation, tested) for name, read in kinds.items()]

    def _regression(self, name: str, read: Callable[[Tensor, Tensor], Tensor], *parts: Sequence[Any]) -> Baseline:
        """Logistic regression of training, validation and tested nodes on what `read` makes of features and edges."""
        known, judged, asked = map(_nodes, parts)
        rows = [read(*self.tensors(nodes.graph)).numpy()[nodes.numbers] for nodes in (known, judged, asked)]
        found, strength = strongest_regression((rows[0], self.truth(known)), (rows[1], self.truth(judged)), rows[2])
        return Baseline(f"logistic regression on {name} (C = {strength:g})", list(found))

    def details(self, outputs: Sequence[np.ndarray], data: Sequence[Any]) -> Details:
        return class_details(self.labels, outputs, self.truth(_nodes(data)))

    def picture(self, tested: Tested, kind: str) -> bytes:
        """The attention of the last layer at a few nodes."""
        nodes = _nodes(tested.data)
        graph = self.tensors(nodes.graph)
        return neighbourhoods(tested.model, graph, nodes, np.asarray(tested.outputs), self.labels, kind)

    def shown(self, example: Node, output: np.ndarray) -> dict[str, Any]:
        probabilities = dict(zip(self.labels, output.tolist(), strict=True))
        label = max(probabilities, key=probabilities.__getitem__)
        return {"node": example.id, "label": label, "probabilities": probabilities}

    def line(self, shown: Mapping[str, Any]) -> str:
        likely = sorted(shown["probabilities"].items(), key=lambda pair: -pair[1])[:3]
        return f"{named_values(likely)}  {shown['node']}"


def _of_words(features: np.ndarray) -> bool:
    """Whether features (N, F) look like word counts: many, not negative, and each zero for most nodes."""
    return features.shape[1] >= 20 and bool(features.min() >= 0 and ((features > 0).mean(0) <= 0.5).all())


def _nodes(data: Sequence[Any]) -> Nodes:
    assert isinstance(data, Nodes)
    return data

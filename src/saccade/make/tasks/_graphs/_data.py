"""One graph whose nodes have features and labels, and sets of its nodes.

Shape legend: N nodes, M edges, F features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, overload

import numpy as np

PARTS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """The graph of a file.

    Args:
        features: float32 (N, F).
        edges: int64 (2, M), of each edge the node it leads from and the node it leads to; each once, and unless the
            graph is directed in both directions.
        ids: the name of each node, each another.
        labels: of each node; None if unknown.
        parts: numbers of nodes by `PARTS`, as far as the file says; all of them have labels.
        place: the file or folder.
    """

    features: np.ndarray
    edges: np.ndarray
    ids: tuple[str, ...]
    labels: tuple[str | None, ...]
    parts: Mapping[str, np.ndarray]
    place: str

    @property
    def learning(self) -> np.ndarray:
        """The nodes for training and validation: as the file marks them, else all labelled ones but test nodes."""
        if "train" in self.parts:
            return np.union1d(self.parts["train"], self.parts.get("validation", []))
        labelled = np.array([n for n, label in enumerate(self.labels) if label is not None], np.int64)
        return np.setdiff1d(labelled, self.parts.get("test", []))


class Node(NamedTuple):
    """A node: its name, and its label if that is known."""

    id: str
    label: str | None


class Nodes(Sequence[Node]):
    """Some nodes of a graph. The others take part, too: a node reads its neighbours, but for their labels.

    Args:
        numbers: int64, of the nodes in the graph.
    """

    def __init__(self, graph: Graph, numbers: np.ndarray):
        self.graph, self.numbers = graph, np.asarray(numbers, np.int64)

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, at: int) -> Node: ...
    @overload
    def __getitem__(self, at: slice) -> Nodes: ...
    def __getitem__(self, at: int | slice) -> Node | Nodes:
        if isinstance(at, slice):
            return Nodes(self.graph, self.numbers[at])
        number = int(self.numbers[at])
        return Node(self.graph.ids[number], self.graph.labels[number])

    @property
    def labels(self) -> list[str | None]:
        return [node.label for node in self]

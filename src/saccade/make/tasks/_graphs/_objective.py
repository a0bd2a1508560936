"""The training objective on one graph: every step reads the whole graph, and its loss is over labelled nodes.

Shape legend: N nodes, n of them in a batch, M edges, F features, K classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....operator.nn.stacks import LayerObserver
from ....support._restored import evaluating
from ...models import Model
from ...training import Evaluation, Objective, Settings
from .._example_task import widened
from ._data import Graph, Nodes

if TYPE_CHECKING:
    from accelerate import Accelerator

Batch = dict[str, Tensor]
"""`nodes` (n,), their numbers, and `labels` (n,)."""


class NodeTask(Protocol):
    """The data of a task on nodes. `tensors`: features (N, F) and edges (2, M); `truth`: classes (n,)."""

    @property
    def l2(self) -> float: ...
    @property
    def metric(self) -> str: ...

    def tensors(self, graph: Graph) -> tuple[Tensor, Tensor]: ...
    def truth(self, nodes: Nodes) -> np.ndarray: ...
    def scores(self, outputs: Sequence[np.ndarray], data: Sequence[Any]) -> dict[str, float]: ...
    def cost(self, scores: Mapping[str, float]) -> float: ...


class GraphObjective(Objective):
    """The cross-entropy of labelled nodes, for which the model reads the whole graph, and an L2 penalty.

    A batch is numbers of nodes; the graph is the same in all of them. So parts of a batch are parts of its nodes.
    """

    model: Model

    def __init__(self, task: NodeTask, model: Model, training: Nodes, validation: Nodes, settings: Settings):
        self.model, self._task, self._validation, self._seed = model, task, validation, settings.seed
        self._graph = task.tensors(training.graph)
        self._judged_graph = self._graph if validation.graph is training.graph else task.tensors(validation.graph)
        self._nodes, self._labels = _labelled(task, training)
        self._judged = dict(zip(("nodes", "labels"), _labelled(task, validation), strict=True))
        self._batch = min(settings.batch, len(training))

    def batch(self, step: int) -> Batch:
        epoch, number = divmod(step, len(self._nodes) // self._batch)
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._nodes))
        chosen = torch.from_numpy(np.sort(order[number * self._batch : (number + 1) * self._batch]))
        return {"nodes": self._nodes[chosen], "labels": self._labels[chosen]}

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        tensors = {name: tensor.tensor_split(parts) for name, tensor in batch.items()}
        return [{name: pieces[n] for name, pieces in tensors.items()} for n in range(parts)]

    def weight(self, part: Batch) -> float:
        return len(part["nodes"])

    def tokens(self, batch: Batch) -> int:
        return len(batch["nodes"])

    def loss(self, model: nn.Module, part: Batch, observe: LayerObserver | None = None) -> Tensor:
        self._graph = _on(self._graph, self.model.device)
        taken = observe is not None and "observe" in inspect.signature(self.model.forward).parameters
        given: dict[str, Any] = {"observe": observe} if taken else {}
        loss = F.cross_entropy(node_logits(model, self._graph, **given)[part["nodes"]], part["labels"])
        return loss + self._task.l2 / 2 * _squares(self.model) if self._task.l2 else loss

    def evaluate(self, model: nn.Module, accelerator: Accelerator | None = None) -> Evaluation:
        """Metrics of all validation nodes. Every process computes them, so that none has to wait."""
        self._judged_graph = _on(self._judged_graph, self.model.device)
        with evaluating(model), torch.no_grad():
            logits = node_logits(model, self._judged_graph).cpu()[self._judged["nodes"]]
        loss = float(F.cross_entropy(logits, self._judged["labels"]))
        scores = self._task.scores(list(logits.double().softmax(-1).numpy()), self._validation)
        return Evaluation(loss, scores, None if self._task.metric == "loss" else self._task.cost(scores))


def node_logits(model: nn.Module, graph: tuple[Tensor, Tensor], **given: Any) -> Tensor:
    """The logits (N, K) of all nodes of a graph of features (N, F) and edges (2, M), in float32 or wider."""
    return widened(model(*graph, **given).logits)


def _labelled(task: NodeTask, nodes: Nodes) -> tuple[Tensor, Tensor]:
    """Numbers (n,) and classes (n,)."""
    return torch.from_numpy(nodes.numbers), torch.from_numpy(task.truth(nodes))


def _on(graph: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    return graph[0].to(device), graph[1].to(device)


def _squares(model: nn.Module) -> Tensor:
    """The sum of the squares of all matrices."""
    return torch.stack([p.square().sum() for p in model.parameters() if p.ndim >= 2]).sum()

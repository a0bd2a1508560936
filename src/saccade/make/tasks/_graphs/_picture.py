"""The picture of a test on a graph: attention of the last layer at a few nodes.

Shape legend: N nodes, n of them tested, K classes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....see.monitoring import watch
from ....support._restored import evaluating
from ...models import Model
from ...models.graphs.attention import GraphAttention
from ._data import Nodes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN, WRONG = 6, 3  # nodes of a picture, and how many of them are wrong ones, if so many are
MOST = 12  # neighbours of a node: those with the greatest weights
VIRTUAL = -1  # the number of the virtual node
UNKNOWN = "0.8"  # color of a node whose label is not known


class Attended(NamedTuple):
    """The attention of a node.

    Args:
        nodes: numbers in the graph, the greatest weight first; `VIRTUAL` is the virtual node.
        weights: of each, the mean over heads.
    """

    nodes: np.ndarray
    weights: np.ndarray


def neighbourhoods(
    model: Model, graph: tuple[Tensor, Tensor], nodes: Nodes, outputs: np.ndarray, labels: Sequence[str], kind: str
) -> bytes:
    """A "png" or "svg" with a drawing for each node: the node in the middle, its attention around it.

    The nodes are the wrong ones of which the model is surest, and the right ones of which it is surest.

    Args:
        graph: features and edges, as the model reads them.
        nodes: those tested, with their probabilities `outputs` (n, K).
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    numbers = {label: number for number, label in enumerate(labels)}
    chosen = chosen_nodes(outputs, np.array([numbers[label or ""] for label in nodes.labels]))
    attended = attended_by(model, graph, nodes.numbers[chosen].tolist())
    rows = -(-len(chosen) // 3)
    figure = Figure(figsize=(11, 3.6 * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, 3, squeeze=False).ravel()
    for place in axes:
        place.set_axis_off()
    for place, at, seen in zip(axes, chosen, attended, strict=False):
        _draw(place, nodes, int(nodes.numbers[at]), seen, labels)
        node, said = nodes[at], int(outputs[at].argmax())
        place.set_title(f"{node.id}: {labels[said]} ({outputs[at, said]:.2f}), truth {node.label}", fontsize=9)
    marks = [Line2D([], [], marker="o", linestyle="", color=_color(n), label=name) for n, name in enumerate(labels)]
    if any(not_named(nodes, node, labels) for seen in attended for node in seen.nodes[:MOST].tolist()):
        marks.append(Line2D([], [], marker="o", linestyle="", color=UNKNOWN, label="label unknown"))
    trained = Line2D([], [], marker="s", linestyle="", markerfacecolor="white", color="0.3", label="trained on")
    figure.legend(handles=[*marks, trained], loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    written = io.BytesIO()
    figure.savefig(written, format=kind, dpi=144)
    return written.getvalue()


def not_named(nodes: Nodes, node: int, labels: Sequence[str]) -> bool:
    """Whether a node is drawn as unlabelled."""
    return node != VIRTUAL and nodes.graph.labels[node] not in labels


def chosen_nodes(outputs: np.ndarray, truth: np.ndarray) -> list[int]:
    """The tested nodes (n,) to draw: the most certain wrong ones, then the most certain right ones."""
    found, sure = outputs.argmax(1), outputs.max(1)
    order = np.argsort(-sure, kind="stable")
    wrong = [int(n) for n in order if found[n] != truth[n]]
    right = [int(n) for n in order if found[n] == truth[n]]
    few = wrong[: max(WRONG, SHOWN - len(right))]
    return [*few, *right][:SHOWN]


def attended_by(model: Model, graph: tuple[Tensor, Tensor], nodes: Sequence[int]) -> list[Attended]:
    """The attention of each node in the model's last layer."""
    graph = (graph[0].to(model.device), graph[1].to(model.device))
    with evaluating(model), torch.no_grad():
        weigh = _along_edges if isinstance(model.head, GraphAttention) else _in_blocks
        return [_sorted(*one) for one in weigh(model, graph, nodes)]


def _sorted(nodes: Tensor, weights: Tensor) -> Attended:
    order = weights.argsort(descending=True, stable=True)
    return Attended(nodes[order].cpu().numpy(), weights[order].cpu().numpy())


def _along_edges(model: Model, graph: tuple[Tensor, Tensor], nodes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """The attention of a GAT's last layer, which has a weight for each edge."""
    last, given = model.head, []
    assert isinstance(last, GraphAttention)
    with last.register_forward_pre_hook(lambda _, arguments: given.append(arguments)):
        model(*graph)
    ((x, edges),) = given
    weights = last.weights(x, edges).mean(1)
    return [(edges[0, edges[1] == node], weights[edges[1] == node]) for node in nodes]


def _in_blocks(model: Model, graph: tuple[Tensor, Tensor], nodes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """The attention of a Graphormer: token 0 is the virtual node, the others are the nodes."""
    last = len(model.encoder.blocks) - 1  # type: ignore[union-attr, arg-type]
    with watch(model, layers=[last], keep=[last]) as watched:
        model(*graph)
    (call,) = watched.calls
    rows = torch.tensor(nodes, device=model.device) + 1
    weights = watched.weights(call.name, rows=rows)[0].mean(0)
    seen = [row.nonzero()[:, 0] for row in weights]
    return [(tokens - 1, row[tokens]) for tokens, row in zip(seen, weights, strict=True)]


def _draw(axes: Axes, nodes: Nodes, middle: int, attended: Attended, labels: Sequence[str]) -> None:
    """Draw one node, and around it the `MOST` nodes with the largest weights."""
    kept = [(int(node), float(weight)) for node, weight in zip(*attended, strict=True)][:MOST]
    others = [(node, weight) for node, weight in kept if node != middle]
    trained = set(nodes.graph.parts.get("train", np.array([], np.int64)).tolist())
    for place, (node, weight) in enumerate(others):
        angle = 2 * math.pi * place / len(others) + math.pi / 2
        x, y = math.cos(angle), math.sin(angle)
        axes.plot([0, x], [0, y], color="0.55", linewidth=0.4 + 9 * weight, zorder=1, solid_capstyle="round")
        _mark(axes, nodes, node, (x, y), labels, trained)
        name = "virtual" if node == VIRTUAL else nodes.graph.ids[node]
        axes.text(1.32 * x, 1.22 * y, f"{name}\n{weight:.2f}", ha="center", va="center", fontsize=6.5)
    _mark(axes, nodes, middle, (0, 0), labels, trained)
    own = sum(weight for node, weight in kept if node == middle)
    behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    axes.text(0, -0.26, f"itself {own:.2f}", ha="center", va="center", fontsize=6.5, bbox=behind, zorder=3)
    rest = float(attended.weights[MOST:].sum())
    if len(attended.nodes) > MOST:
        axes.text(1.6, -1.45, f"and {len(attended.nodes) - MOST} more: {rest:.2f}", ha="right", fontsize=6.5)
    axes.set(xlim=(-1.7, 1.7), ylim=(-1.5, 1.5), aspect="equal")


def _mark(
    axes: Axes, nodes: Nodes, node: int, at: tuple[float, float], labels: Sequence[str], trained: set[int]
) -> None:
    label = None if node == VIRTUAL else nodes.graph.labels[node]
    color = _color(labels.index(label)) if label in labels else UNKNOWN
    shape = "s" if node in trained else "o"
    axes.scatter(*at, s=110 if at == (0, 0) else 60, marker=shape, color=color, edgecolors="0.2", zorder=2)


def _color(number: int) -> str:
    return f"C{number % 10}"

"""Checked batches of graphs, and shortest paths between their nodes.

A batch of graphs is one graph with unconnected parts: the nodes of all graphs are concatenated without padding, as in
PyTorch Geometric.

Shape legend: N nodes of all graphs, M edges, B graphs, P pairs, D stored edges of a path.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

UNREACHED = -1


class GraphBatch(NamedTuple):
    """The structure of a batch of graphs.

    Attributes:
        edges: int64 (2, M), start node and end node of each edge.
        batch: int64 (N,), the graph of each node, ascending.
        sizes: int64 (B,), number of nodes of each graph.
    """

    edges: Tensor
    batch: Tensor
    sizes: Tensor


class Pairs(NamedTuple):
    """Pairs of nodes with a shortest path from the first to the second, sorted by first and second.

    Attributes:
        first, second: int64 (P,).
        hops: int64 (P,), length of the path; `UNREACHED` without a path.
        path: int64 (P, D), indices of its first D edges, then -1.
    """

    first: Tensor
    second: Tensor
    hops: Tensor
    path: Tensor


def check_graphs(nodes: int, edge_index: Tensor, batch: Tensor | None) -> GraphBatch:
    """Check a batch of graphs with `nodes` nodes.

    Args:
        edge_index: (2, M) ints; edges may be directed, loops, or duplicates.
        batch: (N,) ints, the graph of each node, ascending from 0; None: one graph.

    Raises:
        TypeError, ValueError: no node, other shapes, nodes out of range, a graph without nodes, an edge between graphs.
    """
    if not nodes:
        raise ValueError("x: a graph without nodes, expected at least one")
    if not isinstance(edge_index, Tensor) or edge_index.is_floating_point() or edge_index.dtype == torch.bool:
        came = edge_index.dtype if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise TypeError(f"edge_index: expected a tensor of node numbers (2, edges), got {came}")
    if edge_index.ndim != 2 or edge_index.shape[0] != 2:
        raise ValueError(f"edge_index: expected shape (2, edges), got {tuple(edge_index.shape)}")
    edges = edge_index.long()
    if edges.numel() and (int(edges.min()) < 0 or int(edges.max()) >= nodes):
        wrong = int(edges.min()) if int(edges.min()) < 0 else int(edges.max())
        raise ValueError(f"edge_index: nodes must be from 0 to {nodes - 1}, got {wrong}")
    if batch is None:
        batch = torch.zeros(nodes, dtype=torch.int64, device=edges.device)
    if not isinstance(batch, Tensor) or batch.is_floating_point() or batch.shape != (nodes,):
        shape = tuple(batch.shape) if isinstance(batch, Tensor) else type(batch).__name__
        raise ValueError(f"batch: expected ints ({nodes},), the graph of each node, got {shape}")
    batch = batch.long()
    if int(batch[0]) or bool((batch.diff() < 0).any()) or bool((batch.diff() > 1).any()):
        raise ValueError("batch: expected graph numbers ascending from 0, each with at least one node")
    across = batch[edges[0]] != batch[edges[1]]
    if bool(across.any()):
        edge = int(across.nonzero()[0, 0])
        raise ValueError(f"edge_index: edge {edge} leads from graph {int(batch[edges[0, edge]])} to another")
    return GraphBatch(edges, batch, torch.bincount(batch))


def with_loops(graphs: GraphBatch) -> Tensor:
    """Edges (2, M') with a loop added to each node that has none."""
    nodes = torch.arange(len(graphs.batch), device=graphs.edges.device)
    looped = torch.zeros_like(nodes, dtype=torch.bool)
    looped[graphs.edges[0, graphs.edges[0] == graphs.edges[1]]] = True
    return torch.cat((graphs.edges, nodes[~looped].expand(2, -1)), 1)


def shortest_paths(graphs: GraphBatch, *, kept: int, most: int | None = None) -> Pairs:
    """Pairs of nodes of the same graph with shortest paths, by breadth-first search; without `most` all pairs.

    Among several shortest paths, that over the smallest node numbers, compared from the end; among parallel edges the
    first. Paths contain no loops.

    Args:
        kept: D, number of edges of each path to return.
        most: maximum number of hops; None: unlimited, and pairs without a path are included.
    """
    starts, ends = (side.cpu().numpy() for side in graphs.edges)
    nodes = len(graphs.batch)
    order = np.argsort(starts, kind="stable")
    first_edge = np.searchsorted(starts[order], np.arange(nodes + 1))
    codes = np.arange(nodes) * (nodes + 1)  # first * N + second
    paths = np.full((nodes, kept), -1)
    known, levels = codes, [(codes, np.zeros(nodes, np.int64), paths)]
    while len(codes) and (most is None or len(levels) <= most):
        reached = codes % nodes
        counts = first_edge[reached + 1] - first_edge[reached]
        before = np.repeat(np.arange(len(codes)), counts)
        steps = np.arange(len(before)) - np.repeat(np.cumsum(counts) - counts, counts)
        edge = order[first_edge[reached[before]] + steps]
        reached_codes = codes[before] // nodes * nodes + ends[edge]
        reached_codes, at = np.unique(reached_codes, return_index=True)  # the first of several
        new = ~np.isin(reached_codes, known, assume_unique=True)
        codes, at = reached_codes[new], at[new]
        paths = paths[before[at]]
        if len(levels) <= kept:
            paths[:, len(levels) - 1] = edge[at]
        known = np.union1d(known, codes)
        levels.append((codes, np.full(len(codes), len(levels)), paths))
    if most is None:
        codes = np.setdiff1d(_every_pair(graphs.sizes.cpu().numpy(), nodes), known, assume_unique=True)
        levels.append((codes, np.full(len(codes), UNREACHED), np.full((len(codes), kept), -1)))
    codes, hops, paths = (np.concatenate(part) for part in zip(*levels, strict=True))
    sort = np.argsort(codes)
    columns = (codes[sort] // nodes, codes[sort] % nodes, hops[sort], paths[sort])
    return Pairs(*(torch.from_numpy(part).to(graphs.edges.device) for part in columns))


def _every_pair(sizes: np.ndarray, nodes: int) -> np.ndarray:
    """first * N + second for all pairs within a graph."""
    begins = np.cumsum(sizes) - sizes
    blocks = [(np.arange(n)[:, None] + at) * nodes + np.arange(n) + at for n, at in zip(sizes, begins, strict=True)]
    return np.concatenate([block.ravel() for block in blocks])

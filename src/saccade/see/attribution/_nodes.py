"""The nodes of PyTorch's graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any


def name_of(node: Any) -> str:
    """ "Add" for AddBackward0."""
    return re.sub(r"(Backward\d*)?$", "", type(node).__name__.rpartition(".")[2], count=1)


def before(node: Any) -> list[Any]:
    """The nodes of the operands that have a graph; of a copy, not what it overwrites."""
    edges = node.next_functions[-1:] if name_of(node) == "CopyBackwards" else node.next_functions
    return [each for each, _ in edges if each is not None]


def in_order(ends: Sequence[Any], stop: Callable[[Any], bool] = lambda node: False) -> list[Any]:
    """All nodes that the ends come from, each after those it comes from; nodes where `stop` holds have no past."""
    done: dict[Any, None] = {}
    open_nodes = [(node, False) for node in ends]
    while open_nodes:
        node, ready = open_nodes.pop()
        if ready:
            done[node] = None
        elif node not in done:
            open_nodes.append((node, True))
            if not stop(node):
                open_nodes += [(each, False) for each in before(node) if each not in done]
    return list(done)

"""The residual stream of any model, found in the graph of one run: what is added to it, and where it is not linear.

A first run gives the graph. Every operation in it is linear in its operands, or not: the name of its node says
which, and a product of two tensors that both come from the stream is not. Where a nonlinear operation is reached, its
output is what a feed-forward layer (or another mixer) writes, unless all that is read passes through it: then its ratio
to its input is held fixed (activations in heads of masked models, softcaps of logits). A gate on the output of heads is
held fixed. A second run has the leaves that were found, and a graph that is linear.

An operation that is linear and not known as such is taken for a layer: then the tokens are not reached, or what they
add is counted as that layer's, but the sum is right. An operation that is taken for linear and is not makes the sum
wrong, which `_contributions.py` notices.

Shape legend: as in `_traced_run.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ._nodes import before, in_order, name_of
from ._traced_run import Held, Leaf, Made, NoStream, TracedRun

_LINEAR = frozenset(
    "AccumulateGrad Add Addmm Alias AsStrided Baddbmm Bmm Cat Clone ConstantPadNd Convolution CopyBackwards CopySlices "
    "Cumsum Diagonal Div Dot Expand Flip Gather Index IndexAdd IndexCopy IndexPut IndexSelect Lerp Linear MaskedFill "
    "Mean MkldnnLinear Mm Mul Mv Neg Permute Repeat RepeatInterleave ReshapeAlias Roll Rsub Scatter ScatterAdd Select "
    "SelectScatter Slice SliceScatter Split SplitWithSizes Squeeze Stack Sub Sum T ToCopy Transpose Tril Triu Unbind "
    "Unfold UnsafeView Unsqueeze View ViewAsComplex ViewAsReal Where".split()
)
_ACTIVATIONS = frozenset("Elu Gelu Hardswish Hardtanh LeakyRelu Mish Relu Sigmoid Silu Softplus Tanh Threshold".split())
_PRODUCTS = frozenset("Mul Div Mm Addmm Bmm Baddbmm Mv Dot Convolution".split())


def factors(node: Any) -> list[Any]:
    """The operands of a product that have a graph; a node that is no product has none."""
    name = name_of(node)
    if name not in _PRODUCTS:
        return []
    operands = [each for each, _ in node.next_functions]
    operands = operands[1:] if name in ("Addmm", "Baddbmm") else operands[:2]
    return [each for each in operands if each is not None]


class _Sources(NamedTuple):
    """The leaves that a node is linear in, and the nodes at which the graph is not linear."""

    leaves: frozenset[int]
    ends: frozenset[Any]

    def __or__(self, other: _Sources) -> _Sources:
        return _Sources(self.leaves | other.leaves, self.ends | other.ends)


_NOTHING = _Sources(frozenset(), frozenset())


def nonlinear(trace: TracedRun, ends: Sequence[Tensor], ids: Tensor) -> dict[int, Held]:
    """The actions of a second run that make the tensors `ends` linear in the leaves.

    Raises:
        NoStream: the tokens are not in what remains.
    """
    leaf_of = {node_of(leaf): number for number, leaf in enumerate(trace.leaves)}
    heads = frozenset(number for number, leaf in enumerate(trace.leaves) if leaf.kind == "head")
    added = frozenset(number for number, leaf in enumerate(trace.leaves) if leaf.kind == "added")
    tokens = frozenset(number for number, leaf in enumerate(trace.leaves) if leaf.kind == "read" and reads(leaf, ids))
    nodes = in_order([graph_of(end) for end in ends])
    spine: dict[Any, Held] = {}
    for _ in range(len(nodes)):
        found, held = _linear_sources(trace, nodes, leaf_of, heads, heads | added, spine)
        whole = _NOTHING
        for end in ends:
            whole |= found[graph_of(end)]
        if whole.leaves & tokens:
            decided = {node: held.get(node, Held("cut")) for node in whole.ends}
            return _by_number(trace, {**decided, **spine, **held}, found, added)
        way = next(iter(whole.ends), None)
        held_there = None if len(whole.ends) != 1 else _on_the_spine(trace, way, found, added)
        if held_there is None:
            break
        spine[way] = held_there
    where = ", ".join(sorted({_said(trace, node) for node in list(whole.ends)[:3]})) or "the embedding"
    raise NoStream(
        "model: its residual stream could not be found: nothing that is added up leads back to the embedding; it ends "
        f"at {where}"
    )


def _linear_sources(
    trace: TracedRun,
    nodes: list[Any],
    leaf_of: dict[Any, int],
    heads: frozenset[int],
    kept_apart: frozenset[int],
    spine: dict[Any, Held],
) -> tuple[dict[Any, _Sources], dict[Any, Held]]:
    """The sources of each node, and gates that are held."""
    found: dict[Any, _Sources] = {}
    held: dict[Any, Held] = {}
    for node in nodes:
        if node in leaf_of:
            found[node] = _Sources(frozenset([leaf_of[node]]), frozenset())
            continue
        operands = factors(node)
        if node in spine:
            kept = operands[1 - spine[node].operand] if len(operands) == 2 else before(node)[0]
            found[node] = found[kept]
        elif len(operands) == 2:
            of_heads = [
                bool(found[each].leaves & heads) and found[each].leaves <= kept_apart and not found[each].ends
                for each in operands
            ]
            if sum(of_heads) == 1:
                held[node] = Held("gate", of_heads.index(False))
                found[node] = found[operands[of_heads.index(True)]]
            else:
                found[node] = _Sources(frozenset(), frozenset([node]))
        elif name_of(node) in _LINEAR and not _divides(node) and not _has_detached(trace, node):
            sources = _NOTHING
            for each in before(node):
                sources |= found[each]
            found[node] = sources
        else:
            found[node] = _Sources(frozenset(), frozenset([node]))
    return found, held


def _divides(node: Any) -> bool:
    return name_of(node) == "Div" and node.next_functions[0][0] is None


def _has_detached(trace: TracedRun, node: Any) -> bool:
    made = trace.made.get(node)
    return made is not None and made.detached


def _on_the_spine(trace: TracedRun, node: Any, sources: dict[Any, _Sources], added: frozenset[int]) -> Held | None:
    """The ratio of an activation or softcap that everything passes through, or one factor of a product.

    None for other operations, and for a product of two tensors that are both linear in what is added.
    """
    operands = factors(node)
    if len(operands) == 2:
        linear = [bool(sources[each].leaves - added) for each in operands]
        return None if all(linear) else Held("factor", 1 - linear.index(True) if any(linear) else 1)
    return Held("ratio") if name_of(node) in _ACTIVATIONS or _has_detached(trace, node) else None


def _by_number(
    trace: TracedRun, decided: dict[Any, Held], sources: dict[Any, _Sources], added: frozenset[int]
) -> dict[int, Held]:
    by_number: dict[int, Held] = {}
    for node, held in decided.items():
        made = trace.made.get(node)
        if made is None and held.kind == "cut":  # inside of an operation, or of code that is not followed
            only = (each for each, own in sources.items() if own.ends == {node} and own.leaves <= added)
            made = min((trace.made[each] for each in only if each in trace.made), default=None, key=_number)
        if made is None:
            raise NoStream(f"model: the residual stream leads through {name_of(node)}, which cannot be followed")
        by_number[made.number] = held
    return by_number


def _number(made: Made) -> int:
    return made.number


def _said(trace: TracedRun, node: Any) -> str:
    made = trace.made.get(node)
    return name_of(node) if made is None else f"{made.name} in {made.path or 'the model'}"


def reads(leaf: Leaf, ids: Tensor) -> bool:
    """Whether a leaf is what a table has for the tokens."""
    index = leaf.read_by
    return index is not None and index.numel() == ids.numel() and bool((index.flatten() == ids.flatten()).all())


def node_of(leaf: Leaf) -> Any:
    """The node at which the graph of a leaf ends."""
    return leaf.tensor.view_as(leaf.tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def graph_of(tensor: Tensor) -> Any:
    if tensor.grad_fn is None:
        raise NoStream("model: its output does not depend on its embedding")
    return tensor.grad_fn

"""Terms of a `Score` that have kernels: scores of rows, of keys, and of distances, made of a program at every call.

What depends on no captured tensor (indices, distances, buckets) is computed once for the lengths of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .._biases import Bias, Placement, RelativeScores, TensorBias
from .._call import standing
from .._masks import Mask
from .._masks._data import lasting
from .._programs._language import Builder, Program, evaluate
from ._program import ProgramBias, entries
from ._score import Leaves, leaves_of

_LINE = 2**22  # numbers of a line of distances; where more are needed, the program is computed pair by pair
_KEPT = 4  # lengths for which a program's indices are kept


class ScoreProblem(NamedTuple):
    """The call that a `Score` is bound to."""

    query: Tensor
    length_k: int
    mask: Mask | None
    scale: float
    softcap: float | None
    offset: Placement | None

    @property
    def placement(self) -> Placement:
        """Query row i stands at key index `i + placement` of this call."""
        if self.offset is not None:
            return self.offset
        return standing(self.mask, self.length_k - self.query.shape[2], self.query.device)


class RelativeLine(RelativeScores):
    """A score for each head and distance: (Hq, n), from distance `first` on. What a `Score` of distances becomes."""

    _head_axis = 0

    def __init__(self, line: Tensor, first: int) -> None:
        self.parameter, self.first = line, first

    def _entries(self, parameter: Tensor, distance: Tensor) -> Tensor:
        return (distance - self.first).clamp(0, max(parameter.shape[1] - 1, 0))

    def _value(self, parameter: Tensor, head: Tensor, distance: Tensor) -> Tensor:
        return parameter[head, self._entries(parameter, distance)]

    def _score(self, parameter: Tensor, distance: Tensor) -> Tensor:
        return parameter.index_select(1, self._entries(parameter, distance))

    def _pull_score(self, cotangent: Tensor, parameter: Tensor, distance: Tensor) -> Tensor:
        heads, n = parameter.shape
        places = self._entries(parameter, distance) + n * torch.arange(heads, device=distance.device)[:, None]
        flat = cotangent.new_zeros(heads * n)
        if flat.device.type == "cpu":  # along one axis PyTorch adds in order
            return flat.index_add(0, places.flatten(), cotangent.flatten()).view(heads, n)
        return flat.index_put((places.flatten(),), cotangent.flatten(), accumulate=True).view(heads, n)

    def _part(self, parameter: Tensor, rows: Tensor | None, keys: Tensor | None, heads: Tensor | None) -> Tensor:
        return parameter if heads is None else parameter.index_select(0, heads)

    def _check(self, batch: int, heads: int, length_q: int, length_k: int) -> None:
        super()._check(batch, heads, length_q, length_k)
        if self.parameter.shape[0] != heads:
            raise ValueError(f"bias: scores of distances for {self.parameter.shape[0]} heads, expected {heads}")

    def __repr__(self) -> str:
        return f"Score(of distances {self.first} to {self.first + self.parameter.shape[1] - 1})"


def of_a_level(term: Program, whole: ProgramBias, problem: ScoreProblem) -> Bias | None:
    """The term as a tensor (B|1, Hq|1, Lq|1, Lk|1). None where an index is out of range.

    Only visible pairs may not have one, so the program is then computed pair by pair.
    """
    query, depends = problem.query, term.depends[term.outputs[0]]
    origin = 0 if problem.mask is None else problem.mask._origin()[1]
    counts = {"b": query.shape[0], "h": query.shape[1], "q": query.shape[2], "k": problem.length_k}
    of = {name: count if name in depends else min(count, 1) for name, count in counts.items()}
    placement = problem.placement if "q" in depends else 0
    sizes = [size if name in depends else 1 for name, size in counts.items()]
    if isinstance(placement, Tensor):
        sizes[0] = query.shape[0]

    def leaves() -> Leaves:
        heads, rows, keys = (torch.arange(of[name], device=query.device) for name in ("h", "q", "k"))
        return leaves_of((0, sizes[0]), heads, rows + origin, keys + origin, placement)

    key = (*of.values(), origin, placement) if isinstance(placement, int) else None
    values = _evaluated(term, whole, leaves, key)
    return None if values is None else TensorBias(values.expand(sizes))


def of_a_table(term: Program, whole: ProgramBias, problem: ScoreProblem) -> Bias | None:
    """The term, an entry of a table by b, h, q and k, as this table. None where the table lacks pairs of the call."""
    node, placement = term.nodes[term.outputs[0]], problem.placement
    if not isinstance(placement, int):
        return None
    table = whole.tables[int(node.value or 0)]
    origin = 0 if problem.mask is None else problem.mask._origin()[1]
    starts = {"b": 0, "h": 0, "q": placement + origin, "k": origin}
    sizes = dict(zip("bhqk", (*problem.query.shape[:3], problem.length_k), strict=True))
    axes = [term.nodes[arg].op for arg in node.args]
    scores = whole.parameter.narrow(0, table.start, torch.Size(table.shape).numel()).view(table.shape)
    for axis, name in enumerate(axes):
        if starts[name] < 0 or starts[name] + sizes[name] > table.shape[axis]:
            return None
        scores = scores.narrow(axis, starts[name], sizes[name])
    order = [axes.index(name) for name in "bhqk" if name in axes]
    return TensorBias(scores.permute(order)[tuple(slice(None) if name in axes else None for name in "bhqk")])


def of_distances(term: Program, whole: ProgramBias, problem: ScoreProblem) -> Bias | None:
    """The term at every distance of the call, (Hq, n). None as in `of_a_level`, and where the line would be long."""
    query, placement = problem.query, problem.placement
    if isinstance(placement, Tensor) and not _readable(placement):
        return None
    low, high = (placement, placement) if isinstance(placement, int) else map(int, placement.aminmax())
    heads, least, last = query.shape[1], 1 - query.shape[2] - high, problem.length_k - 1 - low
    last = max(last, least)  # of no queries and no keys: one number that nobody reads
    if heads * (last - least + 1) > max(_LINE, 4 * heads * (query.shape[2] + problem.length_k)):
        return None

    def leaves() -> Leaves:
        distance = torch.arange(least, last + 1, device=query.device)
        at_0 = torch.zeros(1, dtype=torch.int64, device=query.device)
        return leaves_of((0, 1), torch.arange(heads, device=query.device), at_0, distance, 0)

    line = _evaluated(term, whole, leaves, (heads, least, last))
    if line is None:
        return None
    bias = RelativeLine(line.expand(1, heads, 1, last - least + 1)[0, :, 0], least)
    bias.offset = problem.offset
    return bias


def _readable(placement: Tensor) -> bool:
    return placement.device.type == "cpu" and placement.numel() > 0 and not torch.compiler.is_compiling()


# --- values ---------------------------------------------------------------------------------------------------------


class _Prepared(NamedTuple):
    """The part of a term's values that depends on no table."""

    values: dict[int, Tensor]  # of nodes
    places: dict[int, Tensor]  # where loads read


_prepared: WeakKeyDictionary[Program, dict[Hashable, _Prepared | None]] = WeakKeyDictionary()


def _evaluated(
    term: Program, whole: ProgramBias, leaves: Callable[[], Leaves], key: tuple[Hashable, ...] | None
) -> Tensor | None:
    """The term's values; None where an index is out of range.

    Args:
        key: what `leaves` depend on besides the call's device and dtype; None: on more.
    """
    parameter = whole.parameter
    read = whole._reader(term, parameter, None)
    if key is None or any("table" in term.depends[arg] for n in term.loads for arg in term.nodes[n].args):
        try:
            return evaluate(term, leaves(), read, parameter.dtype)[0]
        except IndexError:
            return None
    known = _prepared.setdefault(term, {})
    key = (*key, parameter.device, parameter.dtype, tuple((table.shape, table.start) for table in whole.tables))
    if key not in known:
        if len(known) >= _KEPT:
            del known[next(iter(known))]
        known[key] = _prepare(term, whole, leaves)
    prepared = known[key]
    if prepared is None:
        return None

    def load(node: int, indices: list[Tensor]) -> Tensor:
        table = whole.tables[int(term.nodes[node].value or 0)].tensor
        return entries(parameter if table is None else table.flatten(), prepared.places[node])

    return evaluate(term, {}, load, parameter.dtype, known=prepared.values)[0]


@lasting
def _prepare(term: Program, whole: ProgramBias, leaves: Callable[[], Leaves]) -> _Prepared | None:
    depends = term.depends
    free = [n for n in range(len(term.nodes)) if "table" not in depends[n]]
    build = Builder()
    here = build.copy(term)
    read = whole._reader(term, whole.parameter, None)
    given = leaves()
    values = dict(
        zip(free, evaluate(build.program(*(here[n] for n in free)), given, read, whole.parameter.dtype), strict=True)
    )
    places = {}
    for n in term.loads:
        try:
            places[n] = whole._flat(int(term.nodes[n].value or 0), [values[arg] for arg in term.nodes[n].args], None)
        except IndexError:
            return None
    return _Prepared(values, places)

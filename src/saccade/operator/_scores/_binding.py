"""How a `Score` becomes part of one call: softcap, scale, a bias that has kernels already, or a program.

The function is traced and recognised once; a call then reads the captured tensors as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from .._biases import Bias
from .._call import accumulator_of
from .._masks import Mask
from .._masks._data import lasting, of_vmap
from .._masks._placement import At, Slice
from .._masks._traced import HeldMask, TracedMask, kept
from .._programs._captured import reached
from .._programs._language import Program, bounds
from .._programs._recognised_scores import RecognisedScore, recognised
from .._programs._tracing import NotTraceable
from ._function import FunctionBias
from ._program import ProgramBias
from ._score import Score
from ._terms import ScoreProblem, of_a_level, of_a_table, of_distances


class BoundScore(NamedTuple):
    """A `Score` in the terms of one call, and a line for `explain`."""

    mask: Mask | None
    bias: Bias | None
    scale: float
    softcap: float | None
    description: str


def bind(score: Score, problem: ScoreProblem) -> BoundScore:
    """The score of one call. Errors name `Score`."""
    try:
        program, tables = score._trace()
    except NotTraceable as refused:
        return _as_function(score, refused.reason, problem)
    tables = [_on_device(table, number, problem.query) for number, table in enumerate(tables)]
    whole = ProgramBias.of(program, tables, accumulator_of(problem.query), problem.query.device)
    whole.offset = problem.offset
    known = _known(program, problem, tables)
    found = None if known is None else _as_known(known, whole, problem, tables)
    if found is not None:
        return found
    return BoundScore(problem.mask, whole, problem.scale, problem.softcap, repr(whole)[len("Score(") : -1])


def _as_function(score: Score, reason: str, problem: ScoreProblem) -> BoundScore:
    captured = reached(score.function).tensors
    bias = FunctionBias(score.function, captured, reason, problem.query, accumulator_of(problem.query))
    bias.offset = problem.offset
    if not torch.compiler.is_compiling():
        bias.check(problem.query)
    description = f"run by vmap over tiles, because it cannot be traced: {reason}"
    return BoundScore(problem.mask, bias, problem.scale, problem.softcap, description)


def _on_device(table: Tensor, number: int, query: Tensor) -> Tensor:
    if table.device == query.device:
        return table
    if table.dim() == 0 and table.device.type == "cpu":  # PyTorch takes single numbers from a CPU everywhere
        return table.to(query.device)
    raise ValueError(
        f"Score: captured tensor {number}, shape {tuple(table.shape)}, is on {table.device}, "
        f"expected query's device {query.device}"
    )


_recognised: WeakKeyDictionary[Program, dict[bool, RecognisedScore | None]] = WeakKeyDictionary()


def _known(program: Program, problem: ScoreProblem, tables: Sequence[Tensor]) -> RecognisedScore | None:
    """The program's form. Conditions on tables are a mask where this call's indices cannot leave the tables."""
    forms = _recognised.setdefault(program, {})
    for reads_tables in (True, False):
        if reads_tables not in forms:
            forms[reads_tables] = recognised(program, reads_tables)
        known = forms[reads_tables]
        if known is None or known.shown is None or not known.shown.loads or _in_range(known.shown, problem, tables):
            return known
    return None


def _in_range(shown: Program, problem: ScoreProblem, tables: Sequence[Tensor]) -> bool:
    """Whether every pair, hidden by other masks or not, reads within the tables; proved by intervals."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or any(map(of_vmap, tables)):
        return False
    batch, heads, rows, _ = problem.query.shape
    placement, origin = problem.placement, 0 if problem.mask is None else problem.mask._origin()[1]
    if not (batch and heads and rows and problem.length_k):
        return False
    low, high = (placement, placement) if isinstance(placement, int) else map(int, placement.aminmax())
    ends = (
        (0, batch - 1),
        (0, heads - 1),
        (low + origin, rows - 1 + high + origin),
        (origin, origin + problem.length_k - 1),
    )
    return _reads_within(shown, ends, tuple(table.shape for table in tables))


@lru_cache(256)
def _reads_within(shown: Program, ends: tuple[tuple[int, int], ...], shapes: tuple[torch.Size, ...]) -> bool:
    """Whether indices of tables stay in range, where b, h, q and k lie within these ends."""
    leaves = {name: (np.float64(first), np.float64(last)) for name, (first, last) in zip("bhqk", ends, strict=True)}
    reach = bounds(shown, leaves)
    return all(
        reach[arg][0] >= 0 and reach[arg][1] < size
        for n in shown.loads
        for arg, size in zip(shown.nodes[n].args, shapes[int(shown.nodes[n].value or 0)], strict=True)
    )


def _as_known(
    known: RecognisedScore, whole: ProgramBias, problem: ScoreProblem, tables: Sequence[Tensor]
) -> BoundScore | None:
    """None where this call has no room for the form."""
    if problem.softcap is not None and (known.softcap is not None or known.factor != 1.0):
        return None  # the call's softcap comes first
    scale = problem.scale * known.factor
    mask, name = problem.mask, None
    if known.shown is not None:
        more = _mask(known.shown, problem, tables)
        mask, name = _joined(mask, more if problem.offset is None else more.at(problem.offset)), more.recognised(None)
    if not math.isfinite(scale) or (known.shown is not None and mask is None):
        return None
    bias: Bias | None = None
    if known.form == "program":
        assert known.term is not None
        bias = ProgramBias(known.term, whole.tables, whole.parameter)
        bias.offset = problem.offset
    elif known.term is not None:
        bias = _MADE_BY.get(known.form, of_a_level)(known.term, whole, problem)
        if bias is None:
            return None
    return BoundScore(mask, bias, scale, known.softcap or problem.softcap, f"recognised as {known.described(name)}")


_UNREAD = torch.empty(0)  # stands for tables that a mask does not read
_MADE_BY = {"distance": of_distances, "table": of_a_table}
_masks: WeakKeyDictionary[Program, dict[tuple[int | None, int | None], HeldMask]] = WeakKeyDictionary()


def _mask(shown: Program, problem: ScoreProblem, tables: Sequence[Tensor]) -> TracedMask:
    """The mask of a program: one value while its tables hold the same, so that kernels keep its tiles."""
    depends = shown.depends[shown.outputs[0]]
    batch, heads = (size if name in depends else None for name, size in zip("bh", problem.query.shape, strict=False))
    read = {int(shown.nodes[n].value or 0) for n in shown.loads}
    tables = [table if n in read else _UNREAD for n, table in enumerate(tables)]
    known = _masks.setdefault(shown, {})
    if (held := known.get((batch, heads))) is None or not held.are(tables, thoroughly=True):
        known[batch, heads] = held = _held(shown, tables, batch or 1, heads or 1)
    return held.mask


@lasting
def _held(shown: Program, tables: Sequence[Tensor], batch: int, heads: int) -> HeldMask:
    return HeldMask(shown, tables, TracedMask(shown, [kept(table) for table in tables], batch, heads))


def _joined(mask: Mask | None, more: Mask) -> Mask | None:
    """`mask & more`, where `more` stands as `mask` does; None where they stand in different places."""
    if mask is None:
        return more
    try:
        if isinstance(mask, At | Slice) and more.placement() == "open":
            inner = _joined(mask.part, more)
            if inner is None or (isinstance(mask, Slice) and mask.lengths is None and inner.placement() == "open"):
                return None
            return mask.replaced(part=inner)
        return mask & more
    except ValueError:
        return None

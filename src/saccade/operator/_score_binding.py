"""How a `Score` becomes part of one call: softcap, scale, a bias that has kernels already, or a program.

The function is traced and recognised once; a call then reads the captured tensors as they are.
"""

from __future__ import annotations

import math
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from ._biases import Bias
from ._call import accumulator_of
from ._masks import Mask
from ._masks._placement import At, Slice
from ._masks._traced import TracedMask
from ._programs._captured import reached
from ._programs._language import Program
from ._programs._recognised_scores import RecognisedScore, recognised
from ._programs._tracing import NotTraceable
from ._score_functions import FunctionBias
from ._score_programs import ProgramBias
from ._score_terms import ScoreProblem, of_a_level, of_a_table, of_distances
from ._scores import Score


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
    known = _known(program)
    found = None if known is None else _as_known(known, whole, problem)
    if found is not None:
        return found
    return BoundScore(problem.mask, whole, problem.scale, problem.softcap, repr(whole)[len("Score(") : -1])


def _as_function(score: Score, reason: str, problem: ScoreProblem) -> BoundScore:
    captured = reached(score.function).tensors
    bias = FunctionBias(score.function, captured, reason, problem.query, accumulator_of(problem.query))
    bias.offset = problem.offset
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


_recognised: WeakKeyDictionary[Program, RecognisedScore | None] = WeakKeyDictionary()


def _known(program: Program) -> RecognisedScore | None:
    if program not in _recognised:
        _recognised[program] = recognised(program)
    return _recognised[program]


def _as_known(known: RecognisedScore, whole: ProgramBias, problem: ScoreProblem) -> BoundScore | None:
    """None where this call has no room for the form."""
    if problem.softcap is not None and (known.softcap is not None or known.factor != 1.0):
        return None  # the call's softcap comes first
    scale = problem.scale * known.factor
    mask, name = problem.mask, None
    if known.shown is not None:
        more = _mask(known.shown, problem)
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


_MADE_BY = {"distance": of_distances, "table": of_a_table}
_masks: WeakKeyDictionary[Program, dict[tuple[int | None, int | None], TracedMask]] = WeakKeyDictionary()


def _mask(shown: Program, problem: ScoreProblem) -> TracedMask:
    """The mask of a program without tables: the same value for every call, so that kernels keep its tiles."""
    depends = shown.depends[shown.outputs[0]]
    batch, heads = (size if name in depends else None for name, size in zip("bh", problem.query.shape, strict=False))
    known = _masks.setdefault(shown, {})
    if (batch, heads) not in known:
        known[batch, heads] = TracedMask(shown, (), batch or 1, heads or 1)
    return known[batch, heads]


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

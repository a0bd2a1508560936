"""A second implementation, another dtype and another number of threads agree within rounding.

Shape legend: R rows, L length, V width of an output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....support._registered import registered
from ...findings._finding import Finding, TargetError
from .._bounds import Difference, Measure, in_dtype, largest_gap, measured, nudged
from .._documents import Documents, drawn
from .._probe import Probe
from .._served import scores_of
from .._shrink import smallest
from .._stack import Stack

_LENGTHS = (13, 7)
# Of the largest log probability: a server computes in half precision.
_SERVED = 3e-2
# Of the output's move when every weight is moved by one unit of the dtype. Sums are no longer than a few hundred terms
# beyond what this measures; a softmax, a norm or angles in a smaller dtype move outputs a thousand times as much.
_UNITS = 64


def _run(stack: Stack, measure: Measure) -> Iterator[Finding]:
    documents = drawn(stack.vocabulary, [stack.length(length) for length in _LENGTHS])
    documents = documents if stack.takes_padding else documents[:1]
    if not stack.is_served:
        yield from _finite(stack, documents)
    if stack.second is not None:
        yield from _second(stack, stack.second, measure, documents)
    if not stack.is_served:
        yield from _threads(stack, measure, documents)
    if measure.dtype == torch.float64 and stack.module is not None:
        yield from _in_float32(stack, measure, documents)


def _largest(measure: Measure, outputs: list[Tensor], others: list[Tensor]) -> Difference | None:
    """The largest difference; outputs of another width differ everywhere."""
    pairs = [
        measure.compare(other, out) if other.shape == out.shape else Difference(0, float("inf"), float("inf"), (0,))
        for out, other in zip(outputs, others, strict=True)
    ]
    return max((pair for pair in pairs if pair is not None), key=lambda pair: pair.relative, default=None)


def _finite(stack: Stack, documents: Documents) -> Iterator[Finding]:
    def wrong_position(given: Documents) -> list[int]:
        """[the first position that is not finite], empty if there is none."""
        positions = ((~out.isfinite().all(-1)).nonzero().flatten().tolist() for out in stack.outputs(given))
        return next(filter(None, positions), [])[:1]

    if not (wrong := wrong_position(documents)):
        return
    documents, [position] = smallest(documents, wrong_position, wrong)
    where = ""
    if stack.module is not None:
        for call in _inside(stack, documents).calls:
            wrong = (~call.out.isfinite().all(-1)).nonzero().tolist()
            if wrong:
                _, head, query = wrong[0]
                where = f"{call.name}: layer {call.layer}, head {head}, query {query}"
                break
    yield PROBE.error(
        f"Output {position} is not finite{f'; it begins in {where}' if where else ''}",
        "A row that is not finite makes the loss and every gradient NaN.",
        "Let each query see at least its own key, and mask with a finite number or with a kernel that gives 0",
        documents,
        where=where,
    )


# A second implementation


def _second(stack: Stack, second: Stack, measure: Measure, documents: Documents) -> Iterator[Finding]:
    measure = max(measure, measured(second), key=lambda one: one.bound)

    is_served = stack.is_served or second.is_served
    if is_served:
        measure = replace(measured(stack if stack.is_served else second), bound=_SERVED)

    def outputs(of: Stack, given: Documents) -> list[Tensor]:
        outs = of.outputs(given)
        return [scores_of(of, *each) for each in zip(outs, given, strict=True)] if is_served else outs

    def apart(given: Documents) -> Difference | None:
        return _largest(measure, outputs(stack, given), outputs(second, given))

    if (before := apart(documents)) is None:
        return
    share = len(before.differing) / max(map(len, documents))
    documents, difference = smallest(documents, apart, before)
    words, where, unobserved = _begins(stack, second, measure, documents)
    yield PROBE.error(
        f"{second.name} gives other outputs than {stack.name}, by {difference.size:.3g} at output "
        f"{difference.position}: {words}",
        f"{share:.0%} of the outputs of a document differ: what was measured with one does not hold of the other.",
        "Compare the arguments of this call: mask, scale, positions, and the keys and values that it is given",
        documents,
        difference,
        where=where,
        unobserved=unobserved,
    )


def _begins(stack: Stack, second: Stack, measure: Measure, documents: Documents) -> tuple[str, str, dict[str, str]]:
    """(where the difference begins in words, the layer, head and pair, what could not be observed)."""
    if stack.module is None or second.module is None:
        return "one of them is no module, so its layers cannot be observed", "", {}
    first, other = (_inside(of, documents) for of in (stack, second))
    unobserved = {**first.unobserved, **other.unobserved}
    if not first.calls or not other.calls:
        return "no attention call of one of them could be observed", "", unobserved
    words, where = _parting(first, other, measure.bound)
    left_out = f", or in one of {len(unobserved)} calls that could not be observed" if unobserved and not where else ""
    return words + left_out, where, unobserved


def _parting(first: Any, other: Any, bound: float) -> tuple[str, str]:
    """(where two runs begin to differ in words, the layer, head and pair)."""
    parting = registered("verified_models").first_parting(first, other, bound)
    if parting is None:
        return "all observed attention calls agree, so it begins outside of attention", ""
    place = f"{parting.call}: layer {parting.layer}, head {parting.head}, query {parting.query}"
    words = f"it begins in layer {parting.layer}, head {parting.head}: {parting.words}"
    return words, place if parting.key is None else f"{place}, key {parting.key}"


def _inside(stack: Stack, documents: Documents) -> Any:
    inputs = stack.batch(documents)
    return registered("verified_models").inside(stack.module, lambda: stack.run(inputs))


# Threads


def _threads(stack: Stack, measure: Measure, documents: Documents) -> Iterator[Finding]:
    """Sums of another order differ by rounding, and nothing else may."""
    before = torch.get_num_threads()
    outputs = stack.outputs(documents)
    try:
        torch.set_num_threads(1 if before > 1 else 2)
        difference = _largest(measure, outputs, stack.outputs(documents))
    finally:
        torch.set_num_threads(before)
    if difference is not None:
        yield PROBE.error(
            f"With {1 if before > 1 else 2} threads instead of {before} output {difference.position} differs by "
            f"{difference.size:.3g}",
            "Results depend on the machine: threads of a kernel write to the same place, or read what is not written.",
            "Give each thread its own part of the output",
            documents,
            difference,
            where="threads",
        )


# Another dtype


def _in_float32(stack: Stack, measure: Measure, documents: Documents) -> Iterator[Finding]:
    reference = stack.outputs(documents)
    unit = torch.finfo(torch.float32).eps
    with nudged(stack, unit):
        nudges = stack.outputs(documents)
    move = max(largest_gap([out], [other]) for out, other in zip(reference, nudges, strict=True))
    bound = max(_UNITS * max(move, unit), 1e-4)
    try:
        with in_dtype(stack, torch.float32):
            outputs = stack.outputs(documents)
    except TargetError:
        return  # float32 weights beside what another dtype was given for: it runs in the other one alone
    difference = _largest(Measure(min(bound, 0.5), torch.float32), reference, outputs)
    if difference is None:
        return
    exact = _inside(stack, documents)
    with in_dtype(stack, torch.float32):
        words, where = _parting(exact, _inside(stack, documents), bound)
    yield PROBE.error(
        f"In float32 output {difference.position} differs from float64 by {difference.relative:.3g} of the largest "
        f"output, where rounding explains {move:.3g}: {words}",
        "Outputs depend on the dtype by more than rounding: a value overflows, or a part is kept in a smaller dtype.",
        "scores.float().softmax(-1)  # sums, norms, softmax and angles in float32",
        documents,
        difference,
        where=where,
        rounding=move,
    )


PROBE = Probe(
    "agreement", "A second implementation, another dtype and another number of threads agree within rounding.", _run
)

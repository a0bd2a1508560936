"""Half precision: finite where float32 is, and no further from float64 than rounding explains.

What rounding explains is measured on the target itself: in float64, inputs and parameters are moved by one unit of
half precision, and the output moves with them (a backward error; Higham, Accuracy and Stability, 1.5). No knowledge of
what the target computes is needed, and a large scale or a deep module gets the tolerance that it deserves.

Shape legend: outputs (B, L, E) or (B, H, L, D).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...support._restored import seeded
from ..findings._finding import Finding, Inapplicable, Location, TargetError, Unmeasured
from ..subject._check import Check
from ..subject._inputs import NamedInputs
from ..subject._operations import WatchedOperations
from ..subject._subject import Subject
from ..tracing._trace import step_line
from ..tracing._visible import steps_of

_finding = partial(Finding, "precision", "precision")
_error = partial(Finding, "precision", "precision", "error")

NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
# Attention by hand, PyTorch's and Saccade's, and stacks of blocks stay below 0.8 in half precision (where products are
# summed in float32) and below 1.7 in float32, on the sizes used here; sums kept in bfloat16 are at 11.
ALLOWED = {torch.float32: 5.0, torch.float16: 2.5, torch.bfloat16: 2.5}
LONG = 520  # keys: a sum in bfloat16 stops growing at 256 terms of one size
# A smooth function changes in proportion to its input; one that rounds to half inside changes in jumps, seen when the
# input moves by less than half precision resolves, and not by so little that float32 inside would be found, too.
SMALL, LARGE = (1e-5, 1e-6), 1e-2
JUMP = 5.0  # right ones are at 1.0, a softmax in bfloat16 or float16 inside at 29 at least
FILLS = {"masked_fill", "masked_fill_", "where", "full", "full_like", "fill_", "new_full", "copy_", "_to_copy"}


@dataclass(frozen=True, eq=False)
class _InputRange:
    """Inputs that a target may meet, and masks."""

    words: str
    inputs: NamedInputs
    masks: dict[str, Tensor] = field(default_factory=dict)
    rare: bool = False  # large enough to be worth a warning, no error
    only: torch.dtype | None = None  # the dtype that it is for


@dataclass(frozen=True, eq=False)
class _WidenedCall:
    """A call in higher precision, of parameters and inputs rounded to a lower one."""

    subject: Subject
    case: _InputRange
    out: Tensor  # float64


def _run(subject: Subject) -> Iterator[Finding]:
    cases = tuple(_cases(subject))
    if not _steady(subject, cases[0]):
        raise Unmeasured("two calls of it differ")
    if not _call(subject, cases[0]).isfinite().any():
        yield _error(
            f"No number of its output is finite, in {str(subject.dtype).removeprefix('torch.')} and for "
            f"{cases[0].words}.",
            "Nothing can be computed from it: a loss is NaN, and so are all weights after one step.",
            "Print scores, weights and output in turn: the first value that is not finite comes from the line to "
            "change.",
            {"finite": 0},
            None,
        )
        return
    findings = list(_rounds_inside(subject))
    untold = []
    for dtype in () if findings else (torch.float32, torch.float16, torch.bfloat16):
        try:
            findings += _in_dtype(subject, dtype, cases)
        except TargetError as error:
            if "without overflow" in error.error:
                findings.append(_large_constant(error, dtype))
            elif dtype != torch.float32:
                untold.append(f"{NAMES[dtype]}: {error.error}")  # robustness tells what is the target's own doing
    errors = [finding for finding in findings if finding.severity == "error"]
    yield from errors[:1] or findings[:1]
    if len(untold) == 2 and not findings:
        raise Unmeasured(untold[0])


def _cases(subject: Subject) -> Iterator[_InputRange]:
    yield _InputRange("inputs of variance 1", subject.inputs(2, 7))
    length = min(LONG, subject.reading.max_length or LONG)
    alike = subject.inputs(1, length, spread=0.1)  # so that all keys get about the same weight
    yield _InputRange(f"{length} inputs of standard deviation 0.1", alike, only=torch.bfloat16)
    if subject.form != "tokens":
        yield _InputRange("inputs of standard deviation 4", subject.inputs(2, 7, spread=4.0))
    square = subject.inputs(2, 7)
    for masks in [*subject.masks(square)][::-1]:
        yield _InputRange("a causal mask" if "pairs" in masks else "padding", square, masks)
    if subject.form == "attention":
        large = subject.inputs(1, 7, spread=32.0)
        value = subject.inputs(1, 7)["value"]
        groups = large["query"].shape[1] // large["key"].shape[1]
        same = {"query": large["key"].repeat_interleave(groups, 1), "key": large["key"], "value": value}
        yield _InputRange("queries equal to keys, of standard deviation 32", NamedInputs(same), rare=True)


def _steady(subject: Subject, case: _InputRange) -> bool:
    first, again = _call(subject, case), _call(subject, case)
    return torch.equal(first, again) or not first.isfinite().all()


def _call(subject: Subject, case: _InputRange) -> Tensor:
    with torch.no_grad():
        return subject(case.inputs, **case.masks).out


def _in_dtype(subject: Subject, dtype: torch.dtype, cases: tuple[_InputRange, ...]) -> Iterator[Finding]:
    half = subject.to(dtype)
    for case in cases:
        if case.only not in (None, dtype):
            continue
        given = replace(case, inputs=case.inputs.to(dtype))
        wide = _widened(half, given, dtype)
        if wide is None or not wide.out.isfinite().all():
            continue
        out = _call(half, given)
        if not out.isfinite().all():
            yield _not_finite(half, given, dtype, out)
            return
        if not case.rare:
            yield from _inaccurate(wide, dtype, out)


def _widened(half: Subject, case: _InputRange, dtype: torch.dtype) -> _WidenedCall | None:
    """The same rounded numbers in float64, or in float32 if float64 is not supported."""
    for wide in (torch.float64, torch.float32):
        if wide == dtype:
            break
        exact, given = half.to(wide), replace(case, inputs=case.inputs.to(wide))
        try:
            out = _call(exact, given)
        except (Inapplicable, TargetError):
            continue  # a mask or a length that it does not take, or a dtype, which robustness tells
        if out.dtype == wide:
            return _WidenedCall(exact, given, out.double())
    return None


def _rounds_inside(subject: Subject) -> Iterator[Finding]:
    """Findings of a target that rounds to half precision inside, whatever the dtype of its inputs."""
    jumps = jumps_of(subject)
    if jumps is None:
        return
    evidence, where = jumps
    unmoved, by = evidence["share_unmoved"], evidence["jump"]
    yield _error(
        f"With float64 inputs the output moves in jumps: when they change by one part in {1 / min(SMALL):,.0f}, "
        + (
            f"{unmoved:.3g} of it stays the same to the last bit."
            if unmoved >= 0.5
            else f"it moves {by:.3g} times as far as in proportion."
        )
        + " Something inside is rounded to lower precision.",
        "Outputs carry the noise of that precision in every dtype.",
        "Keep the dtype throughout: remove .half(), .bfloat16(), .to(torch.float16), autocast and round.",
        evidence,
        where,
    )


def jumps_of(subject: Subject) -> tuple[dict[str, Any], Location | None] | None:
    """The size and the source line of jumps if the float64 outputs change in steps; otherwise None. Many keys are
    needed: a weight jumps only where it crosses a number of half precision, and few weights do."""
    if subject.form == "tokens":
        return None
    try:
        exact = subject.to(torch.float64)
        inputs = subject.inputs(2, min(64, subject.reading.max_length or 64)).to(torch.float64)
        before = _call(exact, _InputRange("", inputs))
        moved = {size: inputs.map(lambda tensor, by=size: _moved(tensor, by, 3)) for size in (*SMALL, LARGE)}  # type: ignore[misc]
        change = {size: _call(exact, _InputRange("", given)) - before for size, given in moved.items()}
    except TargetError:
        return None  # told by robustness
    if before.dtype != torch.float64 or not before.isfinite().all():
        return None
    rate = {size: float(tensor.abs().max()) / size for size, tensor in change.items()}
    unmoved = float((change[min(SMALL)] == 0).double().mean())
    by = max(rate[size] for size in SMALL) / max(rate[LARGE], 1e-300)
    if by <= JUMP and (unmoved < 0.5 or rate[LARGE] == 0):
        return None
    with WatchedOperations(_is_half) as lowering:
        _call(exact, _InputRange("", inputs))
    return {"share_unmoved": round(unmoved, 4), "jump": round(by, 2)}, lowering.first_line


def _is_half(operation: Any, given: tuple[Any, ...], result: Any) -> bool:
    return isinstance(result, Tensor) and result.dtype in (torch.float16, torch.bfloat16)


def _inaccurate(wide: _WidenedCall, dtype: torch.dtype, out: Tensor) -> Iterator[Finding]:
    error = float((out.double() - wide.out).abs().max())
    rounding = _rounding(wide, dtype)
    if error <= ALLOWED[dtype] * rounding:
        return
    yield _error(
        f"In {NAMES[dtype]} with {wide.case.words}, the output is off by {error:.3g} from float64,"
        f" {error / rounding:.3g} times what rounding inputs and parameters once does ({rounding:.3g}).",
        "Outputs and gradients carry noise that a float32 softmax would not have.",
        "Form sums and the softmax in float32: weights = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)."
        if dtype != torch.float32
        else "Do not lower the precision: remove .half(), .bfloat16() and autocast.",
        {"dtype": NAMES[dtype], "error": error, "rounding": rounding, "largest_output": float(wide.out.abs().max())},
        _line(wide, "softmax", "exp", "half", "bfloat16", "to"),
    )


def _rounding(wide: _WidenedCall, dtype: torch.dtype) -> float:
    """The largest change of the output, in three tries, when inputs and parameters move by one unit of `dtype`."""
    unit = torch.finfo(dtype).eps
    largest = float(wide.out.abs().max()) * unit / 2  # the output itself is rounded, too
    for seed in range(3):
        moved = wide.subject.fresh()
        with torch.no_grad():
            for at, parameter in enumerate(moved.module.parameters() if moved.module is not None else ()):
                parameter.copy_(_moved(parameter, unit, 100 * seed + at))
        inputs = wide.case.inputs.map(lambda tensor, seed=seed: _moved(tensor, unit, seed))  # type: ignore[misc]
        out = _call(moved, replace(wide.case, inputs=inputs)).double()
        largest = max(largest, float((out - wide.out).abs().max()))
    return largest


def _moved(tensor: Tensor, size: float, seed: int) -> Tensor:
    """Each number changed by a random part of itself, of standard deviation `size`."""
    if not tensor.is_floating_point():
        return tensor
    drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (tensor * (1 + size * drawn.to(tensor.device))).to(tensor.dtype)


def _overflows(operation: Any, given: tuple[Any, ...], result: Any) -> str:
    """The name of the operation that turns finite numbers into NaN or Inf."""
    name = str(operation.overloadpacket.__name__)
    taken, made = (
        [leaf for leaf in tree_leaves(each) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        for each in (given, result)
    )
    if name in FILLS or "empty" in name or not taken or not all(bool(tensor.isfinite().all()) for tensor in taken):
        return ""
    return name if any(bool((tensor.isnan() | (tensor == torch.inf)).any()) for tensor in made) else ""


def _not_finite(half: Subject, case: _InputRange, dtype: torch.dtype, out: Tensor) -> Finding:
    with seeded(0), WatchedOperations(_overflows) as overflows:
        _call(half, case)
    share = float((~out.isfinite()).float().mean())
    products = overflows.found and overflows.found[0][0] in ("bmm", "mm", "baddbmm", "matmul")
    return _finding(
        "warning" if case.rare else "error",
        f"In {NAMES[dtype]} with {case.words}, {share:.3g} of the output is NaN or Inf; in float32 all is finite.",
        "Training in half precision ends in NaN, at the first step or at a later one.",
        "Scale the queries before the product, not the scores after it: scores = (q * D ** -0.5) @ k.transpose(-2, -1)."
        if products
        else "Subtract each row's largest score before exp, or use scores.softmax(dim=-1, dtype=torch.float32).",
        {"dtype": NAMES[dtype], "share_not_finite": share, "largest_finite": torch.finfo(dtype).max},
        overflows.first_line,
    )


def _large_constant(error: TargetError, dtype: torch.dtype) -> Finding:
    return _error(
        f"In {NAMES[dtype]} it raises, because a constant is beyond {torch.finfo(dtype).max:.4g}: {error.error}",
        "It cannot be run or trained in half precision.",
        "Fill with a value that the dtype can represent: scores.masked_fill(mask, float('-inf')), or "
        "torch.finfo(scores.dtype).min.",
        {"dtype": NAMES[dtype], "raised": error.error},
        error.location,
    )


def _line(wide: _WidenedCall, *names: str) -> Location | None:
    return step_line(reversed(steps_of(wide.subject, wide.case.inputs, **wide.case.masks)), names)


CHECK = Check(
    "precision",
    "precision",
    "Outputs are finite, and as close to float64 as their dtype allows.",
    "Calls in each dtype, short and long, with larger inputs and with masks, against float64 of the same rounded"
    " parameters; the tolerance is by how much float64 itself moves when all that goes in is rounded.",
    "NaN ends a training run; noise that a float32 softmax would not have slows it.",
    _run,
    follows_from=("softmax", "causal-blindness"),
)

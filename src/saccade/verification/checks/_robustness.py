"""The same function at every call: whatever the sizes, the strides, the mode and the calls before.

Shape legend: B batch, L length.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...interception._tracing import memory_of
from ...support._restored import seeded
from ..findings._finding import Finding, Location, TargetError
from ..findings._words import TRIANGLE
from ..subject._check import Check
from ..subject._learned_positions import ends_learned_positions
from ..subject._operations import WatchedOperations
from ..subject._source import attribute_line, line_with, rates_of, with_rates
from ..subject._steady import exact, steady, takes, tolerance
from ..subject._subject import Subject
from ..subject.discovery._squares import sliced_square
from ..tracing._randomness import drops, follow_randomness
from .cache._inside import differing, held

_finding = partial(Finding, "robustness", "robustness")
_error = partial(Finding, "robustness", "robustness", "error")

# Odd ones, the smallest, and one beyond the usual small buffers; those around the sizes of buffers are added.
LENGTHS = (1, 2, 3, 64, 257)
# A target that cannot take this many tokens and does not say so has a buffer for a test, not for use.
USEFUL = 48
# Limits beyond this are not passed: masks of such a length would need gigabytes.
_LONGEST = 4096
CLEAR = ("ValueError", "AssertionError", "IndexError", "NotImplementedError", "TypeError")


def _run(subject: Subject) -> Iterator[Finding]:
    reported = list(_written_inputs(subject)) or list(_repeated(subject))
    yield from reported
    sized = list(_batches(subject))
    sized += [] if any(finding.severity == "error" for finding in sized) else list(_lengths(subject))
    yield from sized
    if not reported:
        yield from _strides(subject)
        yield from _modes(subject)


def _repeated(subject: Subject) -> Iterator[Finding]:
    """The same input must give the same output after a call with another input."""
    if subject.reading.cache is not None and subject.reading.cache.kind == "inside":
        return  # told by cache
    copy, inputs = subject.fresh(), subject.inputs(2, 7)
    before = held(copy.module)
    with torch.no_grad(), seeded(0):
        first = copy(inputs).out
        try:
            copy(subject.inputs(3, 5, seed=1))
        except TargetError as error:
            if takes(subject, 3, 5, seed=1):
                yield _first_call_stays(error)
                return
        again = copy(inputs).out
    if first.shape == again.shape and (torch.equal(first, again) or not first.isfinite().all()):
        return
    drawn = follow_randomness(subject, inputs).draws
    if drawn and drops(drawn):
        return  # told by dropout
    change = float((first - again).abs().max()) if first.shape == again.shape else float("nan")
    changed = [f"{path}.{name}".lstrip(".") for path, name in differing(before, held(copy.module))]
    if drawn:
        what, where = f"it draws random numbers ({drawn[0].name})", drawn[0].location
        fix = "Take the noise out of eval mode: if self.training: ..."
    elif changed:
        what, where = f"a call changes {', '.join(f'`{name}`' for name in changed)}", _line_of(copy.module, changed[0])
        fix = "Do not keep state that a call computes, or recompute it from the input at each call."
    else:
        what, where = "something outside the module and its input changes", None
        fix = "Make it depend only on its input and parameters."
    yield _error(
        f"Two calls in eval mode with the same input differ by up to {change:.3g}: {what}.",
        "Results cannot be reproduced, and depend on earlier calls.",
        fix,
        {"largest_difference": change, "changed": changed, "draws": [draw.name for draw in drawn]},
        where,
    )


def _first_call_stays(error: TargetError) -> Finding:
    return _error(
        f"After a call with 2 sequences of 7, one with 3 of 5 raises {error.error}; alone it does not.",
        "State from the first call restricts the shapes of later ones.",
        "Build masks and buffers for the input at hand, at each call.",
        {"raised": error.error, "first": [2, 7], "then": [3, 5]},
        error.location,
    )


def _line_of(module: nn.Module | None, path: str) -> Location | None:
    if module is None:
        return None
    owner, _, name = path.rpartition(".")
    return attribute_line(module.get_submodule(owner), name, last=True)


def _written_inputs(subject: Subject) -> Iterator[Finding]:
    """Inputs that the call changes."""
    inputs = subject.inputs(2, 7)
    given = inputs.map(Tensor.clone)
    memory = {memory_of(tensor) for tensor in given.tensors.values()}

    def writes(operation: Any, taken: tuple[Any, ...], result: Any) -> bool:
        changes = operation._schema.is_mutable
        return changes and any(isinstance(tensor, Tensor) and memory_of(tensor) in memory for tensor in taken)

    with torch.no_grad(), seeded(0), WatchedOperations(writes) as writing:
        subject.fresh()(given)
    changed = [name for name in inputs.tensors if not torch.equal(inputs[name], given[name])]
    if changed:
        yield _error(
            f"The call changes its own input {', '.join(changed)} in place.",
            "Anything that the caller computes from that tensor afterwards (a residual, a loss) is wrong.",
            "Write it out of place: q = q / math.sqrt(d), not q /= math.sqrt(d).",
            {"changed": changed},
            writing.first_line,
        )


def _batches(subject: Subject) -> Iterator[Finding]:
    """Batches of one and of three items, compared with two."""
    for batch in (1, 3):
        try:
            out = steady(subject, subject.inputs(batch, 7)).out
        except TargetError as error:
            yield _raised(f"{batch} batch item{'s' if batch > 1 else ''}", error, "It works with 2.", {"batch": batch})
            return
        if out.shape[0] != batch or out.shape[-2 if subject.form != "tokens" else 1] != 7:
            yield _shape(f"{batch} batch items of 7", out)
            return
    yield from _items(exact(subject))


def _items(wide: Subject) -> Iterator[Finding]:
    """Item 0 in batches of one, two and three items. Where it depends on the other items, mixing reports it."""
    three = wide.inputs(3, 7)
    if follow_randomness(wide, three).draws:
        return  # other sizes draw other numbers
    two = steady(wide, three.items([0, 1])).out
    other = steady(wide, three.items([0, 2])).out
    if not (torch.equal(two[0], other[0]) and two.isfinite().all()):
        return
    for chosen in ([0], [0, 1, 2]):
        out = steady(wide, three.items(chosen)).out
        far = float((out[0] - two[0]).abs().max())
        if not far <= tolerance(wide, three, two):
            yield _error(
                f"Batch item 0 gives another output in a batch of {len(chosen)} than in a batch of 2 (by {far:.3g}).",
                "It is right only for one batch size.",
                "Take sizes from the input: batch, length, _ = x.shape; no number in view and reshape.",
                {"batch": len(chosen), "largest_difference": far},
                line_with(wide, r"\.(view|reshape)\(\s*\d"),
            )
            return


def _lengths(subject: Subject) -> Iterator[Finding]:
    """Findings for lengths that raise an error, up to a known limit; every length must work."""
    longest = subject.reading.max_length
    wanted = {n for n in (*LENGTHS, *_sizes(subject.module)) if longest is None or n <= longest}
    fits = 0
    for length in sorted(wanted):
        try:
            out = steady(subject, subject.inputs(2, length)).out
        except TargetError as error:
            if length > 7:
                yield _too_long(subject, max(fits, 7), length, error)
            else:
                yield _raised(f"a length of {length}", error, "It works with 7.", {"length": length})
            return
        if out.shape[-2 if subject.form != "tokens" else 1] != length:
            yield _shape(f"a length of {length}", out)
            return
        if not out.isfinite().all() and steady(subject, subject.inputs(2, 7)).out.isfinite().all():
            yield _error(
                f"With a length of {length} the output holds NaN or Inf; with 7 it does not.",
                "Sequences of that length cannot be used.",
                "Build masks and buffers from x.shape[1] at each call.",
                {"length": length},
                None,
            )
            return
        fits = length
    if longest is not None and longest <= _LONGEST:
        yield from _past_limit(subject, longest)


def _sizes(module: nn.Module | None) -> set[int]:
    """Lengths at and just beyond the sizes of buffers."""
    buffers = () if module is None else module.buffers()
    sizes = {size for buffer in buffers for size in buffer.shape if 8 <= size <= 512}
    return sizes | {size + 1 for size in sizes}


def _too_long(subject: Subject, fits: int, fails: int, error: TargetError) -> Finding:
    while fails - fits > 1:
        middle = (fits + fails) // 2
        try:
            steady(subject, subject.inputs(2, middle))
            fits = middle
        except TargetError as raised:
            fails, error = middle, raised
    return _limit(subject, fits, error)


def _past_limit(subject: Subject, longest: int) -> Iterator[Finding]:
    """An input longer than the limit must raise an error."""
    try:
        out = steady(subject, subject.inputs(2, longest + 1)).out
    except TargetError as error:
        yield _limit(subject, longest, error, known=True)
        return
    if out.shape[-2 if subject.form != "tokens" else 1] != longest + 1:
        yield _shape(f"a length of {longest + 1}, one more than its limit,", out)


def _limit(subject: Subject, longest: int, error: TargetError, known: bool = False) -> Finding:
    clear = error.error.startswith(CLEAR) or ends_learned_positions(subject, subject.inputs(2, longest + 1))
    silent = not clear and not known and longest < USEFUL
    message = f"It takes at most {longest} tokens; with {longest + 1} it raises {error.error}"
    evidence = {"longest": longest, "raised": error.error}
    square = None if clear else sliced_square(subject, longest, error)
    if square is not None and square.line is not None:
        message += f": {square.words}"
        return _finding("error", message, "Longer inputs fail.", _MEND_SQUARE, evidence, square.line)
    return _finding(
        "note" if clear else "error" if silent else "warning",
        message + (f". {square.words}" if square else ""),
        "Longer inputs fail" + ("." if clear else ", with words that do not say why."),
        "Build it for the length at hand, or say what the limit is: assert x.shape[1] <= self.max_len, ...",
        evidence,
        error.location,
    )


_MEND_SQUARE = f"mask = {TRIANGLE}  # L = x.shape[1]; a buffer is max_length wide"


def _strides(subject: Subject) -> Iterator[Finding]:
    """Inputs with other strides and equal values must give the same output."""
    if subject.form == "tokens":
        return
    wide = exact(subject)
    inputs = wide.inputs(2, 7)
    apart = inputs.map(lambda tensor: tensor.mT.contiguous().mT)
    plain = steady(wide, inputs).out
    try:
        out = steady(wide, apart).out
    except TargetError as error:
        yield _error(
            f"With inputs that are not contiguous in memory it raises {error.error}",
            "It fails on the results of transpose, permute or slicing, which are common.",
            "Use reshape, which copies where it must: x.reshape(batch, length, -1), not x.view(...).",
            {"raised": error.error, "contiguous": False},
            error.location,
        )
        return
    far = float((out - plain).abs().max())
    if plain.isfinite().all() and not far <= tolerance(wide, inputs, plain):
        yield _error(
            f"With the same inputs in another order in memory the output differs by {far:.3g}.",
            "Results depend on the memory layout of the input.",
            "Read tensors by their axes, not with as_strided or data_ptr.",
            {"largest_difference": far},
            None,
        )


def _modes(subject: Subject) -> Iterator[Finding]:
    """Train mode without dropout must compute the same as eval mode."""
    if subject.module is None or _learns_from_batches(subject.module):
        return
    quiet = exact(with_rates(subject, rates_of(subject), 0.0))
    inputs = quiet.inputs(2, 7)
    evaluated = steady(quiet, inputs).out
    with quiet.training():
        if follow_randomness(quiet, inputs).draws:
            return
        trained = steady(quiet, inputs).out
    far = float((trained - evaluated).abs().max())
    size = float(evaluated.abs().max())
    if evaluated.isfinite().all() and not far <= tolerance(quiet, inputs, evaluated):
        yield _error(
            f"Without dropout, train and eval mode differ by {far:.3g}, {far / max(size, 1e-30):.3g} of the output's"
            " size.",
            "The evaluated model is not the one that was trained.",
            "Only dropout may depend on self.training.",
            {"largest_difference": far, "largest_output": size},
            line_with(subject, r"self\.training"),
        )


def _learns_from_batches(module: nn.Module) -> bool:
    """Whether a module normalises by batch statistics, which by design computes something else in train mode."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    return any(isinstance(part, kinds) for part in module.modules())


def _raised(what: str, error: TargetError, works: str, sizes: dict[str, Any]) -> Finding:
    return _error(
        f"With {what} it raises {error.error}. {works}",
        "It fails on the last batch of an epoch, on single inputs, or on other sizes than those it was written for.",
        "Take sizes from the input: batch, length, _ = x.shape; and name the axis of squeeze and view.",
        {"raised": error.error, **sizes},
        error.location,
    )


def _shape(what: str, out: Tensor) -> Finding:
    return _error(
        f"With {what} the output has the shape {list(out.shape)}.",
        "Outputs are assigned to the wrong inputs.",
        "Take sizes from the input: batch, length, _ = x.shape; and name the axis of squeeze and view.",
        {"shape": list(out.shape)},
        None,
    )


CHECK = Check(
    "robustness",
    "robustness",
    "The output depends only on input and parameters, for any size and mode.",
    "Two calls with another one between; inputs compared before and after; 1 and 3 batch items; lengths from 1 to 257"
    " and at the sizes of buffers; transposed memory; train mode with dropout at 0.",
    "Code that is right only for some sizes fails later, or silently computes something else.",
    _run,
)

"""torch.compile: the target captured by TorchDynamo must give the same outputs.

The eager backend is used: it captures as every backend does and compiles nothing, so it takes a second and no compiler.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...support._restored import seeded
from ..findings._finding import Finding, Inapplicable, TargetError, Unmeasured
from ..subject._check import Check
from ..subject._inputs import NamedInputs
from ..subject._source import line_with
from ..subject._steady import exact, steady, tolerance
from ..subject._subject import Subject

_error = partial(Finding, "compile", "robustness", "error")
_warning = partial(Finding, "compile", "robustness", "warning")
_note = partial(Finding, "compile", "robustness", "note")

# What is captured here counts against no limit of the caller's, where PyTorch can keep it apart. Nothing is reset
# afterwards: that would throw away all that the caller has compiled.
_APART: dict[str, Any] = (
    {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
)


def _run(subject: Subject) -> Iterator[Finding]:
    wide = exact(subject)
    inputs = wide.inputs(2, 7)
    plain = steady(wide, inputs).out
    if not plain.isfinite().all():
        raise Unmeasured("its output is not finite")
    if subject.reading.cache is not None and subject.reading.cache.kind == "inside":
        raise Inapplicable("it keeps a cache from call to call")
    try:
        out, graphs = _compiled(wide, inputs)
    except TargetError as error:
        yield _warning(
            f"Under torch.compile it raises {error.error}",
            "It runs without compilation only.",
            "Move what is not PyTorch out of the forward, or mark it with torch.compiler.disable.",
            {"raised": error.error},
            error.location,
        )
        return
    far = float((out - plain).abs().max()) if out.shape == plain.shape else float("inf")
    if not far <= tolerance(wide, inputs, plain):
        yield _error(
            f"Under torch.compile the output differs from eager mode by {far:.3g}.",
            "The compiled model is not the one that was tested.",
            "Do not depend on whether it is compiled (torch.compiler.is_compiling()) or on state that changes.",
            {"largest_difference": far},
            line_with(subject, r"is_compiling|is_dynamo_compiling"),
        )
    elif graphs > 1:
        yield _note(
            f"torch.compile breaks it into {graphs} graphs.",
            "Each break costs speed; the results are right.",
            "torch._dynamo.explain names the breaks, such as .item(), print, branches on values, uncompiled functions.",
            {"graphs": graphs},
        )


def _compiled(subject: Subject, inputs: NamedInputs) -> tuple[Tensor, int]:
    """The output of the compiled target, and the number of graphs."""
    graphs = 0

    def count(graph: Any, example: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    fresh = subject.fresh()
    compiled = torch.compile(fresh.target, backend=count, **_APART)
    captured = replace(subject, target=compiled)
    with _quiet(), torch.no_grad():
        with seeded(0):
            captured(inputs)
        graphs_then = graphs
        with seeded(0):  # the second call draws what the first drew
            return captured(inputs).out, graphs_then


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A block that hides the warnings and log lines of a capture, which are reported as findings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


CHECK = Check(
    "compile",
    "robustness",
    "Under torch.compile it gives the same output.",
    "Captured with TorchDynamo and run eagerly, in float64, against the target itself.",
    "A compiled model with different results is noticed only in use.",
    _run,
)

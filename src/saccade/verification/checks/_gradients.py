"""Gradients: there, finite and right, for every parameter and input on which the output depends.

The loss is the output's product with fixed random numbers: a plain sum has no gradient through a LayerNorm.

Shape legend: those of the target's own parameters; weights (B, H, Lq, Lk).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...interception._tracing import FunctionCall, FunctionMode
from ...support._restored import seeded
from ..findings._finding import Finding, Inapplicable, Location, TargetError, Unmeasured
from ..subject._check import Check
from ..subject._inputs import NamedInputs
from ..subject._operations import WatchedOperations, location_here
from ..subject._source import block_around, function_line, rates_of, with_rates
from ..subject._subject import Subject
from ..tracing._trace import step_line
from ..tracing._visible import steps_of
from ._gradients_initial import at_the_start
from ._precision import jumps_of

_error = partial(Finding, "gradients", "gradients", "error")
_warning = partial(Finding, "gradients", "gradients", "warning")

# Of the central differences, in standard deviations of the tensor: the third derivative's share is its square, and
# what a float32 softmax inside a float64 module rounds stays below `TOLERANCE`.
STEPS = (1e-3, 1e-5, 1e-7)
TOLERANCE = 0.02
# Differences at a step and at its half agree better than this where there is a derivative.
_UNSTEADY = 0.1
# The tolerance where only the largest step is above the rounding, and curvature may be what it shows.
_COARSE = 0.06
AT_MOST = 80  # tensors that are differentiated numerically


@dataclass(frozen=True, eq=False)
class _DerivativePoint:
    """A target in train mode without dropout, and the inputs at which it is differentiated."""

    subject: Subject
    inputs: NamedInputs
    tensors: dict[str, Tensor]  # parameters and inputs by name
    exact: bool  # in float64, so that differences mean something

    def out(self) -> Tensor:
        """The output for copies of the inputs, so that a target that writes into them does not move the point."""
        with self.subject.training(), seeded(0):
            return self.subject(self.inputs.map(Tensor.clone)).out

    def loss(self, out: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        towards = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        return (out * towards.to(out.device, out.dtype)).sum()

    def value(self) -> float:
        with torch.no_grad():
            return float(self.loss(self.out()))


def _run(subject: Subject) -> Iterator[Finding]:
    point = _test_point(subject)
    with torch.no_grad():
        out, again = point.out(), point.out()
    if not out.isfinite().all():
        raise Unmeasured("its output is not finite")
    if not torch.equal(out, again):
        raise Unmeasured("two calls of it differ, so that it has no derivative")
    findings = list(_missing(point, out)) or list(_from_backward(point))
    if point.exact and any("not_finite" in finding.evidence for finding in findings):
        # a mask of the least float64 is -inf where the softmax is taken in float32
        findings = list(_from_backward(_in_own_dtype(with_rates(subject, rates_of(subject), 0.0))))
    yield from findings
    if not findings:
        yield from at_the_start(subject)


def _test_point(subject: Subject) -> _DerivativePoint:
    """The point at which gradients are tested, in float64 if the target supports it."""
    quiet = with_rates(subject, rates_of(subject), 0.0)
    try:
        exact = quiet.to(torch.float64)
        inputs = exact.inputs(2, 7, dtype=torch.float64).leaves()
        with torch.no_grad(), exact.training(), seeded(0):
            is_exact = exact(inputs).out.dtype == torch.float64
        if is_exact:
            return _DerivativePoint(exact, inputs, _tensors(exact, inputs), True)
    except TargetError:
        pass  # told by robustness
    return _in_own_dtype(quiet)


def _in_own_dtype(quiet: Subject) -> _DerivativePoint:
    inputs = quiet.inputs(2, 7).leaves()
    return _DerivativePoint(quiet, inputs, _tensors(quiet, inputs), False)


def _tensors(subject: Subject, inputs: NamedInputs) -> dict[str, Tensor]:
    named = {} if subject.module is None else dict(subject.module.named_parameters())
    tensors = {name: tensor for name, tensor in named.items() if tensor.requires_grad and tensor.numel()}
    return tensors | {f"input {name}": tensor for name, tensor in inputs.tensors.items() if tensor.is_floating_point()}


def _missing(point: _DerivativePoint, out: Tensor) -> Iterator[Finding]:
    """The finding that the output has no gradient at all."""
    if not point.tensors:
        raise Inapplicable("it has neither parameters nor inputs with gradients")
    out = point.out()
    if out.requires_grad:
        return
    if out.is_inference():
        yield _warning(
            "It runs in torch.inference_mode: its output has no gradient, as it is made to be used and not trained.",
            "With this forward, neither its own parameters nor anything before it can be trained.",
            "Put torch.inference_mode() around the call where it is used, not on forward.",
            {"inference": True},
            _cut_at(point),
        )
        return
    yield _error(
        "The output has no gradient: it is cut off from every parameter and input.",
        "Neither this module nor anything before it can be trained.",
        "Take out torch.no_grad(), .detach(), .data, .numpy() or torch.tensor(...) on the way to the output.",
        {"cut": sorted(point.tensors)},
        _cut_at(point),
    )


def _from_backward(point: _DerivativePoint) -> Iterator[Finding]:
    out = point.out()
    try:
        grads = torch.autograd.grad(
            point.loss(out), list(point.tensors.values()), allow_unused=True, materialize_grads=True
        )
    except RuntimeError as error:
        yield _backward_raised(point, error)
        return
    gradients = dict(zip(point.tensors, grads, strict=True))
    bad = [name for name, grad in gradients.items() if not grad.isfinite().all()]
    if bad:
        yield _error(
            f"The output is finite, but the gradient of {_listed(bad)} holds NaN or Inf.",
            "One step of training makes these parameters NaN, and with them every output.",
            "Apply torch.where to the input of the computation, not only to its result, and"
            " keep square roots, norms and divisions away from 0 (an eps inside).",
            {"not_finite": bad},
            _step_of(point, _STEEP),
        )
        return
    cut = list(_cut_off(point, gradients))
    yield from cut or _wrong_values(point, gradients)


def _cut_off(point: _DerivativePoint, grads: dict[str, Tensor]) -> Iterator[Finding]:
    """Tensors (or rows of them) without gradient that change the output. The bias of keys does not change it: a softmax
    ignores a number that is added to all its logits."""
    named, change = [], 0.0
    for name, grad in grads.items():
        still = _zero_rows(grad)
        if still is None or (still := _zero_elsewhere(point, name, still)) is None:
            continue
        by = _change(point, point.tensors[name], still)
        if by > 1e-5:
            named.append(name)
            change = max(change, by)
    if not named:
        return
    some = any(bool((grads[name] != 0).any()) for name in named)
    yield _error(
        f"The gradient of {_listed(named)} is zero{' in part' if some else ''}, although the output changes by"
        f" {change:.3g} of its size when it changes.",
        "Parameters without a gradient are never trained: they keep their initial values.",
        "Remove what cuts the gradient (.detach(), .data, torch.no_grad(), .item(), argmax in place of softmax).",
        {"without_gradient": named, "relative_change_of_output": round(change, 6)},
        _cut_at(point),
    )


def _zero_elsewhere(point: _DerivativePoint, name: str, still: Tensor) -> Tensor | None:
    """Elements of a parameter whose gradient is zero for many other inputs as well: a relu unit that is off at a few
    positions is not reported. None if there are few such elements."""
    if bool(still.all()) or name.startswith("input "):
        return still
    length = min(7, point.subject.reading.max_length or 7)
    inputs = point.subject.inputs(64, length, seed=5, dtype=torch.float64 if point.exact else None)
    other = _DerivativePoint(point.subject, inputs, point.tensors, False)
    try:
        out = other.out()
        grad = torch.autograd.grad(other.loss(out), point.tensors[name], allow_unused=True)[0]
    except (TargetError, RuntimeError):
        return still
    left = still if grad is None else still & (grad == 0)
    return left if left.float().mean() >= 0.25 else None


def _zero_rows(grad: Tensor) -> Tensor | None:
    """Which part of a gradient is zero: all of it, or at least a quarter of the rows or columns."""
    zero = grad == 0
    if bool(zero.all()) or grad.dim() < 2:
        return zero if zero.float().mean() >= 0.25 else None
    rows = zero.flatten(1).all(1)
    if rows.float().mean() >= 0.25:
        return rows.view(-1, *[1] * (grad.dim() - 1)).expand_as(grad)
    columns = zero.flatten(0, -2).all(0)
    return columns.expand_as(grad) if columns.float().mean() >= 0.25 else None


def _change(point: _DerivativePoint, tensor: Tensor, where: Tensor) -> float:
    """The relative change of the output when part of a tensor changes."""
    with torch.no_grad():
        before, kept = point.out(), tensor.detach().clone()
        tensor += where * _direction(tensor)
        after = point.out()
        tensor.copy_(kept)
    return float((after - before).abs().max() / before.abs().max().clamp_min(1e-30))


def _wrong_values(point: _DerivativePoint, grads: dict[str, Tensor]) -> Iterator[Finding]:
    """Findings about gradients that differ from finite differences."""
    if not point.exact or jumps_of(point.subject) is not None:
        return  # differences mean nothing of what moves in jumps, which precision tells
    directions = {name: _direction(tensor) for name, tensor in point.tensors.items()}
    scales = {name: float(grads[name].norm() * drawn.square().mean().sqrt()) for name, drawn in directions.items()}
    # what moves the loss a hundred thousand times less than something else does is rounding (the bias of the keys)
    noise, least = _noise(point), 1e-5 * max(scales.values())
    worst: tuple[float, str, float, float] | None = None
    names = []
    for name in list(grads)[-AT_MOST:]:
        direction = directions[name]
        slope = float((grads[name] * direction).sum())
        scale = max(scales[name], abs(slope), least)
        true = _measured(point, name, direction, slope, scale, noise)
        if true is None:
            continue
        names.append(name)
        off = abs(slope - true) / max(scale, abs(true))
        if worst is None or off > worst[0]:
            worst = (off, name, slope, true)
    if worst is None:
        return
    _, name, slope, true = worst
    yield _error(
        f"The gradient of {_listed(names)} is wrong: along one direction of {name}, backward says {slope:.3g} and the"
        f" output changes by {true:.3g} (central differences in float64).",
        "Training does not follow the gradient of the loss, and learns less or nothing.",
        "Correct the backward of the autograd.Function or hook on the way, or take out the .detach() that cuts part of"
        " it; torch.autograd.gradcheck tests it.",
        {"wrong": names, "backward": slope, "differences": true},
        _own_backward(point.out()) or _cut_at(point),
    )


def _measured(
    point: _DerivativePoint, name: str, direction: Tensor, value: float, scale: float, noise: float
) -> float | None:
    """The central difference, if it differs from `value`, the gradient of the backward pass; otherwise None. None also
    for a kink between the two points (relu), which a smaller step avoids, and for curvature or jumps (a router that
    chooses another expert, rounding), where each step gives another difference."""
    true, last = None, 0.0
    for step in STEPS:
        difference = _difference(point, point.tensors[name], direction, step)
        allowed = TOLERANCE * max(scale, abs(difference))
        if noise / step > allowed:
            break
        if abs(value - difference) <= allowed:
            return None
        true, last = difference, step
    if true is None:
        return None
    again = _difference(point, point.tensors[name], direction, last / 2)
    fine = noise / (_COARSE * scale)
    if last == STEPS[0] and fine < last / 2:
        near = _difference(point, point.tensors[name], direction, fine)
        if abs(value - near) <= _COARSE * max(scale, abs(near)):
            return None
    return true if abs(again - true) <= _UNSTEADY * max(abs(again), abs(true)) else None


def _noise(point: _DerivativePoint) -> float:
    """Rounding error of the loss, float64's or that of float32 parts inside: the residual of a parabola through values
    a millionth of every tensor apart."""
    at = torch.arange(-2.0, 3.0, dtype=torch.float64)
    kept = [tensor.detach().clone() for tensor in point.tensors.values()]
    values = []
    with torch.no_grad():
        for size in at.tolist():
            for tensor, old in zip(point.tensors.values(), kept, strict=True):
                tensor.copy_(old * (1 + 1e-6 * size))
            values.append(point.value())
        for tensor, old in zip(point.tensors.values(), kept, strict=True):
            tensor.copy_(old)
    losses = torch.tensor(values, dtype=torch.float64)
    powers = at[:, None] ** torch.arange(3)
    left = losses - powers @ torch.linalg.lstsq(powers, losses[:, None]).solution[:, 0]
    return 20 * max(float(left.abs().max()), torch.finfo(torch.float64).eps * float(losses.abs().max()))


def _difference(point: _DerivativePoint, tensor: Tensor, direction: Tensor, step: float) -> float:
    with torch.no_grad():
        kept = tensor.detach().clone()
        tensor.add_(direction, alpha=step)
        above = point.value()
        tensor.copy_(kept).add_(direction, alpha=-step)
        below = point.value()
        tensor.copy_(kept)
    return (above - below) / (2 * step)


def _direction(tensor: Tensor) -> Tensor:
    """Random numbers of the tensor's own size."""
    generator = torch.Generator().manual_seed(11)
    size = tensor.detach().square().mean().sqrt() if tensor.numel() else tensor.new_ones(())
    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device, tensor.dtype)
    return drawn * (size if size > 1e-3 else 0.1)


class _GraphBreaks(FunctionMode):
    """Lines at which something with a gradient goes in and something without comes out, largest first."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, Location]] = []

    def sees(self, call: FunctionCall) -> None:
        if any(tensor.requires_grad for tensor in call.given) and (where := location_here()) is not None:
            for tensor in tree_leaves(call.result):
                cut = isinstance(tensor, Tensor) and not tensor.requires_grad and tensor.dtype != torch.bool
                if cut or type(tensor) is float:
                    self.found.append((tensor.numel() if isinstance(tensor, Tensor) else 1, where))


def _cut_at(point: _DerivativePoint) -> Location | None:
    cuts = _GraphBreaks()
    with cuts:
        point.out()
    if not cuts.found:
        return _step_of(point, _FLAT)
    cut = max(cuts.found, key=lambda pair: pair[0])[1]
    return block_around(point.subject, cut, "no_grad", "inference_mode") or cut


_FLAT = ("round", "floor", "ceil", "trunc", "sign", "heaviside", "argmax")
_STEEP = ("log", "log2", "sqrt", "rsqrt", "reciprocal", "pow", "norm", "vector_norm", "acos", "asin")


def _step_of(point: _DerivativePoint, names: tuple[str, ...]) -> Location | None:
    """The first line that calls one of these functions."""
    return step_line(steps_of(point.subject, point.inputs), names)


def _own_backward(out: Tensor) -> Location | None:
    """The line of the backward of an autograd.Function in the target's own code."""
    nodes, visited = [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        nodes += [function for function, _ in node.next_functions]
        kind = getattr(type(node), "_forward_cls", None)
        if kind is not None and (line := function_line(kind.backward)) is not None:
            return line
    return None


def _changed_in_place(operation: Any, given: tuple[Any, ...], result: Any) -> tuple[list[int]] | None:
    """The shape of a tensor that an operation changes in place."""
    changes = operation._schema.is_mutable and given and isinstance(given[0], Tensor)
    return (list(given[0].shape),) if changes else None


def _backward_raised(point: _DerivativePoint, error: RuntimeError) -> Finding:
    words = " ".join(str(error).split())
    where = None
    if "inplace operation" in words:
        with WatchedOperations(_changed_in_place) as changes:
            point.out()
        lines = [(shape, line) for (shape,), line in changes.found if line is not None]
        named = re.search(r"Tensor \[([\d, ]*)\]", words)
        wanted = [int(n) for n in named[1].split(",") if n.strip()] if named else None
        fits = [line for shape, line in lines if wanted is None or shape == wanted] or [line for _, line in lines]
        where = fits[-1] if fits else None
    return _error(
        f"The backward pass raises: {words[:300]}",
        "It cannot be trained.",
        "Write the operation out of place: scores = scores.masked_fill(mask, -inf), not masked_fill_."
        if "inplace operation" in words
        else "Make every operation on the way differentiable.",
        {"raised": words[:500]},
        where,
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


CHECK = Check(
    "gradients",
    "gradients",
    "Everything that the output depends on gets a finite and correct gradient.",
    "One backward pass in float64, in train mode without dropout, against central differences along a random direction"
    " of each tensor; the largest weights of each row for inputs of variance 1.",
    "Parameters without a gradient are never trained; parameters with a wrong one are trained wrongly.",
    _run,
    follows_from=("scale",),
)

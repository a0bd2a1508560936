"""Calls that can be compared with one another: the same random numbers in each, no state from the one before.

Shape legend: B batch, L length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...support._restored import seeded
from ..findings._finding import Inapplicable, TargetError, Unmeasured
from ._inputs import NamedInputs
from ._subject import CallResult, Subject


def steady(subject: Subject, inputs: NamedInputs, seed: int = 0, **masks: Any) -> CallResult:
    """A repeatable call: on a copy of the target, without gradients, with random numbers from `seed`. State that the
    copy keeps does not reach the target."""
    return repeated(subject.fresh(), inputs, seed, **masks)


def repeated(subject: Subject, inputs: NamedInputs, seed: int = 0, **masks: Any) -> CallResult:
    """As `steady`, on the target itself: for whole models, which keep nothing and are large to copy."""
    with seeded(seed, devices=None), torch.no_grad():
        return subject(inputs, **masks)


def takes(subject: Subject, batch: int, length: int, seed: int = 0) -> bool:
    """Whether a call with inputs of these sizes works."""
    try:
        steady(subject, subject.inputs(batch, length, seed=seed))
    except TargetError:
        return False
    return True


def exact(subject: Subject) -> Subject:
    """A copy in float64 with weights large enough to show their effect, or the nearest that the target supports."""
    for dtype in (torch.float64, torch.float32):
        try:
            copy = vivid(subject.to(dtype))
            steady(copy, copy.inputs(1, 2, dtype=dtype))
            return copy
        except TargetError:
            continue
    return subject


def vivid(subject: Subject) -> Subject:
    """Give weights a standard deviation of at least 1 / sqrt(inputs), 1 for embeddings, and replace zeros. Small
    initial weights (0.02) make every logit nearly 0, and output projections and gates that start at 0 hide everything
    before them. Changes `subject` in place."""
    if subject.module is None:
        return subject
    generator = torch.Generator().manual_seed(0)
    tables = {id(module.weight) for module in subject.module.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for parameter in subject.module.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            if not parameter.any():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(drawn / math.sqrt(max(parameter.shape[-1:].numel(), 1)))
            elif parameter.dim() > 1 and parameter.numel() > 3:
                size = float(parameter.double().std())
                wanted = 1.0 if id(parameter) in tables else 1 / math.sqrt(max(parameter[0].numel(), 1))
                if 0 < size < wanted:
                    parameter.mul_(wanted / size)
    return subject


def tolerance(subject: Subject, inputs: NamedInputs, out: Tensor) -> float:
    """The largest difference allowed between two ways to compute `out`: 1e-6 of its size if the target computes in
    float64 (parts such as the softmax are often still in float32, whose numbers are 6e-8 apart), otherwise 1e-4."""
    size = float(out.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()) if out.numel() else 0.0
    return size * (1e-6 if out.dtype == torch.float64 and _resolves(subject, inputs, out) else 1e-4)


def _resolves(subject: Subject, inputs: NamedInputs, out: Tensor) -> bool:
    """Whether a change of 2^-36 in the inputs, which float32 cannot hold, reaches the output."""
    if inputs.vocabulary:
        return True
    near = steady(subject, inputs.map(lambda t: t * (1 + 2**-36))).out
    return near.shape == out.shape and not torch.equal(near, out) and bool((near - out).abs().max() < 1e-7)


def first_taken(tries: Iterable[tuple[Subject, int, int | None]]) -> tuple[Subject, NamedInputs]:
    """The first of (target, length, key length) that a call of two items takes, with its inputs.

    Raises:
        Inapplicable: it takes none; the message says why not the last.
    """
    why = "nothing was tried"
    for subject, length, keys in tries:
        fresh = subject.fresh()  # some keep something of their first call
        try:
            inputs = fresh.inputs(2, length, keys)
            with torch.no_grad():
                fresh(inputs)
        except Inapplicable as reason:
            why = str(reason)
        except TargetError as error:
            why = f"a call of it raised {error.error}"
        else:
            return fresh, inputs
    raise Unmeasured(why)

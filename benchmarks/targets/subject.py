"""The contender that is held to the targets, and what a call costs before it computes anything.

An empty call allocates its results and does nothing else: of three inputs an uninitialised output, and in a backward
pass uninitialised gradients of the inputs. Time below it no operator of PyTorch called from Python has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from saccade.benchmark.attention import sets
from saccade.benchmark.attention.cases import CaseInputs
from saccade.benchmark.attention.checking import staged
from saccade.benchmark.attention.contenders import SaccadeAttention
from saccade.benchmark.attention.machine import Limit, Meter
from saccade.benchmark.attention.timing import Budget, Stopwatch

EMPTY_CALL = "empty call"


@contextlib.contextmanager
def forced(name: str | None) -> Iterator[None]:
    """Run the native kernels on an instruction set (None: the one in use), and afterwards on what they ran on before.

    Args:
        name: "avx2", for example; "avx512_bf16!" for one that the processor has and a hypervisor hides.

    Raises:
        ValueError: no build, or no such set on this machine.
    """
    if name is None:
        yield
        return
    native = sets.compiled()
    if native is None:
        raise ValueError(f"instruction set {name!r}: the native kernels are not built here")
    before = str(native.active())
    native.use(name)
    try:
        yield
    finally:
        # The exclamation mark only matters for a set that is hidden, which was in use already.
        native.use(before + "!")


class SubjectAttention(SaccadeAttention):
    """`saccade.attention` through one backend on an instruction set, beside an empty call and that set's limits."""

    def __init__(self, backend: str, instruction_set: str | None = None):
        super().__init__(backend)
        self.instruction_set = instruction_set
        self.name = backend if instruction_set is None else f"{backend}:{instruction_set}"

    def around(self) -> contextlib.AbstractContextManager[Any]:
        return forced(self.instruction_set)

    def limits(self, inputs: CaseInputs, threads: int) -> list[Limit]:
        with self.around():
            limits = [replace(limit, meter=self._forced(limit.meter)) for limit in super().limits(inputs, threads)]
        empty = Stopwatch(empty_call(inputs))
        empty.prepare(Budget().block)
        return [*limits, Limit(EMPTY_CALL, "s", empty)]

    def _forced(self, meter: Meter) -> Meter:
        def rate() -> float:
            with self.around():
                return meter()

        return rate


class _Empty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return query.new_empty(*query.shape[:-1], value.shape[-1])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(leaf) for leaf in ctx.saved_tensors)


def empty_call(inputs: CaseInputs) -> Callable[[], object]:
    """The stage of the case, with nothing computed."""
    query, key, value = inputs.leaves
    if inputs.case.records:
        return staged(lambda: _Empty.apply(query, key, value), inputs)
    return staged(lambda: query.new_empty(*query.shape[:-1], value.shape[-1]), inputs)

"""The same inputs give the same outputs in eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ....interception._hooks import hooked
from ....support._restored import seeded
from ...findings._finding import Finding
from .._bounds import Measure, served_alike
from .._documents import drawn
from .._probe import Probe
from .._stack import Stack


class ModuleCall(NamedTuple):
    """One call of a module: its name, and copies of the tensors that went in and came out."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]


def _run(stack: Stack, measure: Measure) -> Iterator[Finding]:
    documents = drawn(stack.vocabulary, [stack.length(5)])
    inputs = stack.batch(documents)
    first, again = (_outputs(stack, inputs, seed) for seed in (0, 1))
    if (stack.is_served and served_alike(measure, first[0], again[0])) or _equal(first[0], again[0]):
        return
    same_seed = [_outputs(stack, inputs, 0)[0] for _ in range(2)]
    random = bool(stack.modules) and _equal(*same_seed)  # seeds have no power over other processes
    moved = _first_moved(first[1], again[1])
    difference = float((first[0] - again[0]).abs().max())
    what = "draws random numbers" if random else "keeps state from one call to the next"
    yield PROBE.error(
        f"Two calls with the same inputs differ by {difference:.3g} in eval mode: "
        + (f"{moved} {what}" if moved else f"the model {what}"),
        "Evaluation, generation and every comparison depend on chance, or on what ran before.",
        "F.dropout(x, p, training=self.training)  # not on in eval mode"
        if random
        else "Reset caches and buffers at the start of each sequence, or keep them outside of the module",
        documents,
        where=moved,
        what_moves="random numbers" if random else "state",
    )


def _outputs(stack: Stack, inputs: Any, seed: int) -> tuple[Tensor, list[ModuleCall]]:
    """The output, and the calls of modules, inner ones first."""
    names = {part: name for module in stack.modules for name, part in module.named_modules() if name}
    running: list[list[Tensor]] = []
    ran: list[ModuleCall] = []

    def begin(part: nn.Module, places: Any, named: Any) -> None:
        running.append(_tensors((places, named)))

    def end(part: nn.Module, returned: Any) -> None:
        ran.append(ModuleCall(f"{names[part]} ({type(part).__name__})", running.pop(), _tensors(returned)))

    with seeded(seed, devices=None), hooked(list(names), before=begin, after=end):
        return stack.run(inputs), ran


def _tensors(values: Any) -> list[Tensor]:
    return [value.detach().clone() for value in tree_leaves(values) if isinstance(value, Tensor)]


def _equal(tensor: Tensor, other: Tensor) -> bool:
    return torch.equal(tensor.nan_to_num(), other.nan_to_num())


def _first_moved(first: list[ModuleCall], again: list[ModuleCall]) -> str:
    """The first module whose outputs differ though its inputs do not."""
    for call, other in zip(first, again, strict=False):
        if all(map(_equal, call.inputs, other.inputs)) and not all(map(_equal, call.outputs, other.outputs)):
            return call.name
    return ""


PROBE = Probe("determinism", "The same inputs give the same outputs in eval mode.", _run, rounds=False)

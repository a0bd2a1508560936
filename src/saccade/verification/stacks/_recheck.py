"""A few tokens that show in about a second whether a stack still keeps the promises that it kept before."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator

import torch

from ..findings._finding import Inapplicable, TargetError
from ._bounds import exact, measured
from ._comparing import Comparison
from ._documents import drawn, exchanged
from ._opened import Given, opened
from ._stack import Stack


def broken(given: Given, kept: Collection[str]) -> bool:
    """Whether a promise of one of these probes seems to be broken. The probes have the proof.

    Two documents are packed, or padded, and compared with themselves alone; one is called twice; its last token
    changes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            stack = opened(given)
            with exact(stack):
                return any(_differences(stack, kept))
        except (Inapplicable, TargetError):
            return True


def _differences(stack: Stack, kept: Collection[str]) -> Iterator[bool]:
    documents = drawn(stack.vocabulary, [stack.length(3), stack.length(2 if stack.takes_padding else 3)])
    document = stack.batch(documents[:1])
    first = stack.run(document)
    if "determinism" in kept:
        yield not torch.equal(first.nan_to_num(), stack.run(document).nan_to_num())
    measure = measured(stack)
    if "causality" in kept and stack.promises.causal is not False:
        last = len(documents[0]) - 1
        changed = stack.run(stack.batch([exchanged(documents[0], stack.vocabulary, last)]))
        yield measure.compare(changed[0, :last], first[0, :last]) is not None
    for name, make in (("packing", stack.pack), ("batch", stack.batch)):
        if name in kept and make is not None:
            yield Comparison(stack, measure, make).worst(documents) is not None

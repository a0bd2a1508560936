"""Each document of a batch or a pack beside the same document alone.

Shape legend: R rows, L length, V width of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..findings._finding import TargetError
from ._bounds import Difference, Measure
from ._documents import Documents, Place, ids_of, located, with_ids
from ._stack import Stack, padding_of

Make = Callable[[Documents], Any]
# Inputs of which a model needs none but the ids to read one document.
_PLAIN = {"input_ids", "attention_mask", "position_ids", "labels"}


class Compared(NamedTuple):
    """A document that is not the same among others as alone."""

    document: int
    place: Place
    difference: Difference
    out: Tensor  # (L, V) among others
    alone: Tensor  # (L, V)


def compared(
    stack: Stack, measure: Measure, make: Make, documents: Documents, edit: Make | None = None
) -> Compared | None:
    """The document that differs most from itself alone, None if all are the same. `edit` changes the inputs first."""
    return max(
        each(stack, measure, make, documents, edit), key=lambda document: document.difference.relative, default=None
    )


def each(stack: Stack, measure: Measure, make: Make, documents: Documents, edit: Make | None = None) -> list[Compared]:
    """Every document that differs from itself alone, beside the reference that it is furthest from."""
    inputs = make(documents)
    places = located(inputs, documents)
    out = stack.run(inputs if edit is None else edit(inputs))
    differing = []
    for at, (document, place) in enumerate(zip(documents, places, strict=True)):
        own = out[place.row, place.columns]
        pairs = [
            Compared(at, place, difference, own, reference)
            for reference in references(stack, make, document)
            if (difference := measure.compare(own, reference)) is not None
        ]
        differing += sorted(pairs, key=lambda pair: pair.difference.relative)[-1:]
    return differing


def references(stack: Stack, make: Make, document: list[int]) -> list[Tensor]:
    """The document's outputs (L, V) when it is alone: as `make` gives it; and without anything around it, where its
    inputs are nothing but ids, masks and positions."""
    single = make([document])
    [own] = located(single, [document])
    outputs = [stack.run(single)[own.row, own.columns]]
    if isinstance(single, Mapping) and set(single) <= _PLAIN and _is_padded(single):
        real = padding_of(single)
        assert real is not None
        kept = real[own.row].nonzero().flatten()
        bare = {"input_ids": ids_of(single)[own.row, kept][None]}
        first = own.start - int(kept[0])
        with suppress(TargetError):  # it may need more than ids
            outputs.append(stack.run(bare)[0, first : first + own.length])
    return outputs


def _is_padded(inputs: Mapping[str, Any]) -> bool:
    real = padding_of(inputs)
    return real is not None and not bool(real.all()) and "input_ids" in inputs


def refilled(inputs: Any, vocabulary: Tensor, kept: Tensor) -> Any:
    """Inputs with other token ids wherever `kept` (R, L) is False."""
    ids = ids_of(inputs)
    generator = torch.Generator().manual_seed(3)
    others = vocabulary[torch.randint(len(vocabulary), ids.shape, generator=generator)].to(ids)
    return with_ids(inputs, torch.where(kept, ids, others))


def loss_of(out: Tensor, document: list[int]) -> float | None:
    """The mean loss of the document's next tokens, None where the outputs are no logits."""
    if out.shape[-1] <= max(document) or len(document) < 2:
        return None
    targets = torch.tensor(document[1:], device=out.device)
    return float(torch.nn.functional.cross_entropy(out[:-1].double(), targets))


def in_users_terms(stack: Stack, measure: Measure, make: Make, documents: Documents) -> str:
    """The effect of a difference: the share of outputs that change, and the loss of the document that changes most."""
    every = each(stack, measure, make, documents)
    changed = sum(len(one.difference.differing) for one in every)
    words = f"{changed / sum(map(len, documents)):.0%} of the outputs change"
    worst = max(every, key=lambda one: one.difference.relative)
    before, after = (loss_of(out, documents[worst.document]) for out in (worst.alone, worst.out))
    return (
        words
        if before is None or after is None
        else f"{words}; the loss of one document is {after:.4g}, not {before:.4g}"
    )

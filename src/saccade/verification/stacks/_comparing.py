"""Each document of a batch or a pack beside the same document alone.

Shape legend: R rows, L length, V width of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..findings._finding import TargetError
from ._bounds import Difference, Measure
from ._documents import DocumentPlace, Documents, ids_of, located, with_ids
from ._shrink import smallest
from ._stack import Stack, padding_of

Make = Callable[[Documents], Any]
# Inputs of which a model needs none but the ids to read one document.
_PLAIN = {"input_ids", "attention_mask", "position_ids", "labels"}


class Compared(NamedTuple):
    """A document that is not the same among others as alone."""

    document: int
    place: DocumentPlace
    difference: Difference
    out: Tensor  # (L, V) among others
    alone: Tensor  # (L, V)


@dataclass(frozen=True)
class Comparison:
    """Documents among others, as `make` gives them, beside themselves alone, which are computed once."""

    stack: Stack
    measure: Measure
    make: Make
    _alone: dict[tuple[int, ...], list[Tensor]] = field(default_factory=dict)

    def worst(self, documents: Documents, edit: Make | None = None) -> Compared | None:
        """The document that differs most from itself alone, None if all are the same. `edit` changes inputs first."""
        return max(self.each(documents, edit), key=lambda one: one.difference.relative, default=None)

    def each(self, documents: Documents, edit: Make | None = None) -> list[Compared]:
        """Every document that differs from itself alone, beside the reference that it is furthest from."""
        inputs = self.make(documents)
        places = located(inputs, documents)
        out = self.stack.run(inputs if edit is None else edit(inputs))
        differing = []
        for at, (document, place) in enumerate(zip(documents, places, strict=True)):
            own = out[place.row, place.columns]
            pairs = [
                Compared(at, place, difference, own, reference)
                for reference in self.alone(document)
                if (difference := self.measure.compare(own, reference)) is not None
            ]
            differing += sorted(pairs, key=lambda pair: pair.difference.relative)[-1:]
        return differing

    def same_with(self, documents: Documents, edit: Make) -> bool:
        """Whether all documents are as alone once the inputs are edited."""
        try:
            return self.worst(documents, edit) is None
        except TargetError:
            return False

    def alone(self, document: list[int]) -> list[Tensor]:
        """The document's outputs (L, V) when it is alone: as `make` gives it; and without anything around it, where
        its inputs are nothing but ids, masks and positions."""
        if tuple(document) not in self._alone:
            self._alone[tuple(document)] = list(self._references(document))
        return self._alone[tuple(document)]

    def _references(self, document: list[int]) -> Iterator[Tensor]:
        single = self.make([document])
        [own] = located(single, [document])
        yield self.stack.run(single)[own.row, own.columns]
        if isinstance(single, Mapping) and set(single) <= _PLAIN and _is_padded(single):
            real = padding_of(single)
            assert real is not None
            kept = real[own.row].nonzero().flatten()
            bare = {"input_ids": ids_of(single)[own.row, kept][None]}
            bare["attention_mask"] = torch.ones_like(bare["input_ids"])  # some compute another one where it is left out
            first = own.start - int(kept[0])
            with suppress(TargetError):  # it may need more than ids
                yield self.stack.run(bare)[0, first : first + own.length]

    def smallest(self, documents: Documents) -> tuple[Documents, Compared, str]:
        """(the smallest documents that still differ, the one that differs most, the effect on all of these)."""
        worst = self.worst(documents)
        assert worst is not None
        return *smallest(documents, self.worst, worst), self.in_users_terms(documents)

    def in_users_terms(self, documents: Documents) -> str:
        """The effect of a difference: the share of outputs that change, and the loss of the document that changes
        most."""
        every = self.each(documents)
        changed = sum(len(one.difference.differing) for one in every)
        words = f"{changed / sum(map(len, documents)):.0%} of the outputs change"
        worst = max(every, key=lambda one: one.difference.relative)
        before, after = (loss_of(out, documents[worst.document]) for out in (worst.alone, worst.out))
        if before is None or after is None:
            return words
        return f"{words}; the loss of one document is {after:.4g}, not {before:.4g}"


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

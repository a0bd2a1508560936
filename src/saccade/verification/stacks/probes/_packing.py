"""A document is the same alone and packed, at every place of the pack: its outputs, its labels, its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ....support._restored import seeded
from ...findings._finding import Finding, Inapplicable, TargetError
from ...subject._shortened import size_of
from .._bounds import Measure, mixed_by, training, without_dropout
from .._comparing import Compared, Comparison, Make
from .._documents import DocumentPlace, Documents, drawn, exchanged, ids_of, located
from .._probe import Probe
from .._shrink import smallest
from .._stack import Stack, needs

_LENGTHS = (5, 3, 7, 4)
_MANY = (33, 1, 17, 2, 29, 9)  # beyond 64 tokens, where tiles and buffers end, and one document of one token
_LARGEST = 2**29  # bytes of parameters: of larger models no gradients are compared
_TIMES = 8  # sums over positions round more than one output does


def _run(stack: Stack, measure: Measure) -> Iterator[Finding]:
    pack: Make = needs(stack.pack, "packing function (pack=)")
    documents = drawn(stack.vocabulary, [stack.length(length) for length in _LENGTHS])
    outputs = list(_outputs(Comparison(stack, measure, pack), documents))
    if not outputs and not mixed_by(stack):
        with training(stack):
            if _draws(stack, measure, pack(documents)):
                yield from _labels(pack, documents)
                return
            found = _outputs(Comparison(stack, measure, pack), documents)
            outputs = [replace(finding, message=f"In train mode: {finding.message}") for finding in found]
            if not outputs:
                with without_dropout(stack):
                    yield from _gradients(stack, measure, pack, documents)
    yield from outputs
    yield from _labels(pack, documents)


def _draws(stack: Stack, measure: Measure, inputs: Any) -> bool:
    """Whether two calls differ in train mode, where more is drawn than dropout: then nothing can be compared."""
    outs = []
    for seed in (0, 1):
        with seeded(seed, devices=None):
            outs.append(stack.run(inputs).flatten(0, 1))
    return measure.compare(*outs) is not None


# Outputs


def _outputs(comparison: Comparison, documents: Documents) -> Iterator[Finding]:
    stack = comparison.stack
    turns = [documents[first:] + documents[:first] for first in range(len(documents))]  # each document at each place
    # A document of one token can be located where no other one has this token.
    if min(stack.longest or sum(_MANY), len(stack.vocabulary)) >= sum(_MANY):
        turns.append(drawn(stack.vocabulary, _MANY, seed=1))
    for turned in turns:
        try:
            differs = comparison.worst(turned) is not None
        except (Inapplicable, TargetError):  # a packing may drop or cut what is long or a single token
            if len(turned) == len(_MANY):
                return
            raise
        if differs:
            yield _finding(comparison, turned)
            return


def _finding(comparison: Comparison, documents: Documents) -> Finding:
    documents, worst, effect = comparison.smallest(documents)
    sources = _sources(comparison, documents, worst)
    words, fix, where = _cause(comparison, documents, worst, sources)
    return PROBE.error(
        f"{words}: output {worst.difference.position} of document {worst.document} differs by "
        f"{worst.difference.size:.3g} from the same document alone",
        f"{effect}. A loss over packs looks plausible, and another task is learned.",
        fix,
        documents,
        worst.difference,
        where=where,
        document=worst.document,
        sources=sources,
    )


def _sources(comparison: Comparison, documents: Documents, worst: Compared) -> list[int]:
    """The other documents whose content reaches the worst one."""
    stack, measure, pack = comparison.stack, comparison.measure, comparison.make
    before = stack.run(pack(documents))
    sources = []
    for other in set(range(len(documents))) - {worst.document}:
        changed = [
            exchanged(document, stack.vocabulary) if at == other else document for at, document in enumerate(documents)
        ]
        inputs = pack(changed)
        if ids_of(inputs).shape != before.shape[:2]:
            continue
        after = stack.run(inputs)[worst.place.row, worst.place.columns]
        if measure.compare(after, before[worst.place.row, worst.place.columns]) is not None:
            sources.append(other)
    return sources


def _cause(comparison: Comparison, documents: Documents, worst: Compared, sources: list[int]) -> tuple[str, str, str]:
    """(what is wrong, the fix, the argument), by which change of the inputs makes the difference go away."""
    inputs = comparison.make(documents)
    places = located(inputs, documents)
    wrong = _unrestarted(inputs, places)
    words = f"Document {worst.document} attends to document {sources[0]} of its pack" if sources else ""
    if wrong is not None:
        restart = f"position_ids do not restart: document {wrong} begins at {_begins(inputs, places[wrong])}"
        words = f"{words}, and {restart}" if words else f"In a pack {restart}"
    elif not words:
        words = f"Document {worst.document} depends on its place in the pack: its positions do not restart"
    for fix, edit in _edits(places):
        if isinstance(inputs, Mapping) and comparison.same_with(documents, edit):
            return words, f"{fix}  # with it the document is the same as alone", fix.partition(" ")[0]
    if sources:
        return (
            words,
            "mask = document[:, None] == document[None, :]  # beside the causal one, or position_ids that restart "
            "without an attention_mask",
            "attention_mask",
        )
    return words, "position_ids = torch.cat([torch.arange(len(document)) for document in documents])", "position_ids"


def _unrestarted(inputs: Any, places: list[DocumentPlace]) -> int | None:
    """The first document whose position_ids do not begin where the first one's do."""
    starts = [_begins(inputs, place) for place in places]
    first = min(range(len(places)), key=lambda at: places[at])
    return next((at for at, start in enumerate(starts) if start is not None and start != starts[first]), None)


def _begins(inputs: Any, place: DocumentPlace) -> int | None:
    positions = inputs.get("position_ids") if isinstance(inputs, Mapping) else None
    if not isinstance(positions, Tensor) or positions.shape[-1] != ids_of(inputs).shape[-1] or positions.dim() > 2:
        return None
    rows = positions if positions.dim() == 2 else positions[None]
    return int(rows[min(place.row, len(rows) - 1), place.start])


def _edits(places: list[DocumentPlace]) -> list[tuple[str, Make]]:
    """Changes of the inputs that may fix a pack, the smallest first, each with its words."""

    def restarted(inputs: Any) -> Any:
        ids = ids_of(inputs)
        positions = torch.arange(ids.shape[1]).expand(ids.shape).clone()
        for place in places:
            positions[place.row, place.columns] = torch.arange(place.length)
        return {**inputs, "position_ids": positions}

    def unmasked(inputs: Any) -> Any:
        return {name: value for name, value in inputs.items() if name != "attention_mask"}

    def blocks(inputs: Any) -> Any:
        ids = ids_of(inputs)
        allowed = torch.zeros(len(ids), 1, ids.shape[1], ids.shape[1], dtype=torch.bool)
        for place in places:
            allowed[place.row, 0, place.columns, place.columns] = True
        return {**inputs, "attention_mask": allowed.tril()}

    return [
        ("position_ids that restart with each document", restarted),
        ("attention_mask left out: a mask of ones hides the seams that position_ids show", unmasked),
        ("attention_mask left out, and position_ids that restart", lambda inputs: unmasked(restarted(inputs))),
        ("attention_mask (1, 1, L, L) of blocks, one for each document", blocks),
        ("attention_mask of blocks and position_ids that restart", lambda inputs: blocks(restarted(inputs))),
    ]


# Gradients


def _gradients(stack: Stack, measure: Measure, pack: Make, documents: Documents) -> Iterator[Finding]:
    """Gradients of a pack beside the sum of those of its documents."""
    if sum(map(size_of, stack.modules)) > _LARGEST:
        return
    together = _gradient(stack, pack, documents, documents)
    alone = [_gradient(stack, pack, [document], documents) for document in documents]
    # Some gradients are 0, and hold nothing but rounding: softmax cancels the bias of keys.
    least = measure.bound * max((float(gradient.abs().max()) for gradient in together.values()), default=0.0)
    for name, gradient in together.items():
        parts = torch.stack([own[name] for own in alone]).sum(0)
        difference = measure.compare(gradient.reshape(1, -1), parts.reshape(1, -1))
        if difference is not None and difference.size > least and difference.relative > _TIMES * measure.bound:
            yield PROBE.error(
                f"The gradient of {name} for a pack is not the sum over its documents: it differs by "
                f"{difference.size:.3g}, though all outputs are the same",
                "Training with packs takes other steps than training without.",
                "Give the backward pass the same mask as the forward pass",
                documents,
                difference,
                where=name,
            )
            return


def _gradient(stack: Stack, make: Make, documents: Documents, every: Documents) -> dict[str, Tensor]:
    """The gradient of each parameter, of all outputs times numbers that are drawn for each document."""
    inputs = make(documents)
    out = stack.output(inputs)
    loss = out.new_zeros(())
    for document, place in zip(documents, located(inputs, documents), strict=True):
        own = out[place.row, place.columns]
        generator = torch.Generator().manual_seed(every.index(document))
        loss = loss + (own * torch.randn(own.shape, generator=generator, dtype=torch.float64).to(own)).sum()
    named = {name: part for module in stack.modules for name, part in module.named_parameters() if part.requires_grad}
    gradients = (
        torch.autograd.grad(loss, list(named.values()), allow_unused=True) if named and loss.requires_grad else ()
    )
    return {name: grad for name, grad in zip(named, gradients, strict=False) if grad is not None}


# Labels


def _labels(pack: Make, documents: Documents) -> Iterator[Finding]:
    """Labels in which the last token of a document is to predict the first of the next."""
    if not (crossing := _crossing(pack, documents)):
        return
    documents, crossing = smallest(documents, lambda rows: _crossing(pack, rows), crossing)
    inputs = pack(documents)
    yield PROBE.error(
        f"Labels cross the seam: the last token of a document is trained to predict the first token of the next, "
        f"at position {crossing[0].start} of the pack",
        f"{len(crossing)} of {int((inputs['labels'] != -100).sum())} labels of this pack ask for a token that nothing "
        "before it can tell.",
        "labels[:, starts] = -100  # the first token of each document"
        if _shift(ids_of(inputs), inputs["labels"]) == 0
        else "labels[:, ends] = -100  # the last token of each document",
        documents,
        where="labels",
        position=crossing[0].start,
    )


def _crossing(pack: Make, documents: Documents) -> list[DocumentPlace]:
    """The documents whose first token is a label of the document before."""
    inputs = pack(documents)
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    ids = ids_of(inputs)
    if not isinstance(labels, Tensor) or labels.shape != ids.shape:
        return []
    shift = _shift(ids, labels)
    return [
        place
        for before, place in pairwise(sorted(located(inputs, documents)))
        if before.row == place.row
        and before.start + before.length == place.start
        and int(labels[place.row, place.start - shift]) == int(ids[place.row, place.start])
    ]


def _shift(ids: Tensor, labels: Tensor) -> int:
    """0 where labels stand at their own tokens, 1 where they stand at the token before, shifted already."""
    same = (labels == ids).sum()
    ahead = (labels[:, :-1] == ids[:, 1:]).sum()
    return int(ahead > same)


PROBE = Probe(
    "packing",
    "A document is the same alone and packed, at every place of the pack; labels do not cross the seam.",
    _run,
)

"""A row is the same alone, padded, among other rows, in another order and in a batch of another size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...findings._finding import Finding, Inapplicable, TargetError
from .._bounds import Measure
from .._comparing import Compared, Comparison, refilled
from .._documents import Documents, drawn, exchanged, ids_of, located, positions_in
from .._lines import mixing_line, padding_line
from .._probe import Probe
from .._stack import Stack, padding_of

_LENGTHS = (5, 11, 2, 7)


def _run(stack: Stack, measure: Measure) -> Iterator[Finding]:
    if stack.batch is stack.pack:
        raise Inapplicable("the model is called with packs only")
    lengths = [stack.length(length) for length in (_LENGTHS if stack.takes_padding else (7,) * 4)]
    documents = drawn(stack.vocabulary, lengths)
    # Kernels choose paths by width: one beyond a power of two, where tiles of a mask end.
    wide = drawn(stack.vocabulary, [stack.length(65), lengths[0]])
    comparison = Comparison(stack, measure, stack.batch)
    many = documents * 5
    for rows in (documents, documents[::-1], many, *([wide] if stack.takes_padding else [])):
        worst = None
        with suppress(*([TargetError] if rows is many else [])):  # a cache may hold a fixed number of rows
            worst = comparison.worst(rows)
        if worst is not None:
            yield _finding(comparison, rows)
            return
    if stack.left is not None:
        left = replace(stack, batch=stack.left)
        yield from _run(replace(left, left=None), measure)


def _finding(comparison: Comparison, documents: Documents) -> Finding:
    stack = comparison.stack
    documents, worst, effect = comparison.smallest(documents)
    words, fix, where = _cause(comparison, documents, worst)
    lines = {"batch axis": mixing_line, "attention_mask": padding_line}
    return PROBE.error(
        f"Document {worst.document} of {len(documents)} is not the same in a batch as alone: output "
        f"{worst.difference.position} differs by {worst.difference.size:.3g}. {words}",
        f"{effect}.",
        fix,
        documents,
        worst.difference,
        where=where,
        location=lines[where](stack, stack.length(7)) if where in lines else None,
        document=worst.document,
    )


def _cause(comparison: Comparison, documents: Documents, worst: Compared) -> tuple[str, str, str]:
    """(what causes it, the fix, the argument), by what makes the difference go away."""
    stack, measure = comparison.stack, comparison.measure
    if not bool(worst.out.isfinite().all()):
        return (
            "It is not finite: a row of the mask hides every key, and its softmax is NaN",
            "scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)  # or let padded queries see themselves",
            "attention_mask",
        )
    others = [
        document if at == worst.document else exchanged(document, stack.vocabulary)
        for at, document in enumerate(documents)
    ]
    if _moved(stack, measure, comparison.make(documents), comparison.make(others), documents, worst):
        return (
            "It changes with the content of other documents: rows of the batch reach each other",
            "Keep the batch axis apart in every view, softmax, norm and mean",
            "batch axis",
        )
    if stack.is_served:
        return (
            "Prompts that are computed at the same time reach each other",
            "Send one request at a time to be sure; then look at slots of the cache, masks and positions of a batch",
            "batch axis",
        )
    if len(documents) > 1 and comparison.worst([documents[worst.document]] * len(documents)) is not None:
        return (
            f"It changes with the number of rows: {len(documents)} copies of it, without padding, differ, too",
            "Look for a scale, a limit or a kernel that is chosen by the number of rows",
            "batch axis",
        )
    inputs = comparison.make(documents)
    side = "left" if any(place.start > 0 for place in located(inputs, documents)) else "right"
    kept = _kept(inputs, documents)
    if _moved(stack, measure, inputs, refilled(inputs, stack.vocabulary, kept), documents, worst):
        return (
            f"It changes with the content of the padding on the {side}: the mask does not hide padded keys",
            "scores = scores.masked_fill(~attention_mask[:, None, None, :].bool(), float('-inf'))  # in every layer",
            "attention_mask",
        )
    if comparison.same_with(documents, _with_positions):
        return (
            f"Padding on the {side} moves its positions: with position_ids that count real tokens it is the same",
            "position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)  # beside attention_mask",
            "position_ids",
        )
    return (
        f"Padding on the {side} moves it, whatever the padding holds: its positions or norms count padded tokens",
        "position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)  # and no mean or norm over padded places",
        "position_ids",
    )


def _moved(stack: Stack, measure: Measure, inputs: Any, other: Any, documents: Documents, worst: Compared) -> bool:
    """Whether the worst document's outputs differ between two inputs of one shape."""
    if ids_of(inputs).shape != ids_of(other).shape:
        return False
    outs = [stack.run(given)[worst.place.row, worst.place.columns] for given in (inputs, other)]
    return measure.compare(outs[1], outs[0]) is not None


def _kept(inputs: Any, documents: Documents) -> Tensor:
    """(R, L), True where a document or another real token stands."""
    real = padding_of(inputs)
    if real is not None:
        return real
    kept = torch.zeros_like(ids_of(inputs), dtype=torch.bool)
    for place in located(inputs, documents):
        kept[place.row, place.columns] = True
    return kept


def _with_positions(inputs: Any) -> Any:
    real = padding_of(inputs)
    if real is None or not isinstance(inputs, Mapping):
        return inputs
    return {**inputs, "position_ids": positions_in(real)}


PROBE = Probe(
    "batch",
    "A row is the same alone, padded, beside other rows, in another order and in a batch of another size.",
    _run,
)

"""Documents that probes draw, and where their tokens stand in the inputs that a collator or a packing makes of them.

Shape legend: R rows, L length.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..findings._finding import Unmeasured

Documents = list[list[int]]
_BACK = 1000  # steps back in a search for places that do not overlap
IDS = ("input_ids", "tokens", "ids", "idx", "x", "decoder_input_ids")


class DocumentPlace(NamedTuple):
    """Where a document's tokens stand: its row, and its first column."""

    row: int
    start: int
    length: int

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.length)


def drawn(vocabulary: Tensor, lengths: Sequence[int], seed: int = 0) -> Documents:
    """Documents of these lengths. No token comes twice where the vocabulary is large enough."""
    generator = torch.Generator().manual_seed(seed)
    total, known = sum(lengths), len(vocabulary)
    rounds = [torch.randperm(known, generator=generator) for _ in range(-(-total // known))]
    ids = vocabulary[torch.cat(rounds)[:total]].tolist() if total else []
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return [ids[start:end] for start, end in pairwise(ends)]


def exchanged(document: list[int], vocabulary: Tensor, start: int = 0, end: int | None = None) -> list[int]:
    """The document with another token at each place from `start` to before `end`."""
    known = vocabulary.tolist()
    at = {token: index for index, token in enumerate(known)}
    end = len(document) if end is None else end
    step = max(1, len(known) // 2 - 1)
    return [
        known[(at[token] + step) % len(known)] if start <= index < end else token
        for index, token in enumerate(document)
    ]


def padded(documents: Documents, pad: int = 0, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Token ids (R, L), padded on one side, and their mask: 1 = real."""
    width, turn = max(map(len, documents)), -1 if left else 1
    ids = [[*document[::turn], *[pad] * (width - len(document))][::turn] for document in documents]
    real = [([1] * len(document) + [0] * (width - len(document)))[::turn] for document in documents]
    return torch.tensor(ids), torch.tensor(real)


def positions_in(real: Tensor) -> Tensor:
    """The positions (R, L) of real tokens, counted from 0, as generate() gives them; 0 for padding before them."""
    return (real.long().cumsum(-1) - 1).clamp(min=0)


def as_inputs(made: Any, takes: Callable[[str], bool]) -> Any:
    """Inputs of a model from what a collator returned: lists and arrays of numbers are tensors, and an object's fields
    are arguments where the model `takes` all of them. Other objects stay as they are."""
    if isinstance(made, tuple) and made and isinstance(made[0], Mapping):
        made = made[0]  # and labels for the loss
    if isinstance(made, Mapping):
        return {name: _tensor(value) for name, value in made.items()}
    if isinstance(made, Tensor) or not hasattr(made, "input_ids"):
        made = _tensor(made)
        return type(made)(map(_tensor, made)) if isinstance(made, (tuple, list)) else made
    fields = made._asdict() if hasattr(made, "_asdict") else vars(made)
    if all(map(takes, fields)):
        return as_inputs(fields, takes)
    return tuple(fields.values()) if isinstance(made, tuple) else made


def _tensor(value: Any) -> Any:
    """Lists and arrays of numbers, all of one length, as a tensor; another value as it is."""
    if not isinstance(value, list) and not (hasattr(value, "__array__") and not isinstance(value, Tensor)):
        return value
    if isinstance(value, list) and any(isinstance(part, Tensor) for part in value):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):  # words, or rows of unequal length
        return value


def ids_of(inputs: Any) -> Tensor:
    """The token ids (R, L) among a model's inputs.

    Raises:
        Unmeasured: they hold no tensor of token ids.
    """
    ids = _found_ids(inputs)
    if ids is None:
        kinds = sorted(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
        raise Unmeasured(
            _unpadded(inputs)
            or f"inputs of the model: expected token ids (rows, length) under {', '.join(IDS[:3])}, got {kinds}"
        )
    return ids if ids.dim() == 2 else ids[None]


def _unpadded(inputs: Any) -> str:
    """The error for rows of unequal length, "" for other inputs."""
    for rows in (inputs, *(inputs.values() if isinstance(inputs, Mapping) else ())):
        if isinstance(rows, list) and all(isinstance(row, (list, Tensor)) for row in rows):
            lengths = ", ".join(str(len(row)) for row in rows)
            return f"batch: expected token ids (rows, length) as a tensor, got a list of rows of {lengths} tokens"
    return ""


def with_ids(inputs: Any, ids: Tensor) -> Any:
    """The same inputs with other token ids."""
    old = _found_ids(inputs)
    assert old is not None
    ids = ids.view_as(old).to(old.device, old.dtype)
    if isinstance(inputs, Tensor):
        return ids
    if isinstance(inputs, Mapping):
        return {name: ids if value is old else value for name, value in inputs.items()}
    if hasattr(inputs, "input_ids"):
        changed = copy.copy(inputs)
        object.__setattr__(changed, "input_ids", ids)  # which may be frozen
        return changed
    return type(inputs)(ids if value is old else value for value in inputs)


def _found_ids(inputs: Any) -> Tensor | None:
    if isinstance(inputs, Mapping):
        named = [inputs[name] for name in IDS if name in inputs]
        values = [*reversed(named)] if "decoder_input_ids" in inputs else named
        values = values or [value for name, value in inputs.items() if "mask" not in name]
    elif isinstance(inputs, (tuple, list)):
        rows = len(inputs) > 1 and all(isinstance(value, Tensor) and value.dim() == 1 for value in inputs)
        values = [] if rows and isinstance(inputs, list) else list(inputs)
    else:
        values = [getattr(inputs, "input_ids", inputs)]
    return next((value for value in values if isinstance(value, Tensor) and _is_ids(value)), None)


def _is_ids(tensor: Tensor) -> bool:
    return tensor.dim() in (1, 2) and tensor.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)


def located(inputs: Any, documents: Documents) -> list[DocumentPlace]:
    """Where each document stands, in the order of `documents`.

    Raises:
        Unmeasured: one of them is not there in one piece, so nothing can be compared.
    """
    rows = ids_of(inputs).tolist()
    places = [_places(rows, document) for document in documents]
    if len(rows) == len(documents):  # a document that also stands within a longer one is in its own row
        places = [sorted(found, key=lambda place: place.row != at) for at, found in enumerate(places)]
    for document, found in zip(documents, places, strict=True):
        if not found:
            raise Unmeasured(f"the inputs do not hold the document {document} in one piece")
    # The longest first: they stand in few places, and short documents within them, too.
    order = sorted(range(len(documents)), key=lambda at: (-len(documents[at]), len(places[at])))
    together = _apart([places[at] for at in order])
    if together is None:
        raise Unmeasured(f"the inputs do not hold all of the documents {documents}, each in one piece")
    return [place for _, place in sorted(zip(order, together, strict=True))]


def _apart(places: list[list[DocumentPlace]]) -> list[DocumentPlace] | None:
    """One place for each document, the first ones that do not overlap; None if the search has no end in sight."""
    tried = [0] * len(places)  # the number of places that were tried for each document
    chosen: list[DocumentPlace] = []
    taken: set[tuple[int, int]] = set()
    back = 0
    while len(chosen) < len(places):
        at = len(chosen)
        free = (n for n in range(tried[at], len(places[at])) if not taken & _cells(places[at][n]))
        found = next(free, None)
        if found is not None:
            tried[at] = found + 1
            chosen.append(places[at][found])
            taken |= _cells(chosen[-1])
        elif at == 0 or back == _BACK:
            return None
        else:
            tried[at] = 0
            taken -= _cells(chosen.pop())
            back += 1
    return chosen


def _cells(place: DocumentPlace) -> set[tuple[int, int]]:
    return {(place.row, place.start + step) for step in range(place.length)}


def _places(rows: list[list[int]], document: list[int]) -> list[DocumentPlace]:
    length = len(document)
    return [
        DocumentPlace(at, start, length)
        for at, row in enumerate(rows)
        for start in range(len(row) - length + 1)
        if row[start : start + length] == document
    ]

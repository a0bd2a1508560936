"""Defects of a cache: queries, keys and values of one decoding step against those of one pass.

Shape legend: B batch, H heads, L length, D head width; M keys that the step has, in the order in which it has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...findings._finding import Inapplicable, TargetError
from ...subject._decoder import CachedDecoder, pieces
from ...subject._inputs import NamedInputs
from ...subject._subject import Subject
from ...tracing._trace import TracedAttention, traced

_CLOSE = 1e-5  # of the largest number: some targets hold keys in float32


@dataclass(frozen=True)
class CacheDefect:
    """A defect of a cache, with its fix and the family of checks."""

    what: str
    fix: str
    family: str = "cache"
    of: str = ""  # "key" or "value"


POSITIONS = (
    "Begin where the cache ends: positions = torch.arange(past_length, past_length + L), for rotations, "
    "embeddings and biases alike."
)


def wrongly_kept(subject: Subject, inputs: NamedInputs, sizes: Sequence[int], position: int) -> CacheDefect | None:
    """The query, key or value at `position` that differs from one pass; None if there is none, or if they cannot be
    traced."""
    try:
        step, row = _of_step(subject, inputs, sizes, position)
        whole = traced(subject.fresh(), inputs).attentions[0]
    except (Inapplicable, TargetError, IndexError):
        return None
    if step.query.shape[:2] != whole.query.shape[:2] or step.value is None or whole.value is None:
        return None
    query = step.query[:, :, row], whole.query[:, :, position]
    if not _close(*query):
        return CacheDefect(_query(*query, position), POSITIONS, "order")
    for name, own, expected in (("key", step.key, whole.key), ("value", step.value, whole.value)):
        places = _rows(own, expected[:, :, : position + 1])
        missing = [j for j in range(position + 1) if places[j] is None and whole.weights[:, :, position, j].any()]
        if missing:
            return _missing(name, own, expected, missing, position)
    return _pairs(step, whole, position)


def _of_step(subject: Subject, inputs: NamedInputs, sizes: Sequence[int], position: int) -> tuple[TracedAttention, int]:
    """The attention of the piece that holds `position`, and the row of it."""
    decoder, start = CachedDecoder(subject.fresh()), 0
    for size, piece in zip(sizes, pieces(inputs, sizes), strict=True):
        if start + size > position:
            return traced(decoder.next_call(piece), piece).attentions[0], position - start
        with torch.no_grad():
            decoder(piece)
        start += size
    raise AssertionError(position)


def _close(tensor: Tensor, other: Tensor) -> bool:
    return bool((tensor - other).abs().max() <= _CLOSE * other.abs().max())


def _rows(own: Tensor, expected: Tensor) -> list[int | None]:
    """For each expected position the index of the nearest vector of the step; None if none is close."""
    apart = (own[:, :, None] - expected[:, :, :, None]).abs().amax((0, 1, -1))  # (positions, M)
    nearest = apart.min(-1)
    limit = _CLOSE * float(expected.abs().max())
    return [
        int(m) if float(d) <= limit else None
        for m, d in zip(nearest.indices.tolist(), nearest.values.tolist(), strict=True)
    ]


def _query(own: Tensor, expected: Tensor, position: int) -> str:
    turned = torch.allclose(own.norm(dim=-1), expected.norm(dim=-1), rtol=_CLOSE)
    how = "as long, but turned otherwise" if turned else "another"
    return (
        f"the query of position {position} is {how} than in the whole, though its input is the same: it is taken to "
        "stand at another position"
    )


def _missing(name: str, own: Tensor, expected: Tensor, missing: Sequence[int], position: int) -> CacheDefect:
    if missing == [position]:
        return CacheDefect(
            f"the {name} of position {position} itself is not as in the whole, though its input is the same: it is "
            "taken to stand at another position, or is not written before it is read",
            POSITIONS,
            "order",
        )
    words = _what_stands_there(own, expected, missing[0], position)
    which = f"position {missing[0]}" if len(missing) == 1 else f"positions {missing[0]} to {missing[-1]}"
    return CacheDefect(
        f"the {name}s kept of {which} are not those of the whole{words}",
        f"Keep {name}s as they are read, once, for every item and position: "
        f"{name[0]} = torch.cat([past_{name[0]}, {name[0]}], dim=-2), and return that.",
        of=name,
    )


def _what_stands_there(own: Tensor, expected: Tensor, j: int, position: int) -> str:
    """The end of a sentence: the cache holds zeros, a multiple of the vector, a vector rotated again, or another item's
    vector."""
    if own.shape[2] != position + 1:
        return f": {own.shape[2]} are kept" if own.shape[2] < position + 1 else ""
    there, wanted = own[:, :, j], expected[:, :, j]
    if not there.any():
        return ": there are zeros"
    ratio = float((there * wanted).sum() / (wanted * wanted).sum())
    if ratio != 0 and _close(there, wanted * ratio):
        return f": they are {ratio:.3g} times those"
    for item in range(1, len(there)):
        if not _close(there[item], wanted[item]) and _close(there[item], wanted[0]):
            return f": batch item {item} has those of item 0"
    if torch.allclose(there.norm(dim=-1), wanted.norm(dim=-1), rtol=_CLOSE):
        return ": they are as long but turned otherwise, as if rotated once more or at another position"
    return ""


def _pairs(step: TracedAttention, whole: TracedAttention, position: int) -> CacheDefect | None:
    """The defect that a key and its value are kept at different places."""
    assert step.value is not None and whole.value is not None
    keys, values = (
        _rows(own, expected[:, :, : position + 1])
        for own, expected in ((step.key, whole.key), (step.value, whole.value))
    )
    for j, (key, value) in enumerate(zip(keys, values, strict=True)):
        if key is not None and value is not None and key != value:
            return CacheDefect(
                f"the key of position {j} stands at place {key} of the cache and its value at place {value}: every "
                "weight meets another token's value",
                "Append both at the same end: k = torch.cat([past_k, k], dim=-2), v = torch.cat([past_v, v], dim=-2).",
                of="key" if key != j else "value",
            )
    return None

"""Entities and the tags of words that write them: BIO and IOBES (Ramshaw and Marcus 1995; Ratinov and Roth 2009).

    words    Ada  Lovelace  met  Babbage
    BIO      B-x  I-x       O    B-x
    IOBES    B-x  E-x       O    S-x

Shape legend: W words of a text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

OUTSIDE = "O"
BIO, IOBES = ("B", "I"), ("B", "I", "E", "S")


@dataclasses.dataclass(frozen=True)
class Entity:
    """Words `start` to `stop` (not included) of a kind."""

    kind: str
    start: int
    stop: int


def parsed(tag: str) -> tuple[str, str]:
    """The prefix and the kind of `B-person`; `O` is ("O", "")."""
    prefix, _, kind = tag.partition("-")
    return prefix, kind


def check_tag(tag: str, place: str) -> str:
    """The tag, if it is of BIO or IOBES; otherwise ValueError."""
    prefix, kind = parsed(tag)
    if tag != OUTSIDE and (prefix not in IOBES or not kind):
        raise ValueError(f"{place}: the tag {tag!r} is not of BIO or IOBES; expected O, or B-, I-, E- or S- and a type")
    return tag


def scheme_of(tags: Iterable[str]) -> tuple[str, ...]:
    """The prefixes of the scheme of these tags."""
    return IOBES if {"E", "S"} & {parsed(tag)[0] for tag in tags} else BIO


def completed(tags: Iterable[str]) -> tuple[str, ...]:
    """All tags of the scheme for the kinds of these tags: data may have `B-x` without `I-x`."""
    given = set(tags)
    kinds = sorted({parsed(tag)[1] for tag in given} - {""})
    return (OUTSIDE, *(f"{prefix}-{kind}" for kind in kinds for prefix in scheme_of(given)))


def entities_of(tags: Sequence[str]) -> list[Entity]:
    """The entities of tags (W,), read as seqeval does by default, also where no scheme allows the sequence.

    An entity begins at `B` and `S`, and at any other tag that continues no entity: after `O`, `E`, `S` or another kind.
    """
    entities: list[Entity] = []
    before, last = OUTSIDE, ""
    for n, (prefix, kind) in enumerate(map(parsed, tags)):
        if prefix == OUTSIDE:
            pass
        elif prefix in ("B", "S") or before in (OUTSIDE, "E", "S") or kind != last:
            entities.append(Entity(kind, n, n + 1))
        else:
            entities[-1] = dataclasses.replace(entities[-1], stop=n + 1)
        before, last = prefix, kind
    return entities


def tags_of(entities: Iterable[Entity], words: int, scheme: Sequence[str]) -> list[str]:
    """The tags (W,) of entities in a scheme."""
    tags = [OUTSIDE] * words
    for entity in entities:
        inside = entity.stop - entity.start
        prefixes = ["B", *["I"] * (inside - 1)]
        if "E" in scheme:
            prefixes = ["S"] if inside == 1 else [*prefixes[:-1], "E"]
        tags[entity.start : entity.stop] = [f"{prefix}-{entity.kind}" for prefix in prefixes]
    return tags

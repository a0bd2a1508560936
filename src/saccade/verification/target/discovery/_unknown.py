"""Arguments that must be given and whose names say nothing: each is tried as what it may be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...findings._finding import TargetError, Undecided
from ._forms import TargetClues, read
from ._trials import TargetTrials

_PLACES = ("first", "second", "third")


def settled(trials: TargetTrials, clues: TargetClues) -> tuple[TargetClues, tuple[str, ...]]:
    """The clues with a role for each argument that must be given, and what was assumed of it.

    Raises:
        Undecided: more than one way works, or none, for an argument without a telling name.
    """
    if clues.hints.mask is not None:
        clues = _with_roles(clues, {clues.hints.mask: "mask"})
    unknown = [one.name for one in clues.arguments if not one.role and one.required and one.name not in clues.given]
    if not unknown:
        return clues, ()
    ways = [(words, option, way) for words, option, way in _ways(clues, unknown) if _works(trials, way)]
    if len(ways) > 1:
        raise Undecided(
            f"what {', '.join(unknown)} is cannot be told from the signature, and more than one way of calling works",
            [(words, option) for words, option, _ in ways],
        )
    if not ways:
        return clues, ()  # giving them will say which argument is not known
    words, _, way = ways[0]
    return way, (f"{words}, because the call works so",)


def _ways(clues: TargetClues, unknown: list[str]) -> Iterator[tuple[str, str, TargetClues]]:
    names = [one.name for one in clues.arguments if one.required and one.name not in clues.given]
    form = clues.hints.form
    if len(names) == 3 and not clues.has("mask") and form in (None, "attention", "qkv"):
        roles = dict(zip(names, ("query", "key", "value"), strict=True))
        option = f"--form {'qkv' if clues.has_matrices else 'attention'}"
        yield f"{', '.join(names)} are query, key and value", option, _with_roles(clues, roles)
    if len(unknown) != 1 or not clues.has("x"):
        return
    name = unknown[0]
    if form in (None, "cross"):
        way = _with_roles(clues, {name: "context"})
        yield (
            f"{name} is the context that x attends to",
            "--form cross",
            replace(way, hints=replace(way.hints, form="cross")),
        )
    if form in (None, "self"):
        yield f"{name} is a mask", f"--mask {name}", _with_roles(clues, {name: "mask"})


def _with_roles(clues: TargetClues, roles: dict[str, str]) -> TargetClues:
    arguments = tuple(replace(one, role=roles.get(one.name, one.role)) for one in clues.arguments)
    return replace(clues, arguments=arguments)


def _works(trials: TargetTrials, clues: TargetClues) -> bool:
    trial = TargetTrials(trials.target)
    try:
        read(trial, clues)
    except (Undecided, TargetError):
        return False
    return True

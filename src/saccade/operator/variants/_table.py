"""A page of the abilities of every mechanism and pattern, made from the code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from ...support._tables import Table
from . import MECHANISMS, patterns
from ._mechanism import MechanismConfig, Traits

_ABILITIES = {
    "causal": "tokens see nothing later",
    "bidirectional": "tokens see the whole sequence",
    "cross": "keys of another sequence",
    "masks": "any mask; otherwise `Causal()`, `Padding(...)` and both, as far as the columns before say",
    "cached": "decodes with keys and values in a cache, equal to the parallel form",
    "recurrent": "decodes with a state of fixed size",
    "grouped": "fewer key-value heads than query heads",
}
_COMPUTES = {
    "softmax": "softmax attention, of the keys it looks at",
    "approximation": "an approximation of softmax attention",
    "other": "something of its own",
}


def capabilities() -> str:
    """Markdown: formula, cost, features and patterns of each mechanism, with the reason for each missing feature."""
    return "\n\n".join(
        [
            "\n".join(_costs()),
            "\n".join(_abilities()),
            "\n".join(_reasons()),
            "\n".join(_choices()),
            "\n".join(_patterns()),
        ]
    )


def _costs() -> Iterator[str]:
    rows = []
    for kind in MECHANISMS:
        traits = kind.traits
        takes = ", ".join(f"`{option}`" for option in traits.takes) or "-"
        rows.append([f"[{kind.name}](#{kind.name})", _COMPUTES[traits.computes], traits.time, traits.memory, takes])
    yield from Table(["mechanism", "computes", "time", "memory", "also takes"], rows).markdown()


def _abilities() -> Iterator[str]:
    yield from Table(
        ["mechanism", *_ABILITIES],
        [
            [f"[{kind.name}](#{kind.name})"]
            + ["yes" if getattr(kind.traits, name) is True else "no" for name in _ABILITIES]
            for kind in MECHANISMS
        ],
    ).markdown()
    yield ""
    yield from (f"- **{name}**: {meaning}" for name, meaning in _ABILITIES.items())


def _reasons() -> Iterator[str]:
    yield "## Why not"
    for kind in MECHANISMS:
        why = list(_why_not(kind.traits))
        if why:
            yield f"\n**{kind.name}**\n"
            yield from why


def _why_not(traits: Traits) -> Iterator[str]:
    for name in _ABILITIES:
        able = getattr(traits, name)
        if isinstance(able, str):
            yield f"- not {name}: {able}"


def _choices() -> Iterator[str]:
    yield "## When to choose which"
    for kind in MECHANISMS:
        traits = kind.traits
        yield f"\n### {kind.name}\n"
        yield f"`{_written(kind)}`. {traits.paper}."
        yield f"\nChoose: {traits.choose} Avoid: {traits.avoid}"


def _patterns() -> Iterator[str]:
    yield "## Exact sparse patterns"
    yield "\nMasks on the one operator: exact softmax attention of the keys they show, with everything that"
    yield "`saccade.attention` takes: causal or not as their parameters say, any other mask beside them, caches,"
    yield "grouped heads. Time is that of the visited tiles, memory L d.\n"
    rows = [
        [f"`{name}{_arguments(pattern)}`", " ".join((inspect.getdoc(pattern) or "").split("\n\n")[0].split())]
        for name, pattern in _named_patterns()
    ]
    yield from Table(["pattern", "shows"], rows).markdown()


def _named_patterns() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, thing in vars(patterns).items():
        if inspect.isfunction(thing) and thing.__module__ == patterns.__name__ and not name.startswith("_"):
            yield name, thing


def _arguments(function: Callable[..., Any]) -> str:
    given = inspect.signature(function).parameters.values()
    return "(" + ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in given) + ")"


def _written(kind: type[MechanismConfig]) -> str:
    """The configuration's class with its fields and defaults."""
    return kind.__name__ + _arguments(kind)

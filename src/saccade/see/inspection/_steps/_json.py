"""Steps as JSON: for `--json`, for pages, and for the header of the viewer's request `step`."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np

from ._parts import Step
from ._scores import SWITCHES, Scores

PART = 32  # first components of a vector that are sent, 8 of keys and values; pages fold the rest
MOST_KEYS = 2048  # with more keys, steps list only some of them
FEW = 8
_SHOWN = 16  # keys with the largest weights, for each switch

_PIECE = re.compile(
    r"(?P<root>√)|(?P<name>[A-Za-zΣε]+)(?:_(?P<index>\{[^}]*\}|[A-Za-z0-9]+))?|(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)|"
    r"(?P<square>²)|(?P<space>\s+)|(?P<mark>.)"
)


def step_json(step: Step, shown: np.ndarray | None) -> dict[str, Any]:
    """One step as JSON. Its columns have the keys ``shown``, or all keys if it is None."""
    return {
        "id": step.id,
        "name": step.name,
        "formula": step.formula,
        "mathml": mathml(step.formula),
        "shapes": step.shapes,
        "says": step.says,
        "without": step.without,
        "switch": step.switch or None,
        "vectors": [
            {
                "name": vector.name,
                "kind": vector.kind,
                "size": len(vector.values),
                "length": plain(float(np.linalg.norm(vector.values))),
                "values": part(vector.values),
            }
            for vector in step.vectors
        ],
        "columns": [
            {"name": column.name, "values": listed(column.values if shown is None else column.values[shown])}
            for column in step.columns
        ],
        "facts": [[name, plain(value)] for name, value in step.facts],
    }


def scores_json(scores: Scores) -> dict[str, Any]:
    """The inputs from which a page computes weights."""
    return {
        "products": listed(scores.products),
        "unplaced": listed(scores.unplaced),
        "scale": plain(scores.scale),
        "softcap": plain(scores.softcap),
        "bias": listed(scores.bias),
        "bias_of_positions": scores.bias_of_positions,
        "visible": None if scores.visible is None else scores.visible.astype(int).tolist(),
        "sink": plain(scores.sink),
    }


def plain(value: float | None) -> float | None:
    """The value with 7 significant digits; None for NaN and inf."""
    return None if value is None or not np.isfinite(value) else float(f"{value:.7g}")


def listed(values: np.ndarray | None) -> list[float | None] | None:
    """All components of a vector."""
    return None if values is None else [plain(value) for value in values.tolist()]


def part(values: np.ndarray | None, size: int = PART) -> list[float | None] | None:
    """The first components of a vector."""
    return None if values is None else listed(values[:size])


def rows(values: np.ndarray | None, shown: np.ndarray | None) -> list[list[float | None] | None] | None:
    """The first components of each row, or of the rows shown."""
    return None if values is None else [part(row, FEW) for row in (values if shown is None else values[shown])]


def shown_keys(scores: Scores, own: int | None) -> np.ndarray | None:
    """The keys that a page shows if there are too many: those with the largest weights under any switch. None if all
    keys fit."""
    count = len(scores.products)
    if count <= MOST_KEYS:
        return None
    able = [name for name in SWITCHES if name != "shift" and not scores.why_not(name)]
    chosen = set() if own is None else {own}
    for size in range(len(able) + 1):
        for without in itertools.combinations(able, size):
            chosen |= set(np.argsort(-scores.softmax(without).weights, kind="stable")[:_SHOWN].tolist())
    return np.array(sorted(chosen))


# Formulas


def mathml(formula: str) -> list[Any]:
    """A formula in plain text as a tree of MathML: ``x_j`` has an index, ``√(...)`` a root over the bracket.

    A name of several letters is upright, as functions and words are.
    """
    children, _ = _row(formula, 0)
    return ["math", ["mrow", *children]]


def _row(formula: str, at: int, *, inside: bool = False) -> tuple[list[Any], int]:
    out: list[Any] = []
    while at < len(formula):
        if inside and formula[at] == ")":
            return out, at + 1
        match = _PIECE.match(formula, at)
        assert match is not None
        at = match.end()
        if match["root"]:
            root, at = _root(formula, at)
            out.append(root)
        elif match["mark"] == "(":
            children, at = _row(formula, at, inside=True)
            out.append(["mrow", ["mo", "("], *children, ["mo", ")"]])
        elif match["square"]:
            out.append(["msup", out.pop() if out else ["mrow"], ["mn", "2"]])
        elif match["space"]:
            if len(match["space"]) > 1:
                out.append(["mtext", "\u2003"])
        else:
            out.append(_leaf(match))
    return out, at


def _root(formula: str, at: int) -> tuple[list[Any], int]:
    if formula[at : at + 1] == "(":
        children, at = _row(formula, at + 1, inside=True)
        return ["msqrt", *children], at
    match = _PIECE.match(formula, at)
    assert match is not None
    return ["msqrt", _leaf(match)], match.end()


def _leaf(match: re.Match[str]) -> list[Any]:
    if match["number"]:
        return ["mn", match["number"]]
    if not match["name"]:
        return ["mo", match["mark"]]
    name = match["name"]
    base = ["mo", name] if name == "Σ" else ["mi", name] if len(name) == 1 else ["mtext", _spaced(name)]
    index = (match["index"] or "").strip("{}")
    if not index:
        return base
    return ["msub", base, ["mn" if index.isdigit() else "mi", index]]


def _spaced(name: str) -> str:
    """Adds spaces between the words of a sentence, but none between a function and its bracket."""
    functions = ("exp", "max", "mean", "var", "norm", "tanh", "sigmoid")
    return name if name in functions else f"\u2009{name}\u2009"

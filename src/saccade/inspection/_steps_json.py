"""Steps as JSON: what `--json` prints, what a page draws, and the header of the viewer's request `step`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from ._steps_parts import Step

if TYPE_CHECKING:
    from ._steps import Steps

VERSION = 1
PART = 6  # components of a vector that are shown; the rest is folded
MOST_VALUES = 2048  # keys whose values go along, so that a page can compute the output anew

_PIECE = re.compile(
    r"(?P<root>√)|(?P<name>[A-Za-zΣΑ-ωε]+)(?:_(?P<index>\{[^}]*\}|[A-Za-z0-9]+))?|(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)|"
    r"(?P<square>²)|(?P<space>\s+)|(?P<mark>.)"
)


def as_json(steps: Steps) -> dict[str, Any]:
    """Everything, as JSON has it; numbers have 7 significant digits, and what is not finite is null.

    ::

        {version: 1, text, title, model, layers, layer, head, heads, kv_head, row, word: {text, first, last} | null, dtype,
         labels: [key, ...], without: [switch, ...], switches: [those that can be left out, ...], notes: [sentence, ...],
         digits,
         steps: [{id, name, formula, mathml, shapes, says, without, switch | null,
                  vectors: [{name, kind: "query" | "key" | "value" | "", size, length, values: [the first 6]}],
                  columns: [{name, values: [one for each key, null where hidden]}],
                  facts: [[name, number], ...]}],
         scores: {products: [...], unplaced: [...] | null, scale, softcap | null, bias: [...] | null, bias_of_positions,
                  visible: [0 | 1, ...] | null, sink | null},
         weights: [...], weights_without: [...], output: [the first 6] | null, output_without,
         values: [[the first 6 of each key's value], ...] | null (of more than 2,048 keys),
         differences: {name: number}}

    A page computes weights anew from ``scores`` alone: s = products (or unplaced) * scale, softcap, bias, mask.
    ``mathml`` is a tree: [tag, child, ...], a child being a text or another tree; tags are MathML's own. Columns named
    "s", "d", ... are indexed as ``labels``.
    """
    inputs, scores = steps.numbers.inputs, steps.scores
    word = steps.word
    values = steps.numbers.value
    return {
        "version": VERSION,
        "text": steps.text,
        "title": steps.title,
        "model": steps.model,
        "layers": steps.layers,
        "layer": steps.layer,
        "head": steps.head,
        "heads": steps.heads,
        "kv_head": inputs.kv_head,
        "row": steps.row,
        "word": None if word is None else {"text": word.label, "first": word.first, "last": word.last},
        "dtype": str(inputs.dtype).removeprefix("torch."),
        "labels": list(steps.labels),
        "without": list(steps.without),
        "switches": list(steps.switches),
        "notes": list(steps.notes),
        "digits": steps.digits,
        "steps": [_step(one) for one in steps],
        "scores": {
            "products": _listed(scores.products),
            "unplaced": _listed(scores.unplaced),
            "scale": _plain(scores.scale),
            "softcap": _plain(scores.softcap),
            "bias": _listed(scores.bias),
            "bias_of_positions": scores.bias_of_positions,
            "visible": None if scores.visible is None else scores.visible.astype(int).tolist(),
            "sink": _plain(scores.sink),
        },
        "weights": _listed(steps.weights),
        "weights_without": _listed(steps.weights_without),
        "output": _part(steps.output),
        "output_without": _part(steps.output_without),
        "values": None if values is None or len(values) > MOST_VALUES else [_part(row) for row in values],
        "differences": {name: _plain(value) for name, value in steps.differences.items()},
    }


def _step(one: Step) -> dict[str, Any]:
    return {
        "id": one.id,
        "name": one.name,
        "formula": one.formula,
        "mathml": mathml(one.formula),
        "shapes": one.shapes,
        "says": one.says,
        "without": one.without,
        "switch": one.switch or None,
        "vectors": [
            {
                "name": vector.name,
                "kind": vector.kind,
                "size": len(vector.values),
                "length": _plain(float(np.linalg.norm(vector.values))),
                "values": _part(vector.values),
            }
            for vector in one.vectors
        ],
        "columns": [{"name": column.name, "values": _listed(column.values)} for column in one.columns],
        "facts": [[name, _plain(value)] for name, value in one.facts],
    }


def _plain(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else float(f"{value:.7g}")


def _listed(values: np.ndarray | None) -> list[float | None] | None:
    return None if values is None else [_plain(value) for value in values.tolist()]


def _part(values: np.ndarray | None) -> list[float | None] | None:
    return None if values is None else _listed(values[:PART])


# Formulas


def mathml(formula: str) -> list[Any]:
    """A formula in plain text as a tree of MathML: ``x_j`` has an index, ``√(...)`` a root over what is inside.

    A name of several letters stays upright, as functions and words do.
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
    """Words of a sentence keep their distance, functions stand at their bracket."""
    functions = ("exp", "max", "mean", "var", "norm", "tanh", "sigmoid")
    return name if name in functions else f"\u2009{name}\u2009"

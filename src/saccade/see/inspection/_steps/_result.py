"""The result of `saccade.step`.

Shape legend: L keys, Dv value width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ....support._registered import picture
from .._words import Word
from ._json import FEW, listed, part, plain, rows, scores_json, shown_keys, step_json
from ._parts import HeadNumbers, Step
from ._scores import SWITCHES, Scores
from ._writer import weight_text

VERSION = 1
LEAST_TOLD = 0.05  # least weight of further keys that the summary names


@dataclass(frozen=True, eq=False)
class Steps:
    """The attention of one query row in one head, with every number. Iterating gives each `Step`.

    Attributes:
        text, model, title: the text, the model's name, and the title.
        target: the target of an encoder-decoder, for a head in its decoder.
        layer, head, row: the head, and the token of the query (from 0, special tokens counted).
        part: "encoder", "decoder" or "cross" of an encoder-decoder. place: the head as `--head` takes it.
        layers, heads: of the model and of the layer.
        labels: each key as it is displayed.
        names: the name of each key in sentences: 'owl', and 'o' in 'owl' for a token of a word of several tokens.
        steps: in order.
        without: the parts that `weights_without` leaves out: of "scale", "mask", "position", "shift".
        notes: remarks on choices, and on steps that are missing.
        digits: decimals of displayed numbers.
        query: the name of the row's token in sentences: 'it'.

    Example:
        >>> from saccade.inspection import example
        >>> steps = example()
        >>> [step.id for step in steps]
        ['given', 'dot', 'scale', 'mask', 'softmax', 'sum']
        >>> steps.weights.round(3), steps.output.round(2)
        (array([0.67, 0.33]), array([16.6, 26.6]))
    """

    text: str
    model: str
    layers: int
    title: str
    labels: tuple[str, ...]
    names: tuple[str, ...]
    numbers: HeadNumbers
    steps: tuple[Step, ...]
    word: Word | None = None
    without: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    digits: int = 3
    target: str = ""
    query: str = "the query"

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, id: str) -> Step:
        """The step with that id; KeyError names the existing ones."""
        for step in self.steps:
            if step.id == id:
                return step
        raise KeyError(f"{id!r}; there are {', '.join(step.id for step in self.steps)}")

    @property
    def layer(self) -> int:
        return self.numbers.inputs.layer

    @property
    def head(self) -> int:
        return self.numbers.inputs.head

    @property
    def part(self) -> str:
        return self.numbers.inputs.part

    @property
    def place(self) -> str:
        return self.numbers.inputs.place

    @property
    def heads(self) -> int:
        return self.numbers.inputs.heads

    @property
    def row(self) -> int:
        return self.numbers.inputs.row

    @property
    def scores(self) -> Scores:
        return self.numbers.scores

    @property
    def weights(self) -> np.ndarray:
        """(L,) the weights of the row."""
        return self.numbers.softmax.weights

    @property
    def output(self) -> np.ndarray | None:
        """(Dv,) the output of the head."""
        return self.numbers.mixed(self.weights)

    @cached_property
    def weights_without(self) -> np.ndarray:
        """(L,) the weights without `without`."""
        return self.scores.softmax(self.without).weights

    @property
    def output_without(self) -> np.ndarray | None:
        """(Dv,) the head's output with these weights."""
        return self.numbers.mixed(self.weights_without)

    @property
    def differences(self) -> dict[str, float]:
        """The largest difference from the model's numbers by name: "query", "key", "weights", "head", "output".

        Relative to the largest of these numbers, or to 1 if that is smaller.
        """
        return self.numbers.differences()

    @property
    def summary(self) -> str:
        """The result in one sentence: the keys with the largest weights, or the reason that there are none."""
        if not np.isfinite(self.weights).all():
            return f"In this head the weights of {self.query} are NaN: {self._why_nan}."
        order = [int(j) for j in np.argsort(-self.weights, kind="stable")[:3]]
        order = order[:1] + [j for j in order[1:] if self.weights[j] >= LEAST_TOLD]
        shares = [f"{self.names[j]} ({weight_text(self.weights[j])})" for j in order]
        named = ", then ".join(shares) if len(shares) < 3 else f"{shares[0]}, then {shares[1]} and {shares[2]}"
        return f"In this head {self.query} looks most at {named}. The steps show where these numbers come from."

    @property
    def _why_nan(self) -> str:
        query, keys = self.numbers.placed
        if not np.isfinite(query).all():
            return "its query is not finite"
        visible = np.ones(len(keys), bool) if self.scores.visible is None else self.scores.visible
        broken = np.flatnonzero(visible & ~np.isfinite(keys).all(1))
        if broken.size:
            more = f", as those of {broken.size - 1:,} more" if broken.size > 1 else ""
            return f"the key of {self.names[broken[0]]} is not finite{more}"
        return "a score is not finite"

    @property
    def hidden_in(self) -> int | None:
        """The number, from 1, of the step that hides keys of this row; None if no key is hidden."""
        visible = self.scores.visible
        if visible is None or visible.all():
            return None
        return next(number for number, step in enumerate(self, 1) if step.id == "mask")

    @property
    def switches(self) -> tuple[str, ...]:
        """The parts of this head that can be left out."""
        return tuple(name for name in SWITCHES if not self.scores.why_not(name))

    def as_json(self) -> dict[str, Any]:
        """All fields as JSON values; numbers have 7 significant digits, NaN and inf are null.

        ::

            {version: 1, text, target, title, model, layers, part: "" | "encoder" | "decoder" | "cross", layer, head,
             heads, kv_head, row, dtype, digits,
             own: the key that is the row's token | null,
             word: {text, first, last} | null, labels: [key, ...], names: [key, ...], notes: [sentence, ...],
             summary, hidden_in: the number of the step that hides keys | null,
             without: [switch, ...], switches: [those that can be left out, ...],
             steps: [{id, name, formula, mathml, shapes, says, without, switch | null,
                      vectors: [{name, kind: "query" | "key" | "value" | "", size, length, values: [the first 32]}],
                      columns: [{name, values: [one for each key or for each of ``shown``, null where hidden or NaN]}],
                      facts: [[name, number], ...]}],
             scores: {products: [...], unplaced: [...] | null, scale, softcap | null, bias: [...] | null,
                      bias_of_positions, visible: [0 | 1, ...] | null, sink | null},
             weights: [...], weights_without: [...], output: [the first 8] | null, output_without,
             keys: [[the first 8 of each key], ...], unplaced_keys: the same before positions | null,
             values: the same of values | null,
             shown: null, or of more than 2,048 keys those that columns, keys and values are of: [key, ...],
             differences: {name: number}}

        ``visible`` says which keys are hidden; null for a visible key is NaN.
        A page computes weights from ``scores`` alone: s = products (or unplaced) * scale, softcap, bias, mask.
        ``mathml`` is a tree: [tag, child, ...]; a child is a text or a tree, and tags are those of MathML.
        """
        inputs, scores, word = self.numbers.inputs, self.scores, self.word
        shown, before = shown_keys(scores, inputs.own), self.numbers.unplaced
        return {
            "version": VERSION,
            "text": self.text,
            "target": self.target,
            "title": self.title,
            "model": self.model,
            "layers": self.layers,
            "part": self.part,
            "layer": self.layer,
            "head": self.head,
            "heads": self.heads,
            "kv_head": inputs.kv_head,
            "row": self.row,
            "own": inputs.own,
            "word": None if word is None else {"text": word.label, "first": word.first, "last": word.last},
            "dtype": str(inputs.dtype).removeprefix("torch."),
            "labels": list(self.labels),
            "names": list(self.names),
            "without": list(self.without),
            "switches": list(self.switches),
            "notes": list(self.notes),
            "summary": self.summary,
            "hidden_in": self.hidden_in,
            "digits": self.digits,
            "shown": None if shown is None else shown.tolist(),
            "steps": [step_json(step, shown) for step in self],
            "scores": scores_json(scores),
            "weights": listed(self.weights),
            "weights_without": listed(self.weights_without),
            "output": part(self.output, FEW),
            "output_without": part(self.output_without, FEW),
            "keys": rows(self.numbers.placed[1], shown),
            "unplaced_keys": None if before is None else rows(before[1], shown),
            "values": rows(self.numbers.value, shown),
            "differences": {name: plain(value) for name, value in self.differences.items()},
        }

    def html(self) -> str:
        """A self-contained page that shows the steps, offline."""
        return picture("render_steps", self)

    def __str__(self) -> str:
        return picture("steps_as_text", self)

    def __repr__(self) -> str:
        own = self.numbers.inputs.own
        label = self.row if own is None else self.labels[own]
        return f"<Steps of {label!r} in head {self.place}: {len(self.steps)} steps, {len(self.labels)} keys>"

    def _repr_html_(self) -> str:
        return picture("framed_steps", self)

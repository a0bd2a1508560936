"""Direct logit attribution: what each part of a model writes towards one token's logit.

Shape legend: L tokens with the special ones, C components, N heads of all layers, E model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...support._numbers import joined, signed
from ...support._plain_values import plain_values
from ...support._tables import Table
from ._input import Input
from ._record import Recorded, Vocabulary, record
from ._residual import source_shares, stream_steps
from ._steps import BIASES, Component, Step, Writes, exact, norm_steps, pulled_back, shares


@dataclass(frozen=True, eq=False)
class Attribution:
    """One logit, or the difference of two, as a sum over the components of the residual stream.

    Attributes:
        pieces: the L tokens that the model reads, as they are written.
        labels: the same as they are shown: "' c' of 'cat'" where a word is several tokens.
        position: the token at whose place the logit is.
        target, against: token ids; the logit is target's, less against's where that is not None.
        target_text, against_text: how these are written.
        probability: of the target at that place.
        components: what writes into the stream: the embedding's parts, heads, feed-forward layers, "biases" last.
        contributions: (C,) float64.
        sources: (N, L) float64, what each head's contribution comes from, token by token: w_ij v_j through the head's
            output matrix. A row sums to the head's contribution. Its heads are those of `heads`.
        logit: the model's own, as it computes it.
        fixed: what is held at its value in this run, since the logit is not linear in it.

    Example:
        >>> import saccade
        >>> model = saccade.inspection.open_model()  # the embedded one
        >>> found = saccade.attribute(model, "The cat sat on the", " mat")
        >>> found.contributions.shape, found.head_map().shape
        (torch.Size([38]), torch.Size([4, 8]))
        >>> [str(component) for component, _ in found.top(2)]
        ['feed-forward 1', 'feed-forward 3']
        >>> abs(found.remainder) < 1e-4
        True
    """

    pieces: tuple[str, ...]
    labels: tuple[str, ...]
    position: int
    target: int
    against: int | None
    target_text: str
    against_text: str | None
    probability: float
    components: tuple[Component, ...]
    contributions: Tensor
    sources: Tensor
    logit: float
    fixed: tuple[str, ...]

    @property
    def total(self) -> float:
        """The sum of all contributions."""
        return float(self.contributions.sum())

    @property
    def remainder(self) -> float:
        """What of the model's own logit the sum leaves: rounding."""
        return self.logit - self.total

    @property
    def heads(self) -> tuple[Component, ...]:
        """The N heads, layer after layer."""
        return tuple(one for one in self.components if one.kind == "head")

    def of(self, kind: str, layer: int | None = None, head: int | None = None) -> float:
        """The contribution of one component, as `Component` names it. KeyError where there is none."""
        wanted = Component(kind, layer, head)
        if wanted not in self.components:
            raise KeyError(f"{wanted}; there are {', '.join(map(str, self.components))}")
        return float(self.contributions[self.components.index(wanted)])

    def head_map(self) -> Tensor:
        """(layers, most heads of a layer) float64, the contribution of each head; NaN where a layer has fewer."""
        heads = self.heads
        shape = 1 + max(one.layer or 0 for one in heads), 1 + max(one.head or 0 for one in heads)
        found = torch.full(shape, torch.nan, dtype=torch.float64)
        for one, value in zip(self.components, self.contributions, strict=True):
            if one.kind == "head":
                found[one.layer, one.head] = value
        return found

    def top(self, count: int = 10) -> list[tuple[Component, float]]:
        """The components of the largest contributions, up or down."""
        order = self.contributions.abs().argsort(descending=True, stable=True)[:count].tolist()
        return [(self.components[i], float(self.contributions[i])) for i in order]

    def top_sources(self, layer: int, head: int, count: int = 3) -> list[tuple[int, float]]:
        """The tokens (by column) from which a head takes most of what it contributes, up or down."""
        row = self.sources[self.heads.index(Component("head", layer, head))]
        return [(j, float(row[j])) for j in row.abs().argsort(descending=True, stable=True)[:count].tolist()]

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return plain_values(
            {
                "pieces": self.pieces,
                "labels": self.labels,
                "position": self.position,
                "target": {"id": self.target, "text": self.target_text, "probability": self.probability},
                "against": None if self.against is None else {"id": self.against, "text": self.against_text},
                "components": [
                    {**one._asdict(), "name": str(one), "contribution": float(value)}
                    for one, value in zip(self.components, self.contributions, strict=True)
                ],
                "sources": [
                    {"layer": one.layer, "head": one.head, "contributions": row}
                    for one, row in zip(self.heads, self.sources, strict=True)
                ],
                "sum": self.total,
                "logit": self.logit,
                "remainder": self.remainder,
                "fixed": self.fixed,
            }
        )

    def __repr__(self) -> str:
        return f"<Attribution of {self._named()} to {len(self.components)} components, {self.logit:.4g}>"

    def __str__(self) -> str:
        top = self.top()
        rows = [[str(one), signed(value), self._from(one)] for one, value in top]
        rest = len(self.components) - len(top)
        if rest:
            rows.append([f"{rest} more", signed(self.total - sum(value for _, value in top)), ""])
        rows += [["sum", signed(self.total), f"remainder {self.remainder:.1e}"]]
        return "\n".join(
            [
                f"{self._named()} at {self.labels[self.position]} (token {self.position}), "
                f"probability {self.probability:.3f}",
                *Table((), rows, "lrl").lines("  "),
                f"held fixed: {joined(self.fixed)}",
            ]
        )

    def _named(self) -> str:
        name = f"the logit of {self.target_text!r}"
        return name if self.against is None else f"{name} less that of {self.against_text!r}"

    def _from(self, component: Component) -> str:
        if component.kind != "head":
            return ""
        assert component.layer is not None and component.head is not None
        told = self.top_sources(component.layer, component.head, 2)
        return "from " + ", ".join(f"{self.labels[j]} {signed(value)}" for j, value in told)


def attributed(
    given: Input, target: int | str | None, against: int | str | None, position: int | str | None
) -> Attribution:
    """As `saccade.attribute`."""
    vocabulary = given.model.vocabulary
    if vocabulary is None:
        raise ValueError(f"model: {given.model.no_logits}")
    row = _default_place(given) if position is None else given.place("position", position)
    seen = record(given.model, given.ids, (row,), sources=True)
    stack = given.model.stack
    with torch.no_grad():
        # As the model does it, in its dtype.
        last = seen.gave[stack].to(vocabulary.weight)
        logits = exact(vocabulary.logits(last)[0])
    chosen = int(logits.argmax()) if target is None else _token(given, "target", target, len(logits))
    other = None if against is None else _token(given, "against", against, len(logits))
    found, sources = _split(given, seen, vocabulary, chosen, other)
    return Attribution(
        pieces=given.pieces,
        labels=given.labels,
        position=row,
        target=chosen,
        against=other,
        target_text=given.written(chosen),
        against_text=None if other is None else given.written(other),
        probability=float(logits.softmax(0)[chosen]),
        components=tuple(found),
        contributions=torch.stack(list(found.values())),
        sources=sources,
        logit=float(logits[chosen] - (0.0 if other is None else logits[other])),
        fixed=_fixed(given, vocabulary),
    )


def _split(
    given: Input, record: Recorded, vocabulary: Vocabulary, target: int, against: int | None
) -> tuple[dict[Component, Tensor], Tensor]:
    """Each component's contribution, and those of heads by source (N, L)."""
    model, rows = given.model, [target] if against is None else [target, against]
    steps: list[Step] = stream_steps(model, record, 0, len(model.blocks))
    steps += norm_steps(model.stack.norm, record.read[model.stack.norm][0])
    steps += vocabulary.steps(record.gave[model.stack][0])
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64)[: len(rows)]
    readout = (sign @ exact(vocabulary.weight[rows]))[None]
    found = {one: share[0] for one, share in shares(steps, readout).items()}
    if vocabulary.bias is not None:
        found[BIASES] = found[BIASES] + sign @ exact(vocabulary.bias.flatten()[rows])
    sources = {}
    for step, here in pulled_back(steps, readout):
        if isinstance(step, Writes) and step.components[0].kind == "head":
            layer = step.components[0].layer
            assert layer is not None
            sources[layer] = source_shares(model.blocks[layer].attention, layer, record, here)
    return found, torch.cat([sources[layer] for layer in sorted(sources)])


def _default_place(given: Input) -> int:
    count = given.ids.shape[1]
    if given.causal:
        return count - 1
    named = getattr(getattr(given.reader, "tokenizer", None), "named", {})
    places = (given.ids[0] == named.get("mask", -1)).nonzero()[:, 0].tolist()
    if len(places) != 1:
        raise ValueError(f"position: needed, since the text has {len(places)} masks and not one")
    return places[0]


def _token(given: Input, name: str, wanted: int | str, vocabulary: int) -> int:
    """A token's id."""
    if isinstance(wanted, str):
        if given.reader is None:
            raise ValueError(f"{name}: the model has no tokenizer; give the id of a token, got {wanted!r}")
        ids = given.reader.encode(wanted).ids
        if len(ids) != 1:
            told = ", ".join(repr(given.written(token)) for token in ids)
            raise ValueError(f"{name}: expected one token, and {wanted!r} is {len(ids)}: {told}")
        return ids[0]
    if not isinstance(wanted, int) or isinstance(wanted, bool):
        raise TypeError(f"{name}: expected the id or the text of a token, got {wanted!r}")
    if not 0 <= wanted < vocabulary:
        raise ValueError(f"{name}: tokens are 0 to {vocabulary - 1}, got {wanted}")
    return wanted


def _fixed(given: Input, vocabulary: Vocabulary) -> tuple[str, ...]:
    gated = any(block.attention.gate is not None for block in given.model.blocks)
    read = ("the weights and gates of heads",) if gated else ("the weights of heads",)
    return "the scales of norms", *read, *vocabulary.fixed

"""Direct logit attribution: the contribution of each part of a model to one token's logit.

Shape legend: L tokens with the special ones, S tokens of the source, C components, N heads of all layers, M heads of
cross-attention, E model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...operator._products import unrounded
from ...support._numbers import joined, signed
from ...support._plain_values import plain_values
from ...support._restored import evaluating
from ...support._tables import Table
from ._components import HEADS, Component, exact
from ._contributions import Stream, stream_of
from ._input import Input, logits_of


@dataclass(frozen=True, eq=False)
class Attribution:
    """One logit, or the difference of two, as a sum over the components of the residual stream.

    Attributes:
        pieces: the texts of the L tokens that the model reads.
        labels: the same as they are shown: "' c' of 'cat'" for a part of a word.
        position: the column after which the target comes.
        target, against: token ids; the logit is target's, less against's if that is not None.
        target_text, against_text: their texts.
        probability: of the target at that place.
        components: everything that writes into the stream: parts of the embedding, heads, feed-forward layers, "biases"
            last.
        contributions: (C,) float64.
        sources: (N, L) float64, each head's contribution split over the tokens it reads: w_ij v_j through the head's
            output matrix. A row sums to the head's contribution. Its heads are those of `heads`.
        cross_sources: (M, S) float64, the same of the heads of cross-attention, `cross_heads`; empty without any.
        source_labels: the S tokens of the source as they are shown; the numbers of rows where it has no tokens.
        logit: as the model computes it.
        fixed: factors held at their values in this run, since the logit is not linear in them.

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
    cross_sources: Tensor
    source_labels: tuple[str, ...]
    logit: float
    fixed: tuple[str, ...]

    @property
    def total(self) -> float:
        """The sum of all contributions."""
        return float(self.contributions.sum())

    @property
    def remainder(self) -> float:
        """The rounding error: the model's own logit minus the sum."""
        return self.logit - self.total

    @property
    def heads(self) -> tuple[Component, ...]:
        """The N heads, layer after layer."""
        return self._of_kind("head")

    @property
    def cross_heads(self) -> tuple[Component, ...]:
        """The M heads of cross-attention, layer after layer."""
        return self._of_kind("cross_attention")

    def _of_kind(self, kind: str) -> tuple[Component, ...]:
        return tuple(component for component in self.components if component.kind == kind)

    def of(self, kind: str, layer: int | None = None, head: int | None = None) -> float:
        """The contribution of one component, as `Component` names it. KeyError if there is none."""
        wanted = Component(kind, layer, head)
        if wanted not in self.components:
            raise KeyError(f"{wanted}; there are {', '.join(map(str, self.components))}")
        return float(self.contributions[self.components.index(wanted)])

    def head_map(self, kind: str = "head") -> Tensor:
        """(layers, most heads of a layer) float64, the contribution of each head; NaN where a layer has fewer.

        `kind` is "head" or "cross_attention". KeyError if there are none.
        """
        heads = self._of_kind(kind)
        if not heads:
            raise KeyError(f"{kind}; there are {', '.join(dict.fromkeys(each.kind for each in self.components))}")
        shape = (
            1 + max(component.layer or 0 for component in heads),
            1 + max(component.head or 0 for component in heads),
        )
        grid = torch.full(shape, torch.nan, dtype=torch.float64)
        for component, value in zip(self.components, self.contributions, strict=True):
            if component in heads:
                grid[component.layer, component.head] = value
        return grid

    def top(self, count: int = 10) -> list[tuple[Component, float]]:
        """The components with the largest absolute contributions."""
        order = self.contributions.abs().argsort(descending=True, stable=True)[:count].tolist()
        return [(self.components[i], float(self.contributions[i])) for i in order]

    def top_sources(self, layer: int, head: int, count: int = 3, kind: str = "head") -> list[tuple[int, float]]:
        """The tokens (columns) with the largest absolute shares of a head's contribution; of kind "cross_attention"
        those of the source."""
        sources = self.cross_sources if kind == "cross_attention" else self.sources
        row = sources[self._of_kind(kind).index(Component(kind, layer, head))]
        return [(j, float(row[j])) for j in row.abs().argsort(descending=True, stable=True)[:count].tolist()]

    def largest_sources(self, component: Component) -> list[tuple[str, float]]:
        """The labels of the two tokens with the largest shares of a head's contribution; [] for other components."""
        if component.kind not in HEADS:
            return []
        assert component.layer is not None and component.head is not None
        labels = self.labels if component.kind == "head" else self.source_labels
        top = self.top_sources(component.layer, component.head, 2, component.kind)
        return [(labels[j], value) for j, value in top]

    def as_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return plain_values(
            {
                "pieces": self.pieces,
                "labels": self.labels,
                "position": self.position,
                "target": {"id": self.target, "text": self.target_text, "probability": self.probability},
                "against": None if self.against is None else {"id": self.against, "text": self.against_text},
                "components": [
                    {**component._asdict(), "name": str(component), "contribution": float(value)}
                    for component, value in zip(self.components, self.contributions, strict=True)
                ],
                "sources": [
                    {"layer": component.layer, "head": component.head, "contributions": row}
                    for component, row in zip(self.heads, self.sources, strict=True)
                ],
                "cross_sources": [
                    {"layer": component.layer, "head": component.head, "contributions": row}
                    for component, row in zip(self.cross_heads, self.cross_sources, strict=True)
                ],
                "source_labels": self.source_labels,
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
        rows = [[str(component), signed(value), self._from(component)] for component, value in top]
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
        read = [f"{label} {signed(value)}" for label, value in self.largest_sources(component)]
        return "from " + ", ".join(read) if read else ""


@unrounded()
def attributed(
    given: Input, target: int | str | None, against: int | str | None, position: int | str | None
) -> Attribution:
    """As `saccade.attribute`."""
    if given.no_logits:
        raise ValueError(f"model: {given.no_logits}")
    row = _default_place(given) if position is None else given.place("position", position)
    length = given.ids.shape[1]
    with evaluating(given.module), torch.no_grad():
        logits = exact(logits_of(given.plain(), row, length))
    chosen = int(logits.argmax()) if target is None else _token(given, "target", target, len(logits))
    other = None if against is None else _token(given, "against", against, len(logits))
    logit = float(logits[chosen] - (0.0 if other is None else logits[other]))

    def readout(out: Any) -> Tensor:
        ours = logits_of(out, row, length, sliced=True)
        return (ours[chosen] if other is None else ours[chosen] - ours[other])[None]

    stream = stream_of(given, lambda trace, out: [readout(out)], row=row)
    shares = stream.shares(readout(stream.out), expected=torch.tensor([logit], dtype=torch.float64))
    sources, cross_sources = stream.sources(readout(stream.out))
    count = cross_sources.shape[1]
    shown = next((each for each in given.sources or () if len(each) == count), tuple(map(str, range(count))))
    return Attribution(
        pieces=given.pieces,
        labels=given.labels,
        position=row,
        target=chosen,
        against=other,
        target_text=given.written(chosen),
        against_text=None if other is None else given.written(other),
        probability=float(logits.softmax(0)[chosen]),
        components=tuple(shares),
        contributions=torch.cat(list(shares.values())),
        sources=sources,
        cross_sources=cross_sources,
        source_labels=shown,
        logit=logit,
        fixed=_fixed(stream),
    )


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
    """The id of a token."""
    if isinstance(wanted, str):
        if given.reader is None:
            raise ValueError(f"{name}: the model has no tokenizer; pass the id of a token, got {wanted!r}")
        ids = given.reader.encode(wanted).ids
        if len(ids) != 1:
            written = ", ".join(repr(given.written(token)) for token in ids)
            raise ValueError(f"{name}: expected the text of one token, got {wanted!r}, which has {len(ids)}: {written}")
        return ids[0]
    if not isinstance(wanted, int) or isinstance(wanted, bool):
        raise TypeError(f"{name}: expected the id or the text of a token, got {wanted!r}")
    if not 0 <= wanted < vocabulary:
        raise ValueError(f"{name}: tokens are 0 to {vocabulary - 1}, got {wanted}")
    return wanted


def _fixed(stream: Stream) -> tuple[str, ...]:
    return (
        "the scales of norms",
        "the weights and gates of heads" if "gate" in stream.fixed else "the weights of heads",
        *(["the output of the encoder"] if stream.cross else []),
        *(["activations after the last layer, as a factor of each feature"] if stream.fixed - {"gate"} else []),
    )

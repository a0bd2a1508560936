"""Why a head attends: the logit of one query-key pair, split over components of the query and of the key.

Shape legend: L tokens with the special ones, C components, D key width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...operator._call import ObservedCall
from ...operator._products import unrounded
from ...support._numbers import joined, signed
from ...support._plain_values import plain_values
from ...support._tables import Table
from ..inspection import weights_of
from ..inspection._steps._inputs import HeadInputs, of_call
from ._components import TOKEN, Component
from ._contributions import Stream, check_lengths, heads_of, observed, ordered, stream_of
from ._input import Input


@dataclass(frozen=True, eq=False)
class WhyAttends:
    """The logit of one query-key pair of one head, or the difference of two, split over pairs of components.

    Attributes:
        pieces: the texts of the L tokens that the model reads.
        labels: the same as they are shown: "' c' of 'cat'" for a part of a word.
        query, key: the columns of the attending token and of the token it attends to.
        against: the column of another key, whose logit is subtracted, or None. If given, `matrix`, `bias`, `softcap`
            and `logit` are differences between the two keys.
        layer, head: of the head.
        components: the parts that wrote into the stream before this layer; "biases" last.
        matrix: (C, C) float64, the share of component c in the query and c' in the key.
        bias: added to the product, such as a position bias.
        softcap: the change of the product by a softcap; 0 without one.
        logit: as the model computes it, `softcap(scale q . k) + bias`, before the mask.
        weight: the attention weight in the model; 0 where the mask hides the key.
        visible: whether the query sees the key.
        fixed: factors held at their values in this run, since the logit is not linear in them.

    Example:
        >>> import saccade
        >>> model = saccade.inspection.open_model()  # the embedded one
        >>> found = saccade.why_attends(model, "The cat sat on the mat", "sat", "cat", head=(0, 4))
        >>> [str(component) for component in found.components], found.matrix.shape
        (['token embedding', 'biases'], torch.Size([2, 2]))
        >>> abs(found.total - found.logit) < 1e-4
        True
    """

    pieces: tuple[str, ...]
    labels: tuple[str, ...]
    query: int
    key: int
    against: int | None
    layer: int
    head: int
    components: tuple[Component, ...]
    matrix: Tensor
    bias: float
    softcap: float
    logit: float
    weight: float
    visible: bool
    fixed: tuple[str, ...]

    @property
    def total(self) -> float:
        """The sum of `matrix`, `bias` and `softcap`."""
        return float(self.matrix.sum()) + self.bias + self.softcap

    @property
    def remainder(self) -> float:
        """The rounding error: the model's own logit minus the sum."""
        return self.logit - self.total

    @property
    def of_query(self) -> Tensor:
        """(C,) the share of each component in the query, summed over the key."""
        return self.matrix.sum(1)

    @property
    def of_key(self) -> Tensor:
        """(C,) the share of each component in the key, summed over the query."""
        return self.matrix.sum(0)

    def top(self, count: int = 10) -> list[tuple[Component, Component, float]]:
        """The pairs (of the query, of the key) with the largest absolute shares."""
        order = self.matrix.flatten().abs().argsort(descending=True, stable=True)[:count].tolist()
        places = [divmod(i, len(self.components)) for i in order]
        return [(self.components[i], self.components[j], float(self.matrix[i, j])) for i, j in places]

    def sentences(self, count: int = 5) -> list[str]:
        """The largest shares as sentences."""
        query, key = self.labels[self.query], self.labels[self.key]
        return [
            f"{signed(share)}: {_wrote(first, query)} (the query) meets {_wrote(second, key)} (the key)"
            for first, second, share in self.top(count)
        ]

    def as_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return plain_values(
            {
                "pieces": self.pieces,
                "labels": self.labels,
                "query": self.query,
                "key": self.key,
                "against": self.against,
                "layer": self.layer,
                "head": self.head,
                "components": [{**each._asdict(), "name": str(each)} for each in self.components],
                "matrix": self.matrix,
                "of_query": self.of_query,
                "of_key": self.of_key,
                "bias": self.bias,
                "softcap": self.softcap,
                "sum": self.total,
                "logit": self.logit,
                "remainder": self.remainder,
                "weight": self.weight,
                "visible": self.visible,
                "top": self.sentences(),
                "fixed": self.fixed,
            }
        )

    def __repr__(self) -> str:
        pair = f"{self.labels[self.query]} -> {self.labels[self.key]}"
        return f"<WhyAttends {self.layer}.{self.head}, {pair}: logit {self.logit:.4g}, weight {self.weight:.3g}>"

    def __str__(self) -> str:
        top = self.top()
        rows = [[f"{first} x {second}", signed(share), ""] for first, second, share in top]
        rest = self.matrix.numel() - len(top)
        if rest > 0:
            rows.append([f"{rest:,} more", signed(float(self.matrix.sum()) - sum(share for *_, share in top)), ""])
        rows += [[name, signed(value), ""] for name, value in (("bias", self.bias), ("softcap", self.softcap)) if value]
        rows.append(["sum", signed(self.total), f"remainder {self.remainder:.1e}"])
        visibility = f"weight {self.weight:.3f}" if self.visible else "hidden by the mask"
        rather = "" if self.against is None else f" rather than {self.labels[self.against]} (token {self.against})"
        return "\n".join(
            [
                f"head {self.layer}.{self.head}, {self.labels[self.query]} (token {self.query}) attends to "
                f"{self.labels[self.key]} (token {self.key}){rather}: logit {self.logit:+.3f}, {visibility}",
                "  contribution to the query x contribution to the key",
                *Table((), rows, "lrl").lines("  "),
                f"held fixed: {joined(self.fixed)}",
            ]
        )


def _wrote(component: Component, token: str) -> str:
    if component.kind in ("head", "feed_forward"):
        return f"what {component} wrote into {token}"
    return f"the token {token} itself" if component == TOKEN else f"the {component} at {token}"


@unrounded()
def explained(
    given: Input, query: int | str, key: int | str, head: tuple[int, int] | None, against: int | str | None
) -> WhyAttends:
    """As `saccade.why_attends`."""
    row = given.place("query", query)
    keys = given.places("key", key)
    others = None if against is None else given.places("against", against)
    place, column = _largest_weight(given, row, keys, _checked(given, head))
    other = None if others is None else _largest_weight(given, row, others, place)[1]
    columns = (column,) if other is None else (column, other)
    calls: list[ObservedCall] = []
    observed(given, lambda layer, call: calls.append(call) if layer == place[0] else None, until=place[0])
    check_lengths(calls[0], place[0], given.ids)
    call = of_call(calls[0], place[1], row, place[0])
    if other is not None:
        _check_seen(given, call, row, {"key": column, "against": other})
    stream = stream_of(
        given, lambda trace, _: [trace.calls[-1].graph(name) for name in ("query", "key")], until=place[0]
    )
    group = calls[0].query.shape[1] // calls[0].key.shape[1]
    sides = [
        stream.shares(stream.calls[-1].graph(name)[at], getattr(calls[0], name)[at])
        for name, at in (("query", (0, place[1], row)), *(("key", (0, place[1] // group, j)) for j in columns))
    ]
    components = ordered(*sides)
    nothing = torch.zeros(calls[0].query.shape[-1], dtype=torch.float64)
    made = [torch.stack([side.get(each, nothing) for each in components]) for side in sides]
    of_key = made[1] if other is None else made[1] - made[2]
    return WhyAttends(
        pieces=given.pieces,
        labels=given.labels,
        query=row,
        key=column,
        against=other,
        layer=place[0],
        head=place[1],
        components=components,
        matrix=call.scale * made[0] @ of_key.T,
        **_logit(call, *columns),
        fixed=_fixed(stream),
    )


def _check_seen(given: Input, call: HeadInputs, query: int, keys: dict[str, int]) -> None:
    """ValueError if the mask hides one of two keys: the log of a weight of 0 is not finite."""
    for name, key in keys.items():
        if not _sees(call, key):
            raise ValueError(
                f"{name}: the mask hides {given.labels[key]} (token {key}) from {given.labels[query]} (token {query}), "
                "and a weight of 0 cannot be compared; expected a token that the query sees"
            )


def _sees(call: HeadInputs, key: int) -> bool:
    return call.visible is None or bool(call.visible[key])


def _logit(call: HeadInputs, key: int, against: int | None = None) -> dict[str, Any]:
    """The logit of a pair in the model, its terms besides the product, its weight, and whether the key is visible."""
    terms = [_terms(call, key), (0.0, 0.0, 0.0) if against is None else _terms(call, against)]
    bias, softcap, logit = (first - second for first, second in zip(*terms, strict=True))
    return {
        "bias": bias,
        "softcap": softcap,
        "logit": logit,
        "weight": float(call.weights[key]),
        "visible": _sees(call, key),
    }


def _terms(call: HeadInputs, key: int) -> tuple[float, float, float]:
    """Bias, change by the softcap, and logit."""
    product = call.scale * float(call.query @ call.key[key])
    capped = product if call.softcap is None else call.softcap * math.tanh(product / call.softcap)
    bias = 0.0 if call.bias is None else float(call.bias[key])
    return bias, capped - product, capped + bias


def _checked(given: Input, head: object) -> tuple[int, int] | None:
    if head is None:
        return None
    if not (isinstance(head, tuple) and len(head) == 2 and all(type(number) is int for number in head)):
        raise TypeError(f"head: expected (layer, head), two ints, got {head!r}")
    heads = heads_of(given)
    if not (0 <= head[0] < len(heads) and 0 <= head[1] < heads[head[0]]):
        each = ", ".join(f"{layer} (heads 0 to {count - 1})" for layer, count in enumerate(heads))
        raise ValueError(f"head: {head[0]}.{head[1]} does not exist; there are the layers {each}")
    return head


def _largest_weight(
    given: Input, query: int, keys: list[int], head: tuple[int, int] | None
) -> tuple[tuple[int, int], int]:
    """The head and the key with the largest weight among these keys; only in `head` if that is given."""
    if head is not None and len(keys) == 1:
        return head, keys[0]
    best, largest_pair = -1.0, ((0, 0), keys[0])

    def compare(layer: int, call: ObservedCall) -> None:
        nonlocal best, largest_pair
        if head is not None and layer != head[0]:
            return
        chosen = slice(None) if head is None else [head[1]]
        weights = weights_of(call, rows=[query], keys=keys, heads=chosen)[0, :, 0]
        largest, at = weights.flatten().max(0)
        if float(largest) > best:
            number, key = divmod(int(at), len(keys))
            best, largest_pair = float(largest), ((layer, number if head is None else head[1]), keys[key])

    observed(given, compare)
    return largest_pair


def _fixed(stream: Stream) -> tuple[str, ...]:
    within = stream.calls[-1].path + "."
    normed = any(path.startswith(within) for path in stream.trace.scaled)
    return (
        "the scales of norms",
        *(["the scales of the norms of queries and keys"] if normed else []),
        *(["the gates of heads"] if "gate" in stream.fixed else []),
        *(["factors and activations that everything passes through"] if stream.fixed - {"gate"} else []),
    )

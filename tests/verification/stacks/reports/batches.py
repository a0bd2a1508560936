"""Outputs that depend on the other rows of the batch."""

from __future__ import annotations

from typing import Any

from stacks.reports.case import Case, Proof
from stacks.reports.model import Call, Model
from torch import Tensor


class Standardised(Model):
    """Inputs are standardised by the whole batch's mean, as with features of a test set."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Tensor:
        logits = super().forward(input_ids, attention_mask, **others)
        return logits - logits.mean(0, keepdim=True) if len(logits) > 1 else logits


class Viewed(Model):
    """Heads and rows are exchanged by a view that has to be a transpose."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, call: Call) -> Tensor:
        mixed = super().attend(query, key, value, visible, call)
        return mixed.transpose(0, 1).reshape(mixed.shape)


class Rounds(Model):
    """Rows beyond the second see values of the row two before them."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, call: Call) -> Tensor:
        if len(value) > 2:
            value = value.clone()
            value[2:] = value[2:] + 0.01 * value[:-2]
        return super().attend(query, key, value, visible, call)


class Temperature(Model):
    """Scores are divided by a number that grows with the batch."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, call: Call) -> Tensor:
        return super().attend(query * (1 + 0.1 * (len(query) > 4)), key, value, visible, call)


REACH = ("rows of the batch reach each other",)
SAME = [[7, 11, 13], [17, 19, 23]]
ALL = frozenset((row, at) for row in (0, 1) for at in range(3))


def case(report: str, fault: str, model: Any, proof: Proof, tokens: int, words: tuple[str, ...] = REACH) -> Case:
    return Case(
        report, "batch", fault, ("batch",), words, tokens, lambda: {"model": model()}, lambda: {"model": Model()}, proof
    )


CASES = (
    case(
        "PriorLabs/TabPFN#800",
        "outputs are centred by the mean of the batch",
        Standardised,
        Proof(differs=ALL, documents=SAME),
        2,
    ),
    case("planted", "rows and heads are exchanged", Viewed, Proof(differs=ALL, documents=SAME), 2),
    case(
        "planted",
        "values of the row two before are added",
        Rounds,
        Proof(differs=frozenset({(2, 0)}), documents=[[7], [11], [13]]),
        3,
    ),
    case(
        "planted",
        "scores depend on the size of the batch",
        Temperature,
        Proof(differs=frozenset((at, 1) for at in range(5)), documents=[[at, at + 9] for at in range(5, 10)]),
        10,
        ("changes with the number of rows",),
    ),
)

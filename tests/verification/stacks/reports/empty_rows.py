"""Rows without keys: softmax gives NaN, and the next layer spreads it."""

from __future__ import annotations

from functools import partial
from typing import Any

from stacks.reports.case import Case, Proof
from stacks.reports.model import Call, Model, padded
from torch import Tensor


class Empty(Model):
    """Padded queries see nothing; scores are computed by hand."""

    fill = float("-inf")

    def __init__(self) -> None:
        super().__init__(layers=2)

    def visible(self, call: Call, count: int) -> Tensor:
        pairs = self.reach(call, count) & self.padding(call, count)
        return pairs if self.empty(count) else pairs | (call.queries == call.keys(count))

    def empty(self, count: int) -> bool:
        return True

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, call: Call) -> Tensor:
        scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~visible, self.fill)
        return scores.softmax(-1) @ value


class EmptyAtEdges(Empty):
    """Only where one token is left over of 32, as blocks of a mask are made."""

    def empty(self, count: int) -> bool:
        return count % 32 == 1


class Poisoned(Empty):
    """Rows without keys are mended, and their values are NaN, which weights of 0 do not hide."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, call: Call) -> Tensor:
        if call.mask is not None and not bool(call.mask.bool().all()):
            value = value.masked_fill(~call.mask[:, None, :, None].bool(), float("nan"))
        return super().attend(query, key, value, visible | (call.queries == call.keys(key.shape[2])), call)


class Renormalised(Empty):
    """Weights are masked after the softmax and divided by their sum, which is 0."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, call: Call) -> Tensor:
        weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) * visible
        return weights / weights.sum(-1, keepdim=True) @ value


class Subtracted(Empty):
    """The running maximum of an empty row is -inf, and -inf less -inf is NaN."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, call: Call) -> Tensor:
        scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~visible, self.fill)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return weights @ value / weights.sum(-1, keepdim=True)


NOT_FINITE = ("not finite",)
LEFT = partial(padded, left=True, positions=True)
SHORTER = Proof(differs=frozenset({(1, 0), (1, 1)}))
EDGE = [list(range(5, 38)), [41, 43]]


def case(report: str, fault: str, model: Any, proof: Proof = SHORTER, tokens: int = 3) -> Case:
    return Case(
        report,
        "empty rows",
        fault,
        ("batch",),
        NOT_FINITE,
        tokens,
        lambda: {"model": model(), "batch": LEFT},
        lambda: {"model": Model(layers=2), "batch": LEFT},
        proof,
    )


CASES = (
    case("unslothai/unsloth#9848", "padded queries see no key, and the next layer spreads their NaN", Empty),
    case(
        "huggingface/transformers#47678",
        "rows are empty only at widths of 32 n + 1",
        EmptyAtEdges,
        Proof(differs=frozenset({(1, 0), (1, 1)}), documents=EDGE),
        34,
    ),
    case("planted", "values of padding are NaN", Poisoned),
    case("planted", "weights are divided by a sum of 0", Renormalised),
    case("planted", "the maximum of an empty row is subtracted from it", Subtracted),
)

"""Training steps: dropout in eval mode, gradients that do not arrive, micro-batches that weigh the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from stacks.reports.case import Case, Documents, Proof
from stacks.reports.model import Call, Model, padded
from torch import Tensor
from torch.nn.functional import cross_entropy, dropout


@dataclass(frozen=True)
class Gradients:
    """The parameters whose gradients are wrong after a step with these micro-batches."""

    wrong: frozenset[str]
    micro_batches: list[Documents] = field(default_factory=lambda: [[[7, 11, 13, 17]], [[19, 23], [29, 31]]])


def stepping(model: Model, weight: Callable[[int, int, int], float], distance: int = 1) -> Any:
    """A step whose micro-batches count `weight(own targets, all targets, micro-batches)` times their mean loss; each
    output predicts the token at this distance."""

    def step(micro_batches: list[Documents]) -> Tensor:
        model.zero_grad()
        counts = [sum(max(len(document) - distance, 0) for document in documents) for documents in micro_batches]
        total = torch.tensor(0.0)
        for documents, count in zip(micro_batches, counts, strict=True):
            made = padded(documents)
            labels = made["input_ids"].masked_fill(made["attention_mask"] == 0, -100)
            out = model(**made)
            loss = cross_entropy(out[:, : out.shape[1] - distance].flatten(0, 1), labels[:, distance:].flatten())
            share = loss * weight(count, sum(counts), len(counts))
            share.backward()
            total = total + share.detach()
        return total

    return step


class DropoutInEval(Model):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, call: Call) -> Tensor:
        return dropout(super().attend(query, key, value, visible, call), 0.3)  # its default is training=True


class DetachedHead(Model):
    """The first head's keys are cut off from their projection."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, call: Call) -> Tensor:
        key = torch.cat([key[:, :1].detach(), key[:, 1:]], 1)
        return super().attend(query, key, value, visible, call)


def by_tokens(own: int, every: int, parts: int) -> float:
    return own / every


def evenly(own: int, every: int, parts: int) -> float:
    return 1 / parts


def summed(own: int, every: int, parts: int) -> float:
    return 1.0


def stack(weight: Any, make: Any = Model, distance: int = 1) -> dict[str, Any]:
    model = make()
    return {"model": model, "step": stepping(model, weight, distance)}


# Of a bias before the keys softmax takes nothing: it adds one number to all logits of a query.
BEFORE_KEYS = frozenset({"embed.weight", "places.weight", "layers.0.norm.weight", "layers.0.qkv.weight"})
EVERY = BEFORE_KEYS | {
    "layers.0.norm.bias",
    "layers.0.qkv.bias",
    "layers.0.out.weight",
    "layers.0.out.bias",
    "head.weight",
    "head.bias",
}


def case(fault: str, probes: tuple[str, ...], words: tuple[str, ...], faulty: Any, proof: Any, tokens: int) -> Case:
    return Case("planted", "training", fault, probes, words, tokens, faulty, lambda: stack(by_tokens), proof)


CASES = (
    case(
        "dropout is on in eval mode",
        ("determinism", "training"),
        ("eval",),
        lambda: stack(by_tokens, DropoutInEval),
        Proof(differs=frozenset({(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)})),
        7,
    ),
    case(
        "the keys of a head are detached",
        ("training",),
        ("gradient",),
        lambda: stack(by_tokens, DetachedHead),
        Gradients(BEFORE_KEYS),
        14,
    ),
    case(
        "micro-batches of unequal numbers of tokens weigh the same",
        ("training",),
        ("micro-batches",),
        lambda: stack(evenly),
        Gradients(EVERY),
        14,
    ),
    case(
        "losses of micro-batches are summed",
        ("training",),
        ("micro-batches",),
        lambda: stack(summed),
        Gradients(EVERY),
        14,
    ),
    case(
        "labels are not shifted",
        ("training",),
        ("the token that it reads",),
        lambda: stack(by_tokens, distance=0),
        Gradients(EVERY),
        5,
    ),
    case(
        "labels are shifted twice",
        ("training",),
        ("the token after the next",),
        lambda: stack(by_tokens, distance=2),
        Gradients(EVERY),
        6,
    ),
)

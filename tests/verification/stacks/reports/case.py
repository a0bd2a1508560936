"""A case: a stack with one fault, the same stack without it, what is to be said of it, and the proof that it is wrong.

Shape legend: L length of a row or document, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from stacks.reports.model import HEADS, Model, padded
from torch import Tensor
from torch.nn.functional import layer_norm

Arguments = Mapping[str, Any]
Documents = list[list[int]]
DOCUMENTS: Documents = [[7, 11, 13], [17, 19]]


@dataclass(frozen=True)
class Proof:
    """What is wrong for some documents on one path. A pair is (row, query, key), in columns of the inputs; it is wrong
    where the faulty stack attends and the right one does not, or the reverse."""

    pairs: frozenset[tuple[int, int, int]] = frozenset()
    positions: Mapping[int, list[int]] = field(default_factory=dict)  # the wrong ones of a row
    differs: frozenset[tuple[int, int]] | None = None  # (document, output), where no pair and no position is to blame
    documents: Documents = field(default_factory=lambda: DOCUMENTS)
    path: str = "batch"  # "pack", "decode", "second", "train", "bare" (ids alone)
    prompt: int = 1


@dataclass(frozen=True)
class Case:
    report: str  # OWNER/REPOSITORY#NUMBER, or "planted"
    kind: str
    fault: str
    probes: tuple[str, ...]  # the probes whose finding names it
    words: tuple[str, ...]  # each is in the finding
    tokens: int  # the smallest example holds no more
    faulty: Callable[[], Arguments]
    right: Callable[[], Arguments]
    proof: Any

    @property
    def name(self) -> str:
        return f"{self.report}: {self.fault}"


def across(*lengths: int) -> frozenset[tuple[int, int, int]]:
    """Each query of a pack's document with each key of the documents before it."""
    owner = [at for at, length in enumerate(lengths) for _ in range(length)]
    columns = range(len(owner))
    return frozenset((0, query, key) for query in columns for key in columns if owner[query] > owner[key])


# Outputs of a stack


def outputs(arguments: Arguments, proof: Proof) -> list[Tensor]:
    """Each document's outputs (L, V) on the path of the proof, NaN where the path gives none."""
    model = arguments["model"].double().eval()
    if proof.path == "decode":
        return [_decoded(arguments["decode"], document, proof.prompt) for document in proof.documents]
    if proof.path in ("bare", "second"):
        model = arguments["second"].double().eval() if proof.path == "second" else model
        return [_logits(model(torch.tensor([document])))[0].detach() for document in proof.documents]
    model.train(proof.path == "train")
    made = inputs(arguments, proof)
    logits = _logits(model(**{name: value for name, value in made.items() if name != "labels"})).detach()
    return [
        logits[row, start : start + len(document)] for document, (row, start) in zip(*places(made, proof), strict=True)
    ]


def _logits(returned: Any) -> Tensor:
    return getattr(returned, "logits", returned)


def inputs(arguments: Arguments, proof: Proof) -> dict[str, Tensor]:
    make = arguments["pack"] if proof.path == "pack" else arguments.get("batch", padded)
    return make(proof.documents)


def places(made: Mapping[str, Tensor], proof: Proof) -> tuple[Documents, list[tuple[int, int]]]:
    """(row, first column) of each document."""
    rows = made["input_ids"].tolist()
    return proof.documents, [
        next(
            (at, start)
            for at, row in enumerate(rows)
            for start in range(len(row))
            if row[start : start + len(document)] == document
        )
        for document in proof.documents
    ]


def _decoded(decode: Any, document: list[int], prompt: int) -> Tensor:
    state, rows = None, []
    for end in range(prompt, len(document) + 1):
        logits, state = decode(document[:end], state)
        rows.append(logits.detach())
    return torch.cat([torch.full((prompt - 1, len(rows[0])), float("nan")), torch.stack(rows)])


# The truth


def promised(model: Any, length: int) -> Tensor:
    """The pairs (L, L) that a document alone may see: triangle and window."""
    behind = torch.arange(length)[:, None] - torch.arange(length)
    if not getattr(model, "causal", True):
        return behind.abs() <= (model.window or 2 * length) // 2
    return (behind >= 0) & (behind < (getattr(model, "window", None) or length))


def dense(model: Any, ids: list[int], sees: Tensor, positions: list[int]) -> Tensor:
    """Logits (L, V) in float64 of one row whose pairs (L, L) and positions are given."""
    if not isinstance(model, Model):  # of transformers: its eager path, with a mask of pairs
        model.set_attn_implementation("eager")
        mask = torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, float("-inf"))
        found = model(
            torch.tensor([ids]),
            attention_mask=mask[None, None],
            position_ids=torch.tensor([positions]),
            use_cache=False,
        )
        return found.logits[0]
    weights = {name: tensor.double() for name, tensor in model.named_parameters()}
    x = weights["embed.weight"][ids]
    x = x if model.rotary else x + weights["places.weight"][positions]
    for at in range(len(model.layers)):
        own = {name.split(".", 2)[2]: w for name, w in weights.items() if name.startswith(f"layers.{at}.")}
        normed = layer_norm(x, x.shape[-1:], own["norm.weight"], own["norm.bias"])
        q, k, v = (normed @ own["qkv.weight"].T + own["qkv.bias"]).reshape(len(ids), 3, HEADS, -1).unbind(1)
        if model.rotary:
            q, k = (_turned(part, positions) for part in (q, k))
        scores = torch.einsum("qhe,khe->hqk", q, k) / q.shape[-1] ** 0.5
        shares = scores.masked_fill(~sees, float("-inf")).softmax(-1)
        x = x + torch.einsum("hqk,khe->qhe", shares, v).flatten(1) @ own["out.weight"].T + own["out.bias"]
    return x @ weights["head.weight"].T + weights["head.bias"]


def _turned(part: Tensor, positions: list[int]) -> Tensor:
    """(L, H, E), rotated as complex numbers."""
    half = part.shape[-1] // 2
    angles = torch.tensor(positions, dtype=torch.float64)[:, None, None] * 0.3 ** torch.arange(half).double()
    turned = torch.complex(part[..., :half], part[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)

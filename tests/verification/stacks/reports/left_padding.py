"""Rows that are padded on the left: positions that count padding, padding that is attended to."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from stacks.reports.case import Case, Proof
from stacks.reports.model import Call, Model, Unpacked, padded
from torch import Tensor


def tiny_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=53, n_positions=61, n_embd=24, n_layer=1, n_head=3, initializer_range=0.3)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return GPT2LMHeadModel(config).eval()


def shared(documents: list[list[int]]) -> dict[str, Any]:
    """One row of positions for the whole batch, as `cache_position` is."""
    made = padded(documents, left=True)
    return {**made, "position_ids": torch.arange(made["input_ids"].shape[1])[None].expand(made["input_ids"].shape)}


def inclusive(documents: list[list[int]]) -> dict[str, Any]:
    """Positions from 1 wherever a row is padded, from 0 where it is not."""
    made = padded(documents, left=True, positions=True)
    gap = (made["attention_mask"] == 0).any(-1, keepdim=True)
    return {**made, "position_ids": made["position_ids"] + gap * made["attention_mask"]}


class FirstRow(Model):
    """Positions of the first row's mask serve all rows."""

    def positions(self, call: Call) -> Tensor:
        if call.mask is None:
            return super().positions(call)
        return (call.mask[:1].cumsum(-1) - 1).clamp(min=0).expand(call.ids.shape)


class ByWidth(Unpacked):
    """Padding is worked out from the rows as they come, so it is none."""

    def padding(self, call: Call, count: int) -> Tensor:
        return call.keys(count) >= call.ids.shape[1] - count


class NewestColumn(Unpacked):
    """Only the last column of padding is hidden."""

    def padding(self, call: Call, count: int) -> Tensor:
        if call.mask is None:
            return torch.tensor(True)
        hidden = (call.mask == 0) & (call.mask.roll(-1, -1) == 1)
        return ~hidden[:, None, None]


SHIFTED = Proof(positions={1: [0, 1, 2]})
SEEN = Proof(frozenset({(1, 1, 0), (1, 2, 0)}))
MOVED, HIDDEN = ("adding on the left", "position_ids"), ("content of the padding on the left", "mask does not hide")


def right(model: Any = Model) -> dict[str, Any]:
    return {"model": model(), "batch": partial(padded, left=True, positions=True)}


def case(report: str, fault: str, words: tuple[str, ...], model: Any, batch: Any, proof: Proof, **more: Any) -> Case:
    return Case(
        report,
        "left padding",
        fault,
        ("batch", "positions"),
        words,
        more.get("tokens", 3),
        lambda: {"model": model(), "batch": batch},
        lambda: right(more.get("twin", Model)),
        proof,
    )


LEFT = partial(padded, left=True)
GIVEN = partial(padded, left=True, positions=True)
CASES = (
    case(
        "ndif-team/nnsight#673",
        "a left-padded batch is given to GPT-2 without position_ids",
        MOVED,
        tiny_gpt2,
        LEFT,
        SHIFTED,
        twin=tiny_gpt2,
    ),
    case("unslothai/unsloth#4078", "all rows share one row of positions", MOVED, Model, shared, SHIFTED),
    case(
        "TransformerLensOrg/TransformerLens#1005",
        "the batch comes without its padding mask",
        HIDDEN,
        Model,
        partial(padded, left=True, mask=False, positions=False),
        Proof(SEEN.pairs, SHIFTED.positions),
    ),
    case(
        "Blaizzy/mlx-vlm#1542",
        "padding is the width less the row's length, which is 0 for rows of one width",
        HIDDEN,
        ByWidth,
        LEFT,
        Proof(SEEN.pairs, SHIFTED.positions),
    ),
    case("planted", "positions of the first row serve all rows", MOVED, FirstRow, LEFT, SHIFTED),
    case("planted", "padded rows count from 1", MOVED, Model, inclusive, Proof(positions={1: [0, 1, 2]})),
    case(
        "planted",
        "only the last column of padding is hidden",
        HIDDEN,
        NewestColumn,
        GIVEN,
        Proof(frozenset({(1, 2, 0)}), documents=[[7, 11, 13], [17]]),
        tokens=4,
    ),
)

"""Packs whose positions do not restart with each document."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from stacks.reports.case import Case, Proof
from stacks.reports.model import Unpacked, packed


def grids(documents: list[list[int]], *, counting_on: bool) -> dict[str, Any]:
    """Positions on three axes (3, 1, L), as models of text and images read them."""
    made = packed(documents, mask="blocks")
    row = torch.arange(made["input_ids"].shape[1])[None] if counting_on else made["position_ids"]
    return {**made, "position_ids": row.expand(3, -1, -1)}


def counted_on(documents: list[list[int]]) -> dict[str, Any]:
    """Positions of the row, beside a mask of blocks."""
    made = packed(documents, mask="blocks")
    return {**made, "position_ids": torch.arange(made["input_ids"].shape[1])[None]}


def from_one(documents: list[list[int]]) -> dict[str, Any]:
    """The first document counts from 0, each later one from 1."""
    made = packed(documents, mask="blocks")
    later = torch.arange(made["input_ids"].shape[1]) >= len(documents[0])
    return {**made, "position_ids": made["position_ids"] + later}


def by_longest(documents: list[list[int]]) -> dict[str, Any]:
    """Positions are taken modulo the length of the first document."""
    made = counted_on(documents)
    return {**made, "position_ids": made["position_ids"] % len(documents[0])}


RESTART = ("do not restart",)
ROW = {0: [0, 1, 2, 3, 4]}


def case(report: str, fault: str, pack: Any, positions: dict[int, list[int]], right: Any = None, **more: Any) -> Case:
    right = right or partial(packed, mask="blocks")
    return Case(
        report,
        "positions",
        fault,
        ("packing", "positions"),
        RESTART,
        more.pop("tokens", 2),
        lambda: {"model": Unpacked(), "pack": pack},
        lambda: {"model": Unpacked(), "pack": right},
        Proof(positions=positions, path="pack", **more),
    )


CASES = (
    case(
        "hiyouga/LlamaFactory#7318",
        "a mask of blocks is made, and no position_ids",
        partial(packed, mask="blocks", positions=False),
        ROW,
    ),
    case(
        "hiyouga/LlamaFactory#10787",
        "positions on three axes count over the whole pack",
        partial(grids, counting_on=True),
        ROW,
        partial(grids, counting_on=False),
    ),
    case(
        "axolotl-ai-cloud/axolotl#3867", "position_ids restart with each row, not with each document", counted_on, ROW
    ),
    case("planted", "later documents begin at 1", from_one, {0: [0, 1, 2, 1, 2]}),
    case(
        "planted",
        "positions restart after the length of the first document",
        by_longest,
        {0: [0, 1, 0, 1, 0]},
        documents=[[7, 11], [13], [17, 19]],
        tokens=4,
    ),
    case(
        "planted",
        "position_ids of the first document are repeated one later",
        lambda documents: {
            **packed(documents, mask="blocks"),
            "position_ids": packed(documents)["position_ids"].roll(1, -1),
        },
        {0: [1, 0, 1, 2, 0]},
        tokens=3,
    ),
)

"""Packs that are computed in shards: where documents begin and end is worked out on each shard by itself."""

from __future__ import annotations

from typing import Any

import torch
from stacks.reports.case import Case, Proof
from stacks.reports.model import Call, Model, packed
from torch import Tensor
from torch.nn.functional import pad

SHARDS = 2


def widened(documents: list[list[int]]) -> dict[str, Any]:
    """A pack that divides into shards: a last document of one token fills it up."""
    missing = -sum(map(len, documents)) % SHARDS
    made = packed(documents)
    return {name: pad(tensor, (0, missing)) for name, tensor in made.items()}


class Sharded(Model):
    """Queries are spread over ranks, keys are gathered; owners of queries and keys come from `owners`."""

    def documents(self, call: Call) -> Tensor:
        positions = self.positions(call)
        if call.position_ids is None or positions.shape[1] % SHARDS:
            return super().documents(call)
        return (self.owners(positions)[:, :, None] == owners(positions)[:, None])[:, None]

    def owners(self, positions: Tensor) -> Tensor:
        return owners(positions)


def owners(positions: Tensor) -> Tensor:
    return pad(positions.diff() <= 0, (1, 0)).cumsum(-1)


def shards(positions: Tensor) -> tuple[Tensor, ...]:
    return positions.chunk(SHARDS, -1)


class LocalLengths(Sharded):
    """A document that goes on in the next shard begins anew there: its earlier keys are lost."""

    def documents(self, call: Call) -> Tensor:
        seen = super().documents(call)
        if call.position_ids is None or seen.shape[-1] % SHARDS:
            return seen
        rank = torch.arange(seen.shape[-1]) // (seen.shape[-1] // SHARDS)
        return seen & (rank[:, None] == rank)


class FirstOffset(Sharded):
    """Counts of owners begin at 0 on each rank, and keys are numbered over all."""

    def owners(self, positions: Tensor) -> Tensor:
        return torch.cat([owners(shard) for shard in shards(positions)], -1)


class ByZeros(Sharded):
    """On later ranks only a position of 0 after the first token begins a document: a seam at the edge is lost."""

    def documents(self, call: Call) -> Tensor:
        seen = super().documents(call)
        if call.position_ids is None or seen.shape[-1] % SHARDS:
            return seen
        positions = self.positions(call)
        starts = pad(positions.diff() <= 0, (1, 0))
        starts[:, positions.shape[1] // SHARDS] = False
        owner = starts.cumsum(-1)
        return (owner[:, :, None] == owner[:, None])[:, None]


class Divided(Sharded):
    """Cumulative lengths are divided by the number of ranks, as if each had its share of every document."""

    def owners(self, positions: Tensor) -> Tensor:
        ends = torch.arange(positions.shape[1])
        return owners(positions)[:, ends // SHARDS * SHARDS]


def case(report: str, fault: str, model: Any, proof: Proof, tokens: int, words: tuple[str, ...] = ()) -> Case:
    return Case(
        report,
        "shards",
        fault,
        ("packing",),
        words or ("document", "differs"),
        tokens,
        lambda: {"model": model(), "pack": widened, "causal": True},
        lambda: {"model": Sharded(), "pack": widened, "causal": True},
        proof,
    )


ONE_LONG = [[7, 11, 13, 17], [19, 23]]
CASES = (
    case(
        "PrimeIntellect-ai/prime-rl#2392",
        "a document that goes on in the next shard is a new one there",
        LocalLengths,
        Proof(frozenset({(0, 3, 0), (0, 3, 1), (0, 3, 2)}), documents=ONE_LONG, path="pack"),
        4,
    ),
    case(
        "planted",
        "owners of queries are numbered on each rank, owners of keys over all",
        FirstOffset,
        Proof(
            frozenset((0, query, key) for query in (3, 4, 5) for key in range(query)),
            documents=[[7, 11], [13, 17, 19, 23]],
            path="pack",
        ),
        4,
        ("attends to document",),
    ),
    case(
        "planted",
        "a seam at a shard's edge is lost",
        ByZeros,
        Proof(
            frozenset((0, query, key) for query in (2, 3) for key in (0, 1)), documents=[[7, 11], [13, 17]], path="pack"
        ),
        2,
        ("attends to document",),
    ),
    case(
        "planted",
        "cumulative lengths are divided by the number of ranks",
        Divided,
        Proof(frozenset({(0, 3, 0), (0, 3, 1), (0, 3, 2)}), documents=[[7, 11, 13], [17, 19, 23]], path="pack"),
        2,
        ("attends to document",),
    ),
)

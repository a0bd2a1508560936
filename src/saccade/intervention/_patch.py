"""Edits that put something of another run in: `Patch`, and `Freeze`, which is one of them.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, Ls rows of the source's call, D / Dv widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .._biases import TensorBias
from .._call import AttentionCall
from ..monitoring import CallSite, KeptCall, Observations
from ._choice import Choice, indices
from ._edit import Chosen, Edit, Heads, Part, Stage, split
from ._edits import with_heads

WHAT = ("output", "weights", "query", "key", "value")


class _Places(NamedTuple):
    """Rows (or keys) of a call, and those of the source's call that go there; None: all, in order."""

    here: list[int] | None
    there: list[int] | None


@dataclass(frozen=True, eq=False)
class Patch(Edit):
    """Heads that compute with something of another run of the same model (Vig et al. 2020; Meng et al. 2022).

    Args:
        heads: query heads, from 0; an int, ints, or None for all. "key" and "value" of a head are those of its group.
        source: the other run: `with saccade.watch(model, keep=True) as source: model(...)`, or such a watch read from
            a file. What it keeps has no graph: gradients do not reach it.
        what: "output" before the output projection; "weights", with the values of this run; "query", "key" or
            "value" as the operator gets them (after rotary positions).
        positions: token positions, from 0, that are patched: rows, and keys for "key" and "value". They count along
            the sequence also where a cache has its beginning. None: all, and the two runs must have equal lengths; with
            positions they may differ, and the caller says that the same number means the same place in both.
        items: items of the batch, from 0; an int, ints, or None for all.

    Raises:
        TypeError: source is no watch. ValueError: another word, a source that kept nothing; when used, a call that
            the source lacks, another batch, length, width or number of heads.
    """

    heads: Heads
    source: Observations
    what: str = "output"
    positions: Heads = None
    items: Heads = field(default=None, kw_only=True)
    _read: dict[str, tuple[int, int]] = field(default_factory=dict, init=False, repr=False)  # first row, and the next
    _next: set[str] = field(default_factory=set, init=False, repr=False)  # calls that begin

    def __post_init__(self) -> None:
        if not isinstance(self.source, Observations):
            raise TypeError(
                f"source must be what `with saccade.watch(model, keep=True) as source` gives, got "
                f"{type(self.source).__name__}"
            )
        if self.what not in WHAT:
            raise ValueError(f"what must be one of {', '.join(WHAT)}; got {self.what!r}")
        if not self.source.kept:
            raise ValueError("source has kept no call: watch the other run with saccade.watch(model, keep=True)")
        for name in ("heads", "positions", "items"):
            object.__setattr__(self, name, indices(getattr(self, name), name))
        object.__setattr__(self, "choice", Choice(self.heads, self.items))  # type: ignore[arg-type]

    @property
    def stage(self) -> Stage:
        stages = {"weights": Stage.WEIGHTS, "output": Stage.OUTPUT, "value": Stage.VALUES}
        return stages.get(self.what, Stage.PRODUCTS)

    def parts(self, part: Part, site: CallSite) -> list[Part]:
        if self.what == "weights":
            return self._with_weights(part, site)
        if self.what == "output":
            return [part]
        if self.what == "query":
            query = self._patched(part.call.query, part.call, site, self.choice.heads_of(part.call))
            return [replace(part, call=replace(part.call, query=query))]
        if self._whole_groups(part.call):
            return [replace(part, call=self._with_groups(part.call, site))]
        return split(part, self.choice.share(part.call), lambda call: self._with_groups(call, site))

    def weights(self, weights: Tensor, chosen: Chosen, call: AttentionCall, site: CallSite) -> Tensor:
        heads = [head for head in self.choice.heads_of(call) if head in chosen.heads]
        if self.what != "weights" or not heads:
            return weights
        kept = self._kept(call, site)
        places = self._places(call, kept, "rows", site)
        every = range(call.query.shape[2])
        here, there = (every if rows is None else rows for rows in places)
        source_row = dict(zip(here, there, strict=True))
        patched = [(n, source_row[row]) for n, row in enumerate(chosen.rows.tolist()) if row in source_row]
        if not patched:
            return weights
        if kept.key.shape[2] != weights.shape[-1]:
            raise ValueError(_lengths_differ(site, kept, call))
        at = [chosen.heads.index(head) for head in heads]
        found = kept.weights(heads, [row for _, row in patched]).to(weights.dtype)
        found = weights[:, at].index_copy(2, _indices([n for n, _ in patched], weights), found)
        return with_heads(weights, at, found, self.choice.share(call)[:, chosen.heads])

    def replaced(self, call: AttentionCall, site: CallSite) -> Tensor | None:
        whole = self.what == "output" and self._places(call, self._kept(call, site), "rows", site).here is None
        return self.choice.share(call) if whole else None

    def output(self, out: Tensor, call: AttentionCall, site: CallSite) -> Tensor:
        return self._patched(out, call, site, self.choice.heads_of(call)) if self.what == "output" else out

    def _patched(self, own: Tensor, call: AttentionCall, site: CallSite, heads: list[int]) -> Tensor:
        """query, key, value or output (B, H, L, .) with the source's in `heads` of its own."""
        kept = self._kept(call, site)
        name = "out" if self.what == "output" else self.what
        other: Tensor | None = getattr(kept, name)
        if other is None:
            raise ValueError(f"source: it was written by a version that did not keep {self.what}; watch the run again")
        if other.shape[:2] != own.shape[:2] or other.shape[3] != own.shape[3]:
            raise ValueError(
                f"source: {self.what} of {site.name} is {tuple(other.shape)}, here {tuple(own.shape)}: another model"
            )
        places = self._places(call, kept, "keys" if self.what in ("key", "value") else "rows", site)
        found = other[:, heads].to(own)
        if places.here is not None:
            assert places.there is not None
            given = found[:, :, places.there]
            found = own[:, heads].index_copy(2, _indices(places.here, own), given)
        return _laid_out_as(own, with_heads(own, heads, found, self._share_of(own, call)))

    def _share_of(self, tensor: Tensor, call: AttentionCall) -> Tensor:
        """(B or 1, H, 1, 1): the items, for a tensor with other heads than the query."""
        share = self.choice.share(call)
        return (
            share if tensor.shape[1] == share.shape[1] else share.any(1, keepdim=True).expand(-1, tensor.shape[1], 1, 1)
        )

    def _whole_groups(self, call: AttentionCall) -> bool:
        """Whether all query heads of a key head are chosen, or none."""
        group = call.query.shape[1] // call.key.shape[1]
        heads = self.choice.heads_of(call)
        return len({head // group for head in heads}) * group == len(heads)

    def _with_groups(self, call: AttentionCall, site: CallSite) -> AttentionCall:
        """The key heads (or value heads) of the chosen query heads, patched."""
        group = call.query.shape[1] // call.key.shape[1]
        heads = sorted({head // group for head in self.choice.heads_of(call)})
        if self.what == "key":
            return replace(call, key=self._patched(call.key, call, site, heads))
        return replace(call, value=self._patched(call.value, call, site, heads))

    def _with_weights(self, part: Part, site: CallSite) -> list[Part]:
        kept = self._kept(part.call, site)
        places = self._places(part.call, kept, "rows", site)
        share = self.choice.share(part.call)
        if places.here is not None:
            marks = torch.zeros(part.call.query.shape[2], dtype=torch.bool, device=share.device)
            marks[places.here] = True
            share = share & marks[None, None, :, None]
        if not bool(share.any()):  # a step of decoding, after the tokens of the source
            return [part]
        if kept.key.shape[2] != part.call.key.shape[2]:
            raise ValueError(_lengths_differ(site, kept, part.call))

        def change(call: AttentionCall) -> AttentionCall:
            query = kept.query.to(call.query)
            if query.shape[2] != call.query.shape[2]:  # a cache has the beginning of the sequence
                assert places.here is not None and places.there is not None
                query = query.new_zeros(call.query.shape).index_copy(
                    2, _indices(places.here, query), query[:, :, places.there]
                )
            return AttentionCall(
                query,
                kept.key.to(call.key),
                call.value,
                kept.mask,
                kept.bias.parameter if isinstance(kept.bias, TensorBias) else kept.bias,
                kept.scale,
                kept.softcap,
                kept.sink,
                call.dropout,
                call.real,
            )

        return split(part, share, change)

    def _kept(self, call: AttentionCall, site: CallSite) -> KeptCall:
        found = self.source.kept.get(site.name)
        if found is None:
            names = ", ".join(self.source.kept)
            raise ValueError(f"source: it has no call {site.name}; it is of another model, or kept only: {names}")
        if found.query.shape[:2] != call.query.shape[:2]:
            raise ValueError(
                f"source: {site.name} has {_items_and_heads(found.query)} there and {_items_and_heads(call.query)} here"
            )
        return found if found.query.device == call.query.device else found.to(call.query.device)

    def at(self, site: CallSite) -> Edit:
        self._next.add(site.name)
        return self

    def _first_row(self, site: CallSite, rows: int, keys: int) -> int:
        """The position of row 0 of this call. A cache of a window holds fewer keys than there were tokens: these are
        counted from the call that had as many rows as keys, which begins a text."""
        if site.name in self._next:
            self._next.discard(site.name)
            first = 0 if rows == keys else self._read.get(site.name, (0, keys - rows))[1]
            self._read[site.name] = first, first + rows
        return self._read.get(site.name, (keys - rows, keys))[0]

    def _places(self, call: AttentionCall, kept: KeptCall, axis: str, site: CallSite) -> _Places:
        """The rows or keys that are patched. ValueError where lengths differ and no positions are given."""
        rows, keys = call.query.shape[2], call.key.shape[2]
        of_keys = axis == "keys"
        here, there = (keys, kept.key.shape[2]) if of_keys else (rows, kept.query.shape[2])
        square = kept.query.shape[2] == kept.key.shape[2]
        first = self._first_row(site, rows, keys) if square and keys >= rows else 0
        cached = square and (first > 0 or rows < keys)
        if of_keys:
            first += (rows - keys) if square and keys >= rows else 0  # the position of key 0: a window drops the first
        if self.positions is None:
            if here == there and not first:
                return _Places(None, None)
            if cached:  # decoding after the source's tokens
                shared = [n for n in range(here) if n + first < there]
                return _Places(shared, [n + first for n in shared])
            raise ValueError(_lengths_differ(site, kept, call))
        beyond = [p for p in self.positions if p >= there]  # type: ignore[union-attr]
        if beyond:
            raise ValueError(f"positions: the source has {there} {axis} in {site.name}, got {beyond[0]}")
        chosen = [p for p in self.positions if 0 <= p - first < here]  # type: ignore[union-attr]
        if not (first or cached) and len(chosen) < len(self.positions):  # type: ignore[arg-type]
            raise ValueError(f"positions: {site.name} has {here} {axis}, got {max(self.positions)}")  # type: ignore[arg-type]
        return _Places([p - first for p in chosen], chosen)


def Freeze(heads: Heads, source: Observations, *, items: Heads = None) -> Patch:
    """The weights of a clean run and the values of this one: what reaches the output goes through values alone.

    The same as `Patch(heads, source, "weights")` (Elhage et al., "A Mathematical Framework for Transformer Circuits",
    2021, freezing attention patterns).
    """
    return Patch(heads, source, "weights", items=items)


def _indices(given: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(list(given), dtype=torch.int64, device=like.device)


def _laid_out_as(own: Tensor, new: Tensor) -> Tensor:
    """`new` with the strides of `own`: of tensors that lie otherwise, kernels round otherwise."""
    if new.stride() == own.stride() or 0 in own.stride():
        return new
    return torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=own.device).copy_(new)


def _items_and_heads(query: Tensor) -> str:
    return f"{query.shape[0]} items and {query.shape[1]} heads"


def _lengths_differ(site: CallSite, kept: KeptCall, call: AttentionCall) -> str:
    return (
        f"source: {site.name} has {kept.query.shape[2]} queries and {kept.key.shape[2]} keys there, "
        f"{call.query.shape[2]} and {call.key.shape[2]} here; texts of other tokens are patched by positions=[...], "
        "where the same number must mean the same place in both"
    )

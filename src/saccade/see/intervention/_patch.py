"""Edits that insert tensors of another run: `Patch`, and `Freeze`, a special case.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, Ls rows of the source's call, D / Dv widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...operator._biases import TensorBias
from ...operator._call import AttentionCall
from ..monitoring import CallSite, KeptCall, Observations
from ._choice import Choice, indices
from ._edit import CallPart, CallPlace, Chosen, Edit, Heads, Stage, split
from ._edits import with_heads

WHAT = ("output", "weights", "query", "key", "value")


class _Places(NamedTuple):
    """Rows (or keys) of a call, and the rows of the source's call that replace them; None means all rows, in order."""

    here: list[int] | None
    there: list[int] | None


@dataclass(frozen=True, eq=False)
class Patch(Edit):
    """Heads that compute with a tensor from another run of the same model (Vig et al. 2020; Meng et al. 2022).

    Args:
        heads: query heads, from 0; an int, ints, or None for all. "key" and "value" of a head are those of its group.
        source: the other run: `with saccade.watch(model, keep=True) as source: model(...)`, or such a watch read from
            a file. Its tensors have no graph: gradients do not reach them.
        what: "output" before the output projection; "weights", with the values of this run; "query", "key" or
            "value" as the operator receives them (after rotary positions).
        positions: token positions, from 0, that are patched: rows, and keys for "key" and "value". They count along
            the sequence, also with a cache, from the first call of the block with equally many rows and keys; a cache
            filled outside of the block is assumed to hold all earlier tokens. A position may be reached in a later
            call. None: all, and the two runs must have equal lengths; with positions lengths may differ, and a number
            must mean the same place in both runs.
        items: items of the batch, from 0; an int, ints, or None for all.

    Raises:
        TypeError: source is not a watch. ValueError: an unknown `what`, a source that kept nothing; when used, a call
            that the source lacks, another batch, length, width or number of heads; when the block ends, a position
            beyond all texts of the block.

    Example:
        >>> import torch, saccade
        >>> model = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4))
        >>> clean, corrupted = torch.randn(2, 1, 5, 16)
        >>> with torch.no_grad(), saccade.watch(model, keep=True) as source:
        ...     expected = model(clean)
        >>> with torch.no_grad(), saccade.intervene(model, {0: saccade.intervention.Patch(None, source)}):
        ...     out = model(corrupted)
        >>> torch.allclose(out, expected, atol=1e-6)  # all heads give the outputs of the clean run
        True
    """

    heads: Heads
    source: Observations
    what: str = "output"
    positions: Heads = None
    items: Heads = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.source, Observations):
            raise TypeError(
                f"source must be the result of `with saccade.watch(model, keep=True) as source`, got "
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
    def _stage(self) -> Stage:
        stages = {"weights": Stage.WEIGHTS, "output": Stage.OUTPUT, "value": Stage.VALUES}
        return stages.get(self.what, Stage.PRODUCTS)

    def _parts(self, part: CallPart, place: CallPlace) -> list[CallPart]:
        if self.what == "weights":
            return self._with_weights(part, place)
        if self.what == "output":
            return [part]
        if self.what == "query":
            query = self._patched(part.call.query, part.call, place, self.choice.heads_of(part.call))
            return [replace(part, call=replace(part.call, query=query))]
        if self._whole_groups(part.call):
            return [replace(part, call=self._with_groups(part.call, place))]
        return split(part, self.choice.covered(part.call), lambda call: self._with_groups(call, place))

    def _weights(self, weights: Tensor, chosen: Chosen, call: AttentionCall, place: CallPlace) -> Tensor:
        heads = [head for head in self.choice.heads_of(call) if head in chosen.heads]
        if self.what != "weights" or not heads:
            return weights
        kept = self._kept(call, place)
        places = self._places(call, kept, "rows", place)
        every = range(call.query.shape[2])
        here, there = (every if rows is None else rows for rows in places)
        source_row = dict(zip(here, there, strict=True))
        patched = [(n, source_row[row]) for n, row in enumerate(chosen.rows.tolist()) if row in source_row]
        if not patched:
            return weights
        if kept.key.shape[2] != weights.shape[-1]:
            raise ValueError(_lengths_differ(place, kept, call))
        at = [chosen.heads.index(head) for head in heads]
        new = kept.weights(heads, [row for _, row in patched]).to(weights.dtype)
        new = weights[:, at].index_copy(2, _indices([n for n, _ in patched], weights), new)
        return with_heads(weights, at, new, self.choice.covered(call)[:, chosen.heads])

    def _replaced(self, call: AttentionCall, place: CallPlace) -> Tensor | None:
        whole = self.what == "output" and self._places(call, self._kept(call, place), "rows", place).here is None
        return self.choice.covered(call) if whole else None

    def _output(self, out: Tensor, call: AttentionCall, place: CallPlace) -> Tensor:
        return self._patched(out, call, place, self.choice.heads_of(call)) if self.what == "output" else out

    def _patched(self, own: Tensor, call: AttentionCall, place: CallPlace, heads: list[int]) -> Tensor:
        """query, key, value or output (B, H, L, .) with the source's values in `heads`."""
        kept = self._kept(call, place)
        name = "out" if self.what == "output" else self.what
        other: Tensor | None = getattr(kept, name)
        if other is None:
            raise ValueError(f"source: {self.what} is missing, as in files of old versions; watch the run again")
        if other.shape[:2] != own.shape[:2] or other.shape[3] != own.shape[3]:
            raise ValueError(
                f"source: {self.what} of {place.name} is {tuple(other.shape)}, here {tuple(own.shape)}: another model"
            )
        places = self._places(call, kept, "keys" if self.what in ("key", "value") else "rows", place)
        new = other[:, heads].to(own)
        if places.here is not None:
            assert places.there is not None
            rows_of_source = new[:, :, places.there]
            new = own[:, heads].index_copy(2, _indices(places.here, own), rows_of_source)
        return _laid_out_as(own, with_heads(own, heads, new, self._share_of(own, call)))

    def _share_of(self, tensor: Tensor, call: AttentionCall) -> Tensor:
        """(B or 1, H, 1, 1): the chosen items, for a tensor with another number of heads than the query."""
        covered = self.choice.covered(call)
        return (
            covered
            if tensor.shape[1] == covered.shape[1]
            else covered.any(1, keepdim=True).expand(-1, tensor.shape[1], 1, 1)
        )

    def _whole_groups(self, call: AttentionCall) -> bool:
        """Whether all query heads of a key head are chosen, or none are."""
        group = call.query.shape[1] // call.key.shape[1]
        heads = self.choice.heads_of(call)
        return len({head // group for head in heads}) * group == len(heads)

    def _with_groups(self, call: AttentionCall, place: CallPlace) -> AttentionCall:
        """The key heads (or value heads) of the chosen query heads, patched."""
        group = call.query.shape[1] // call.key.shape[1]
        heads = sorted({head // group for head in self.choice.heads_of(call)})
        if self.what == "key":
            return replace(call, key=self._patched(call.key, call, place, heads))
        return replace(call, value=self._patched(call.value, call, place, heads))

    def _with_weights(self, part: CallPart, place: CallPlace) -> list[CallPart]:
        kept = self._kept(part.call, place)
        places = self._places(part.call, kept, "rows", place)
        covered = self.choice.covered(part.call)
        if places.here is not None:
            marks = torch.zeros(part.call.query.shape[2], dtype=torch.bool, device=covered.device)
            marks[places.here] = True
            covered = covered & marks[None, None, :, None]
        if not bool(covered.any()):  # a decoding step after the tokens of the source
            return [part]
        if kept.key.shape[2] != part.call.key.shape[2]:
            raise ValueError(_lengths_differ(place, kept, part.call))

        def change(call: AttentionCall) -> AttentionCall:
            query = kept.query.to(call.query)
            if query.shape[2] != call.query.shape[2]:  # the beginning of the sequence is in a cache
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

        return split(part, covered, change)

    def _kept(self, call: AttentionCall, place: CallPlace) -> KeptCall:
        kept = self.source.kept.get(place.name)
        if kept is None:
            names = ", ".join(self.source.kept)
            raise ValueError(f"source: it has no call {place.name}; it is of another model, or kept only: {names}")
        if kept.query.shape[:2] != call.query.shape[:2]:
            raise ValueError(
                f"source: {place.name} has {_items_and_heads(kept.query)} there and {_items_and_heads(call.query)} here"
            )
        return kept if kept.query.device == call.query.device else kept.to(call.query.device)

    def _places(self, call: AttentionCall, kept: KeptCall, axis: str, place: CallPlace) -> _Places:
        """The patched rows or keys. ValueError if lengths differ and no positions are given."""
        rows, keys = call.query.shape[2], call.key.shape[2]
        here, there = (keys, kept.key.shape[2]) if axis == "keys" else (rows, kept.query.shape[2])
        within_one = _within_one(kept) and keys >= rows
        first = place.first_row if within_one else 0
        if axis == "keys" and within_one:
            first += rows - keys  # the position of key 0: a window has dropped earlier keys
        if self.positions is None:
            if here == there and not first:
                return _Places(None, None)
            if within_one and keys > rows:  # decoding after the source's tokens
                shared = [n for n in range(here) if n + first < there]
                return _Places(shared, [n + first for n in shared])
            raise ValueError(_lengths_differ(place, kept, call))
        beyond = [p for p in self.positions if p >= there]  # type: ignore[union-attr]
        if beyond:
            raise ValueError(f"positions: the source has {there} {axis} in {place.name}, got {beyond[0]}")
        chosen = [p for p in self.positions if 0 <= p - first < here]  # type: ignore[union-attr]
        lost = None if within_one else self._beyond(place.site, here)
        if lost is not None:
            raise ValueError(lost)
        return _Places([p - first for p in chosen], chosen)

    def _unreached(self, site: CallSite, end: int) -> str | None:
        kept = self.source.kept.get(site.name)
        return self._beyond(site, end) if kept is not None and _within_one(kept) else None

    def _beyond(self, site: CallSite, end: int) -> str | None:
        last = max(self.positions or (), default=-1)  # type: ignore[arg-type]
        axis = "keys" if self.what in ("key", "value") else "rows"
        return f"positions: {site.name} has {end} {axis}, got {last}" if last >= end else None


def Freeze(heads: Heads, source: Observations, *, items: Heads = None) -> Patch:
    """Freeze the weights: heads attend as in another run, with the values of this run.

    Equal to `Patch(heads, source, "weights")` (Elhage et al., "A Mathematical Framework for Transformer Circuits",
    2021, freezing attention patterns).

    Example:
        >>> import torch, saccade
        >>> model = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4))
        >>> clean, corrupted = torch.randn(2, 1, 5, 16)
        >>> with torch.no_grad(), saccade.watch(model, keep=True) as source:
        ...     _ = model(clean)
        >>> with torch.no_grad(), saccade.intervene(model, {0: saccade.intervention.Freeze([0, 1], source)}) as run:
        ...     out = model(corrupted)
        >>> out.shape, run.unobserved
        (torch.Size([1, 5, 16]), {})
    """
    return Patch(heads, source, "weights", items=items)


def _within_one(kept: KeptCall) -> bool:
    """Whether queries and keys are from one sequence, so that a cache may hold its beginning."""
    return kept.query.shape[2] == kept.key.shape[2]


def _indices(given: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(list(given), dtype=torch.int64, device=like.device)


def _laid_out_as(own: Tensor, new: Tensor) -> Tensor:
    """`new` with the strides of `own`: kernels round differently for other strides."""
    if new.stride() == own.stride() or 0 in own.stride():
        return new
    return torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=own.device).copy_(new)


def _items_and_heads(query: Tensor) -> str:
    return f"{query.shape[0]} items and {query.shape[1]} heads"


def _lengths_differ(place: CallPlace, kept: KeptCall, call: AttentionCall) -> str:
    return (
        f"source: {place.name} has {kept.query.shape[2]} queries and {kept.key.shape[2]} keys there, "
        f"{call.query.shape[2]} and {call.key.shape[2]} here; different lengths need positions=[...], where a number "
        "means the same place in both"
    )

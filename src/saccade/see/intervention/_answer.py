"""How a call with edits is computed, and the call that observers receive.

Heads whose output is unused are hidden by a mask, and Saccade's kernels skip them.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D / Dv widths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...operator._attention import attention
from ...operator._backends.native import _kernels
from ...operator._call import AttentionCall
from ...operator._masks import as_mask
from ...operator._observers import DenseWeights, EditedOutput
from ...operator._weights import attention_weights
from ..monitoring import CallSite
from ..monitoring.calls._padded import HIDDEN
from ..monitoring.calls._thread import not_shown, with_rows
from ._choice import hiding
from ._edit import CallPart, CallPlace, Chosen, Edit, Stage, together
from ._edits import FORWARD_ONLY
from ._tiles_of_weights import TileValues, WeightTiles, tiles_of_rows

SEVERAL = "heads of one call were edited differently, so no single call describes it: no statistics"

Compute = Callable[[AttentionCall], Tensor]


class EditsOfCall:
    """The edits of one call, by stage. Each edit has its place in the call, in the row numbers of its own block."""

    def __init__(self, blocks: tuple[BlockEdits, ...]) -> None:
        self._blocks, self._source = blocks, blocks[0].site.source
        self._edits: tuple[tuple[Edit, CallPlace], ...] = ()

    def answered(self, call: AttentionCall, compute: Compute) -> EditedOutput:
        self._place(call)
        call = with_rows(call, self._source)
        parts, unused = self._parts(call), self._replaced(call)
        tiled = self._tiled(call, unused)
        if tiled is not None:
            unused = tiled if unused is None else unused | tiled
        out = together(parts, _every_head(call), lambda part: _computed(part, unused, compute))
        if tiled is not None:
            out = self._by_functions(call, tiled, out)
        return EditedOutput(
            self._output(out, call),
            self._shown(parts, unused, tiled is not None),
            lambda: dense_weights(call, self._parts(call, Stage.LOGITS), self._edits),
        )

    def weights(self, call: AttentionCall, dense: DenseWeights) -> Tensor:
        self._place(call)
        weights = dense.weights
        everything = Chosen(_every_head(call), torch.arange(weights.shape[2], device=weights.device))
        if any(edit._stage in (Stage.PRODUCTS, Stage.LOGITS) for edit, _ in self._edits):
            parts = self._parts(call, Stage.PRODUCTS)
            logits = together(parts, everything.heads, lambda part: dense.logits(part.call.query, part.call.key))
            before = logits
            for edit, _ in self._edits:
                logits = edit._logits(logits, call)
            sees_key = _sees_key(logits) & (_sees_key(logits, HIDDEN) | ~_sees_key(before, HIDDEN))
            weights = torch.where(sees_key, dense.softmax(torch.where(sees_key, logits, 0.0)), 0.0)
        for edit, place in self._edits:
            weights = edit._weights(weights, everything, call, place)
        return weights

    def output(self, call: AttentionCall, out: Tensor, with_value: Callable[[Tensor], Tensor]) -> EditedOutput:
        if any(edit._stage == Stage.VALUES for edit, _ in self._edits):
            parts = self._parts(call, Stage.VALUES, Stage.VALUES)
            out = together(parts, _every_head(call), lambda part: with_value(part.call.value))
        with torch.no_grad():
            shown = self._shown(self._parts(call), None, self._heads_by_function(call) is not None)
        return EditedOutput(self._output(out, call), shown)

    def _shown(self, parts: list[CallPart], unused: Tensor | None, by_functions: bool) -> AttentionCall | None:
        """The call that observers receive; None, and counted as unobserved, if no single call describes it."""
        if by_functions or len(parts) > 1:
            not_shown(self._source, SEVERAL)
            return None
        hidden = _hidden(parts[0], unused)
        return parts[0].call if hidden is None else hidden

    def _parts(self, call: AttentionCall, last: Stage = Stage.OUTPUT, first: Stage = Stage.PRODUCTS) -> list[CallPart]:
        """The parts of the call after the edits of some stages, without those of `Weights`."""
        parts = [CallPart(call, torch.ones(1, 1, 1, 1, dtype=torch.bool, device=call.query.device))]
        for edit, place in self._edits:
            if first <= edit._stage <= last:
                parts = [new for part in parts for new in edit._parts(part, place)]
        return parts

    def _heads_by_function(self, call: AttentionCall) -> Tensor | None:
        """(B or 1, Hq, 1, 1) bool: heads of which an edit computes some weights by a function; None if there are
        none."""
        covered = [edit.choice.covered(call) for edit, _ in self._edits if edit._by_function]
        return functools.reduce(torch.logical_or, covered) if covered else None

    def _tiled(self, call: AttentionCall, unused: Tensor | None) -> Tensor | None:
        """(B or 1, Hq, 1, 1) bool: heads whose weights must be computed for a function, and are used; None if there are
        none."""
        heads = self._heads_by_function(call)
        if heads is not None and unused is not None:
            heads = heads & ~unused
        return heads if heads is not None and bool(heads.any()) else None

    def _by_functions(self, call: AttentionCall, tiled: Tensor, out: Tensor) -> Tensor:
        """`out` with the heads of `tiled`, whose weights are computed in tiles of rows and changed by functions."""
        heads = tiled.any(0)[:, 0, 0].nonzero()[:, 0]
        chosen, parts = heads.tolist(), self._parts(call, Stage.LOGITS)
        tiles = {id(part): WeightTiles(part.call, chosen) for part in parts}
        if any(edits.differentiable for edits in tiles.values()):
            raise ValueError(FORWARD_ONLY)
        of_key = heads // (call.query.shape[1] // call.key.shape[1])
        own = together(parts, chosen, lambda part: part.call.value[:, of_key])
        values, edited = TileValues(own, all(edits.native for edits in tiles.values())), out[:, heads]
        for first, last in tiles_of_rows(call, chosen):
            rows = torch.arange(first, last, device=out.device)
            weights = together(parts, chosen, lambda part: tiles[id(part)].rows(first, last), rows)  # noqa: B023
            for edit, place in self._edits:
                weights = edit._weights(weights, Chosen(chosen, rows), call, place)
            edited[:, :, first:last] = values.times(weights)
            del weights  # its memory is the next tile's, if no function has kept it
        return out.index_copy(1, heads, torch.where(tiled[:, heads], edited, out[:, heads]))

    def _place(self, call: AttentionCall) -> None:
        """Count the rows of the call. ValueError if it has no such heads or items."""
        placed = (edit for block in self._blocks for edit in block.placed(call))
        self._edits = tuple(sorted(placed, key=lambda edit: edit[0]._stage))
        for edit, place in self._edits:
            edit.choice.check(call, place.name)

    def _replaced(self, call: AttentionCall) -> Tensor | None:
        """(B or 1, Hq, 1, 1) bool: heads whose output is unused, also by edits that read other items before."""
        unused: Tensor | None = None
        for edit, place in self._edits:
            if edit._reads_other_items:
                break
            replaced = edit._replaced(call, place)
            if replaced is not None:
                unused = replaced if unused is None else unused | replaced
        return unused

    def _output(self, out: Tensor, call: AttentionCall) -> Tensor:
        for edit, place in self._edits:
            out = edit._output(out, call, place)
        return out


def _every_head(call: AttentionCall) -> list[int]:
    return list(range(call.query.shape[1]))


def _sees_key(logits: Tensor, above: float = float("-inf")) -> Tensor:
    """(B, Hq, Lq, 1) bool: rows that see a key. A mask of -1e9 hides keys too: rows with only such logits see none."""
    return (logits > above).any(-1, keepdim=True)


def _hidden(part: CallPart, unused: Tensor | None) -> AttentionCall | None:
    """The part's call with a mask on unused heads; None if all are used."""
    used = part.covered.any(2, keepdim=True)
    if unused is not None:
        used = used & ~unused
    mask = hiding(~used.expand(-1, part.call.query.shape[1], -1, -1), part.call.key.shape[2])
    if mask is None:
        return None
    own = as_mask(part.call.mask)
    return replace(part.call, mask=mask if own is None else own & mask)


def _computed(part: CallPart, unused: Tensor | None, compute: Compute) -> Tensor:
    """The output of a part, (B, Hq, Lq, Dv); it is used only where the part covers it."""
    hidden = _hidden(part, unused)
    query, value = part.call.query, part.call.value
    if hidden is not None and not bool((part.covered if unused is None else part.covered & ~unused).any()):
        return query.new_zeros(*query.shape[:3], value.shape[3])
    if hidden is not None and _native(part.call):
        return attention(hidden.query, hidden.key, hidden.value, **hidden.arguments())
    return compute(part.call)


def _native(call: AttentionCall) -> bool:
    """Whether kernels run that skip hidden heads."""
    return _kernels.module is not None and call.query.device.type == "cpu" and call.query.dtype in _kernels.TYPES


def dense_weights(call: AttentionCall, parts: Sequence[CallPart], edits: Sequence[tuple[Edit, CallPlace]]) -> Tensor:
    """(B, Hq, Lq, Lk) of a call whose logits come from `parts`, with the edits of weights but not those of outputs."""
    everything = Chosen(list(range(call.query.shape[1])), torch.arange(call.query.shape[2], device=call.query.device))
    weights = together(
        parts,
        everything.heads,
        lambda part: attention_weights(part.call.query, part.call.key, **part.call.scoring()),
    )
    for edit, place in edits:
        weights = edit._weights(weights, everything, call, place)
    return weights


@dataclass
class RowCounts:
    """The positions that the calls of a block have reached, by call name.

    Attributes:
        ends: one more than the last position of any call of this name.
    """

    ends: dict[str, int] = field(default_factory=dict)
    _next: dict[str, int] = field(default_factory=dict)  # next position of a text that began in the block

    def first_row(self, name: str, rows: int, keys: int) -> int:
        """The position of row 0 of the current call.

        A window cache holds fewer keys than there were tokens, so rows are counted from the call with equally many rows
        and keys, which begins a text. A cache filled outside of the block is assumed to hold all tokens.
        """
        cached = keys - rows
        first = self._next.pop(name, None) if cached else 0
        if first is None or first < cached:
            first = cached
        else:
            self._next[name] = first + rows
        self.ends[name] = max(self.ends.get(name, 0), first + rows)
        return first

    def copy(self) -> RowCounts:
        return RowCounts(self.ends.copy(), self._next.copy())


class BlockEdits(NamedTuple):
    """The edits of one block for the current call."""

    edits: tuple[Edit, ...]
    site: CallSite
    rows: RowCounts

    def placed(self, call: AttentionCall) -> list[tuple[Edit, CallPlace]]:
        """The edits with the place of the call; counts its rows, so once for each call."""
        first = self.rows.first_row(self.site.name, call.query.shape[2], call.key.shape[2])
        return [(edit, CallPlace(self.site, first)) for edit in self.edits]

"""One call with its edits: who computes which part of it, and what is told of it.

Heads of which nothing is used are hidden by a mask, and Saccade's kernels do not visit them.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D / Dv widths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .._attention import attention
from .._backends.native import _kernels
from .._call import AttentionCall
from .._masks import as_mask
from .._tap import DenseWeights, EditedOutput
from ..monitoring import CallSite
from ..monitoring.calls._thread import not_shown
from ._choice import hiding
from ._edit import Edit, Part
from ._tiles_of_weights import output_of_functions

Compute = Callable[[AttentionCall], Tensor]


class EditsOfCall:
    """The edits of one call, in their order, each with the place of the call as its own block counts it."""

    def __init__(self, edits: tuple[tuple[Edit, CallSite], ...]) -> None:
        self._edits = edits

    def answered(self, call: AttentionCall, compute: Compute) -> EditedOutput:
        self._check(call)
        parts = [Part(call, torch.ones(1, 1, 1, 1, dtype=torch.bool, device=call.query.device))]
        for edit, site in self._edits:
            parts = [new for part in parts for new in edit.parts(part, site)]
        unused = self._replaced(call)
        out = None
        for part in parts:
            found = _computed(part, unused, compute)
            out = found if out is None else torch.where(part.share, found, out)
        assert out is not None
        shown = None
        if len(parts) == 1 and not parts[0].functions:
            hidden = _hidden(parts[0], unused)
            shown = parts[0].call if hidden is None else hidden
        else:
            not_shown(self._edits[0][1].source, SEVERAL)
        return EditedOutput(self._output(out, call), shown)

    def weights(self, call: AttentionCall, dense: DenseWeights) -> Tensor:
        self._check(call)
        changed = call
        for edit, site in self._edits:
            changed = edit.tensors(changed, site)
        before = logits = dense.logits(changed.query, changed.key)
        for edit, _ in self._edits:
            logits = edit.logits(logits, changed)
        weights = dense.weights
        if logits is not before or changed.query is not call.query or changed.key is not call.key:
            weights = dense.softmax(logits)
            seen = (logits > float("-inf")).any(-1, keepdim=True)
            weights = torch.where(seen, weights, 0.0)
        for edit, site in self._edits:
            weights = edit.weights(weights, changed, site)
        return weights

    def output(self, call: AttentionCall, out: Tensor, with_value: Callable[[Tensor], Tensor]) -> EditedOutput:
        changed = call
        for edit, site in self._edits:
            changed = edit.values(changed, site)
        if changed.value is not call.value:
            out = with_value(changed.value)
        parts = [Part(call, torch.ones(1, 1, 1, 1, dtype=torch.bool, device=call.query.device))]
        with torch.no_grad():
            for edit, site in self._edits:
                parts = [new for part in parts for new in edit.parts(part, site)]
        shown = parts[0].call if len(parts) == 1 and not parts[0].functions else None
        if shown is None:
            not_shown(self._edits[0][1].source, SEVERAL)
        return EditedOutput(self._output(out, call), shown)

    def _check(self, call: AttentionCall) -> None:
        for edit, site in self._edits:
            edit.choice.check(call, site.name)

    def _replaced(self, call: AttentionCall) -> Tensor | None:
        """(B or 1, Hq, 1, 1) bool: heads of which nothing is used. An edit that reads outputs may read them all."""
        unused: Tensor | None = None
        for edit, site in self._edits:
            share = edit.replaced(call, site)
            if share is not None:
                unused = share if unused is None else unused | share
        return unused

    def _output(self, out: Tensor, call: AttentionCall) -> Tensor:
        for edit, site in self._edits:
            out = edit.output(out, call, site)
        return out


SEVERAL = "an edit of some heads, which no single call says: its statistics are not taken"


def _hidden(part: Part, unused: Tensor | None) -> AttentionCall | None:
    """The part's call with what nobody uses hidden; None where all of it is used."""
    used = part.share.any(2, keepdim=True)
    if unused is not None:
        used = used & ~unused
    mask = hiding(~used.expand(-1, part.call.query.shape[1], -1, -1), part.call.key.shape[2])
    if mask is None:
        return None
    own = as_mask(part.call.mask)
    return replace(part.call, mask=mask if own is None else own & mask)


def _computed(part: Part, unused: Tensor | None, compute: Compute) -> Tensor:
    """(B, Hq, Lq, Dv), of which the part's share is used."""
    hidden = _hidden(part, unused)
    query, value = part.call.query, part.call.value
    if hidden is not None and not bool((part.share if unused is None else part.share & ~unused).any()):
        return query.new_zeros(*query.shape[:3], value.shape[3])
    if part.functions:
        return output_of_functions(part)
    if hidden is not None and _native(part.call):
        return attention(hidden.query, hidden.key, hidden.value, **hidden.arguments())
    return compute(part.call)


def _native(call: AttentionCall) -> bool:
    """Whether kernels run that do not visit what is hidden."""
    return _kernels.module is not None and call.query.device.type == "cpu" and call.query.dtype in _kernels.TYPES

"""Path patching: what a head does by way of other heads' queries, keys or values.

Every other head before the last receiver gives what it gives in the base run, so that a change spreads through feed-
forward layers, norms and the residual stream alone (Wang et al. 2023, section 3.1; Goldowsky-Dill et al. 2023).

Shape legend: B batch, H query heads of a call, L rows, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..intervention import Patch
from ..intervention._edit import Edit
from ..monitoring import watch
from ._patching_result import Receiver
from ._patching_runs import NO_GRADIENT, PatchRuns
from ._runs import GradientProbe, edited, gradients, run_model

KINDS = ("query", "key", "value")  # of a receiver
UNREACHED = "through: nothing that the heads before the receivers give reaches them"


def senders(runs: PatchRuns, receivers: Sequence[Receiver]) -> list[str]:
    """The calls before the last receiver, by name."""
    names = [call.name for call in runs.calls]
    return names[: max(names.index(one.call) for one in receivers)] if receivers else names


def path_change(runs: PatchRuns, receivers: Sequence[Receiver], call: str, head: int) -> float:
    """Change of the metric when the head is patched and only the receivers get the patched value."""
    names = {one.call for one in receivers}
    told = watch(runs.model, layers=lambda site, _: site.name in names, keep=True, alarms=False)
    with told, edited(runs.model, _frozen(runs, receivers), runs.patch(call, head)):
        run_model(runs.model, runs.base.inputs, runs.base.name)
    edits = [{one.call: Patch(list(one.heads), told, one.what)} for one in receivers]
    return float(runs.value(*edits)) - runs.base.metric


def _frozen(runs: PatchRuns, receivers: Sequence[Receiver]) -> dict[str, Edit]:
    """All heads before the last receiver as they are in the base run."""
    return {name: Patch(None, runs.base.seen) for name in senders(runs, receivers)}


def path_first_order(runs: PatchRuns, receivers: Sequence[Receiver]) -> Mapping[str, Tensor]:
    """(H,) by call: the same to first order: the metric's gradient by the receivers, times theirs by the heads."""
    told = {what: {one.call: one.heads for one in receivers if one.what == what} for what in KINDS}
    probes = {what: GradientProbe(what, heads) for what, heads in told.items()}
    with torch.enable_grad():
        value = runs.value(*probes.values())
        zeros = {(what, name): zero for what, probe in probes.items() for name, zero in probe.zeros.items()}
        slopes = gradients(value, zeros, NO_GRADIENT)
        heads, readers = GradientProbe("output"), {what: GradientProbe(what, heads) for what, heads in told.items()}
        runs.value(_frozen(runs, receivers), heads, *readers.values())
        products = [
            (readers[what].seen[name] * slope)[:, told[what][name]].sum() for (what, name), slope in slopes.items()
        ]
        before = {name: heads.zeros[name] for name in senders(runs, receivers)}
        found = gradients(torch.stack(products).sum(), before, UNREACHED)
    return {name: runs.change_by_head(name, gradient) for name, gradient in found.items()}

"""Path patching: the effect of a head by way of other heads' queries, keys or values.

All other heads before the last receiver keep their outputs of the base run, so that a change spreads only through
feed-forward layers, norms and the residual stream (Wang et al. 2023, section 3.1; Goldowsky-Dill et al. 2023).

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
UNREACHED = "through: the receivers do not depend on any head before them"


def senders(runs: PatchRuns, receivers: Sequence[Receiver]) -> list[str]:
    """The calls before the last receiver, by name."""
    names = [call.name for call in runs.calls]
    return names[: max(names.index(receiver.call) for receiver in receivers)] if receivers else names


def path_change(runs: PatchRuns, receivers: Sequence[Receiver], call: str, head: int) -> float:
    """Change of the metric when the head is patched and only the receivers get the patched value."""
    names = {receiver.call for receiver in receivers}
    watching = watch(runs.model, layers=lambda site, _: site.name in names, keep=True, alarms=False)
    with watching, edited(runs.model, _frozen(runs, receivers), runs.patch(call, head)):
        run_model(runs.model, runs.base.inputs, runs.base.name)
    edits = [{each.call: Patch(list(each.heads), watching, each.what)} for each in receivers]
    return float(runs.value(*edits)) - runs.base.metric


def _frozen(runs: PatchRuns, receivers: Sequence[Receiver]) -> dict[str, Edit]:
    """Edits that hold all heads before the last receiver at their outputs of the base run."""
    return {name: Patch(None, runs.base.seen) for name in senders(runs, receivers)}


def path_first_order(runs: PatchRuns, receivers: Sequence[Receiver]) -> Mapping[str, Tensor]:
    """(H,) by call: the same to first order: the metric's gradient by the receivers times theirs by the heads."""
    heads_of = {what: {each.call: each.heads for each in receivers if each.what == what} for what in KINDS}
    probes = {what: GradientProbe(what, heads) for what, heads in heads_of.items()}
    with torch.enable_grad():
        value = runs.value(*probes.values())
        zeros = {(what, name): zero for what, probe in probes.items() for name, zero in probe.zeros.items()}
        slopes = gradients(value, zeros, NO_GRADIENT)
        heads, readers = GradientProbe("output"), {what: GradientProbe(what, heads) for what, heads in heads_of.items()}
        runs.value(_frozen(runs, receivers), heads, *readers.values())
        products = [
            (readers[what].seen[name] * slope)[:, heads_of[what][name]].sum() for (what, name), slope in slopes.items()
        ]
        before = {name: heads.zeros[name] for name in senders(runs, receivers)}
        slopes_of_heads = gradients(torch.stack(products).sum(), before, UNREACHED)
    return {name: runs.change_by_head(name, gradient) for name, gradient in slopes_of_heads.items()}

"""Which heads carry the difference between two inputs: `patching`.

    exact:       run one input with one head's output from the other, and measure again
    gradient:    d metric ~ sum over items, rows, width of (source out - base out) * d metric / d out, at the base run
    path:        the effect of a head by way of other heads' queries, keys or values

Along a path, all other heads before the last receiver keep their outputs of the base run, so that a change spreads only
through feed-forward layers, norms and the residual stream (Wang et al. 2023, section 3.1; Goldowsky-Dill et al. 2023).

Shape legend: B batch, H query heads of a call, L rows, D width, N heads of all calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...operator._masks._data import describe
from ...support._restored import evaluating
from ..intervention import Patch
from ..intervention._choice import indices
from ..intervention._edit import Edit, Heads
from ..intervention._intervene import Layers, fits
from ..monitoring import watch
from ._heads import CallHeads, HeadValues, head_map
from ._patching_batches import changes_in_batches
from ._patching_result import Patching, Receiver
from ._patching_runs import NO_GRADIENT, PatchRuns, exact_change, first_order, watched
from ._runs import GradientProbe, Progress, edited, gradients, run_model

Through = tuple[Layers, Heads, str]
WHAT = ("output", "weights", "query", "key", "value")
BY = ("exact", "gradient")
DIRECTIONS = ("denoising", "noising")
KINDS = ("query", "key", "value")  # of a receiver
UNREACHED = "through: the receivers do not depend on any head before them"


def patching(
    model: nn.Module,
    clean: Any,
    corrupted: Any,
    metric: Callable[[Any], Any],
    *,
    by: str | Sequence[str] = BY,
    what: str = "output",
    direction: str = "denoising",
    positions: Heads = None,
    heads: Mapping[Layers, Heads] | None = None,
    through: Through | Sequence[Through] | None = None,
    progress: Progress | None = None,
) -> Patching:
    """Which heads carry the difference between two inputs: activation patching of each head.

    "exact" (Vig et al. 2020; Meng et al. 2022): the model runs on the corrupted input, once for each head, with the
    output of that head in the clean run. Short inputs run together, as copies in a batch with another head patched in
    each, from the first layer that differs; one by one in models whose items are not independent, and for metrics of
    outputs that are not split by item, such as a loss. "gradient" (attribution patching: Nanda 2023; Syed et al. 2023):
    the same to first order, for all heads in one forward and one backward pass. The result's `agreement` compares both.

        effect = (metric of the patched run - metric of its base) / (metric of the other - metric of the base)

    So 0 is the corrupted input's metric and 1 the clean one's. With `direction="noising"` heads of the clean run get
    the corrupted run's outputs: 0 is clean, 1 is corrupted.

    With `through`, path patching (Wang et al. 2023, section 3.1; Goldowsky-Dill et al. 2023): only the effect by way of
    the receivers' queries, keys or values counts. First, the base runs with the one head patched and the outputs of all
    other heads before the last receiver held at their base values; feed-forward layers and norms are recomputed. Then
    the receivers' queries, keys or values of that run are put into another run of the base, in which everything else is
    recomputed. By gradient: two forward and two backward passes for all heads, in which the receivers' change is also
    taken to first order (edge attribution patching).

    Args:
        model: any PyTorch model. It is run in evaluation mode.
        clean: the model's input: a dict of keyword arguments, a tuple of arguments, one argument, or a function of the
            model that runs one forward and returns the output.
        corrupted: the same, with the same batch size, and the same number of tokens unless `positions` are given.
        metric: `metric(output)` returns a scalar; for "gradient" a tensor with its graph.
        by: "exact", "gradient", or both.
        what: the tensor of a head that is patched: "output", "query", "key", "value", or, only exactly, "weights".
        direction: "denoising" or "noising".
        positions: token positions that are patched, from 0; with them lengths may differ, and a number means the same
            place in both. None: all.
        heads: which heads are patched exactly, by layers as in `saccade.intervene`, None for all of a call. None: all.
        through: (layers, heads, "query" | "key" | "value"), or several; the layers of each match one call. Heads after
            the last receiver are not measured.
        progress: `progress(done, total)` is called after each patched head, or after each batch of them.

    Raises:
        TypeError: a model that is not a module, text that is not tokenized, a metric of another type.
        ValueError: an unknown word; inputs of different batches or lengths, or equal in the metric; a metric that is
            not scalar, not finite, or without gradient; layers or heads that do not exist; a model without attention
            calls that can be reached.

    Example:
        >>> import torch, saccade
        >>> config = saccade.nn.BlockConfig(saccade.nn.AttentionConfig(16, heads=4))
        >>> model, clean, corrupted = saccade.nn.Encoder(config, layers=2), torch.randn(1, 5, 16), torch.randn(1, 5, 16)
        >>> found = saccade.patching(model, clean, corrupted, lambda out: out[0, -1, 0])
        >>> found.effects.values.shape  # one for each head; print(found) shows a table
        torch.Size([8])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {describe(model)}")
    ways = (by,) if isinstance(by, str) else tuple(by)
    _check_words(ways, what, direction, bool(through))
    places = indices(positions, "positions")
    with evaluating(model), torch.no_grad():
        ends = {
            name: watched(model, inputs, metric, name) for name, inputs in (("clean", clean), ("corrupted", corrupted))
        }
        base, source = ("corrupted", "clean") if direction == "denoising" else ("clean", "corrupted")
        runs = PatchRuns(model, metric, ends[base], ends[source], what, places)
        _check_alike(runs)
        receivers = _receivers(runs, through)
        changes: dict[str, Mapping[str, Tensor]] = {}
        if "exact" in ways:
            changes["exact"] = _exact(runs, receivers, _chosen(runs, receivers, heads), progress)
        if "gradient" in ways:
            changes["gradient"] = path_first_order(runs, receivers) if receivers else first_order(runs)
    maps = {way: _effects(runs, change) for way, change in changes.items()}
    return Patching(
        exact=maps.get("exact"),
        gradient=maps.get("gradient"),
        clean=ends["clean"].metric,
        corrupted=ends["corrupted"].metric,
        what=what,
        direction=direction,
        positions=places,
        through=receivers,
        unobserved={name: lost.reason for name, lost in runs.base.seen.unobserved.items()},
    )


def _check_words(ways: tuple[str, ...], what: str, direction: str, is_path: bool) -> None:
    unknown = [way for way in ways if way not in BY]
    if unknown or not ways:
        raise ValueError(f"by must be of {', '.join(BY)}; got {unknown[0] if unknown else 'none'!r}")
    if what not in WHAT:
        raise ValueError(f"what must be one of {', '.join(WHAT)}; got {what!r}")
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}; got {direction!r}")
    if what == "weights" and "gradient" in ways:
        raise ValueError("by: weights can only be patched exactly; pass by='exact'")
    if is_path and what != "output":
        raise ValueError(f"what: through= needs what='output', got what={what!r}")


def _check_alike(runs: PatchRuns) -> None:
    """ValueError if one run cannot be patched from the other."""
    base, source = runs.base, runs.source
    if base.calls != source.calls:
        raise ValueError("clean and corrupted: the model makes different attention calls for the two inputs")
    for call in runs.calls:
        own, other = base.seen.kept[call.name], source.seen.kept[call.name]
        if own.query.shape[0] != other.query.shape[0]:
            raise ValueError(
                f"clean and corrupted: expected the same batch, got {source.name} {other.query.shape[0]} and "
                f"{base.name} {own.query.shape[0]} items in {call.name or 'the model'}"
            )
        lengths = [(call.query.shape[2], call.key.shape[2]) for call in (other, own)]
        if runs.positions is None and lengths[0] != lengths[1]:
            raise ValueError(
                f"clean and corrupted: expected as many tokens, got {source.name} {lengths[0][0]} and {base.name} "
                f"{lengths[1][0]} in {call.name or 'the model'} (keys: {lengths[0][1]} and {lengths[1][1]}); texts of "
                "different lengths need positions=[...], where a number means the same place in both"
            )
    if base.metric == source.metric:
        raise ValueError(f"metric: it is {base.metric:g} for both clean and corrupted; there is nothing to explain")


def _receivers(runs: PatchRuns, through: Through | Sequence[Through] | None) -> tuple[Receiver, ...]:
    if not through:
        return ()
    heads_by_call: dict[tuple[str, str], tuple[int, ...]] = {}
    if not isinstance(through, Sequence) or isinstance(through, str):
        raise ValueError(f"through: expected (layers, heads, 'query' | 'key' | 'value'), got {through!r}")
    for receiver in [through] if isinstance(through[0], (int, str)) else through:
        if not isinstance(receiver, tuple) or len(receiver) != 3 or receiver[2] not in KINDS:
            raise ValueError(f"through: expected (layers, heads, 'query' | 'key' | 'value'), got {receiver!r}")
        calls = _calls(runs, receiver[0], "through")
        if len(calls) != 1:
            names = ", ".join(call.name for call in calls)
            raise ValueError(f"through: {receiver[0]!r} fits {len(calls)} calls: {names}; name one of them")
        key = calls[0].name, receiver[2]
        heads = heads_by_call.get(key, ()) + _heads(calls[0], receiver[1], "through")
        heads_by_call[key] = tuple(dict.fromkeys(heads))
    receivers = tuple(Receiver(call, heads, what) for (call, what), heads in heads_by_call.items())
    if not senders(runs, receivers):
        raise ValueError("through: no attention call comes before the receivers")
    return receivers


def _calls(runs: PatchRuns, layers: Layers, name: str) -> list[CallHeads]:
    """The calls that match `layers`; a call of exactly that name before those of its module."""
    by_name = {call.name: call for call in runs.calls}
    if isinstance(layers, str) and layers in by_name:
        return [by_name[layers]]
    matches = [by_name[site.name] for site in runs.base.seen.calls if fits(site, layers)]
    if not matches:
        raise ValueError(f"{name}: no attention call matches {layers!r}; there are {', '.join(by_name)}")
    return matches


def _heads(call: CallHeads, given: Heads, name: str) -> tuple[int, ...]:
    numbers = indices(given, name)
    chosen = tuple(range(call.heads)) if numbers is None else numbers
    beyond = [head for head in chosen if head >= call.heads]
    if beyond or not chosen:
        there = f"{call.name or 'the model'} has query heads 0 to {call.heads - 1}"
        raise ValueError(f"{name}: {there}, got {', '.join(map(str, beyond)) or 'none'}")
    return chosen


def _chosen(
    runs: PatchRuns, receivers: Sequence[Receiver], heads: Mapping[Layers, Heads] | None
) -> list[tuple[str, int]]:
    """(call name, head) of each head to patch."""
    before = set(senders(runs, receivers))
    given: Mapping[Layers, Heads] = {"*": None} if heads is None else heads
    chosen = {
        (call.name, head): None
        for layers, some in given.items()
        for call in _calls(runs, layers, "heads")
        for head in _heads(call, some, "heads")
        if call.name in before
    }
    if not chosen:
        raise ValueError("heads: none of them comes before the receivers" if heads else "heads: got none")
    return list(chosen)


def _exact(
    runs: PatchRuns, receivers: Sequence[Receiver], chosen: Sequence[tuple[str, int]], progress: Progress | None
) -> dict[str, Tensor]:
    """(H,) by call: the change of the metric, NaN for heads that were not patched."""
    found = None if receivers else changes_in_batches(runs, chosen, progress)
    if found is None:
        found = []
        for done, (call, head) in enumerate(chosen, 1):
            found.append(path_change(runs, receivers, call, head) if receivers else exact_change(runs, call, head))
            if progress is not None:
                progress(done, len(chosen))
    changes = {call.name: torch.full((call.heads,), math.nan, dtype=torch.float64) for call in runs.calls}
    for (call, head), change in zip(chosen, found, strict=True):
        changes[call][head] = change
    return changes


def _effects(runs: PatchRuns, changes: Mapping[str, Tensor]) -> HeadValues:
    """Changes of the metric as shares of the difference between the two runs."""
    missing = {call.name: torch.full((call.heads,), math.nan) for call in runs.calls}
    values = head_map(runs.calls, {**missing, **changes})
    return HeadValues(values.calls, values.values / (runs.source.metric - runs.base.metric))


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

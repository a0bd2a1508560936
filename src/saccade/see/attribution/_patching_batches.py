"""Exact patching of several heads in one forward, in which each item of a batch has another head patched.

Shape legend: B items of the base input, N copies of them.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...operator._call import AttentionCall
from ..intervention import Patch
from ..intervention._edit import CallPlace, Edit
from ..monitoring import KeptCall, Observations
from ._patching_runs import PatchRuns, Shapes, parts_of
from ._runs import Progress, edited, run_model, scalar

MOST_ROWS = 256  # of all copies in a call: with more, matrix products are no faster, and fewer layers are shared
ALIKE = 1e-4  # as a share of the difference between clean and corrupted


def changes_in_batches(
    runs: PatchRuns, chosen: Sequence[tuple[str, int]], progress: Progress | None
) -> list[float] | None:
    """Change of the metric when each (call name, head) is patched. None: patch them one by one.

    The base input runs up to the first layer with a patched call. There its items are copied, a copy for each head,
    and one that stays unpatched. Its metric must be that of the base run, to half of the dtype's digits, and the same
    in every batch: it is not in models whose items influence one another, by norms over the batch or a capacity of
    experts, and neither for metrics of outputs that are not split by item, such as a loss or a product of all pairs.
    """
    heads = _heads_in_batch(runs, len(chosen))
    if heads < 2 or runs.what == "weights":  # the source's masks cannot be repeated
        return None
    source = _RepeatedSource(runs, heads + 1)
    changes: list[float] = []
    unpatched: list[float] = []
    for first in range(0, len(chosen), heads):
        batch = chosen[first : first + heads]
        try:
            out = _run_copies(runs, source, batch, heads + 1)
        except Exception:  # of a model that cannot read copies; its own errors are raised when it runs one by one
            return None
        try:
            unpatched.append(_metric(runs, out, heads, heads + 1))
        except Exception:  # of a metric that took the base run's output: it reads a part that copies lack
            return None
        if not _independent(runs, unpatched):
            return None
        changes += [_metric(runs, out, number, heads + 1) - unpatched[-1] for number in range(len(batch))]
        if progress is not None:
            progress(len(changes), len(chosen))
    return changes


def _heads_in_batch(runs: PatchRuns, count: int) -> int:
    """Equally many for each batch, at least two batches; below 2 if the input is too large."""
    rows = max(kept.query.shape[0] * kept.query.shape[2] for kept in runs.base.seen.kept.values())
    most = MOST_ROWS // rows - 1
    return 0 if most < 2 else math.ceil(count / max(2, math.ceil(count / most)))


def _independent(runs: PatchRuns, unpatched: Sequence[float]) -> bool:
    """Whether the metrics of unpatched copies are those of the base run, whatever the other copies are."""
    dtype = next(iter(runs.base.seen.kept.values())).query.dtype
    rounding = torch.finfo(dtype).eps ** 0.5 * (1 + abs(runs.base.metric))
    spread = max(unpatched) - min(unpatched)
    alike = ALIKE * abs(runs.source.metric - runs.base.metric)
    return abs(unpatched[-1] - runs.base.metric) <= rounding and spread <= alike


def _run_copies(runs: PatchRuns, source: Observations, batch: Sequence[tuple[str, int]], copies: int) -> Any:
    """The model's output for all copies of the base input; copy n has the n-th head of `batch` patched."""
    edits: list[dict[str, Edit]] = []
    for number, (call, head) in enumerate(batch):
        items = len(runs.base.seen.kept[call].query)
        of_copy = range(number * items, (number + 1) * items)
        edits.append({call: _CopyPatch([head], source, runs.what, runs.positions, items=of_copy)})
    with edited(runs.model, *edits), _copied_from(runs, {call for call, _ in batch}, copies):
        return run_model(runs.model, runs.base.inputs, runs.base.name)


def _metric(runs: PatchRuns, out: Any, number: int, copies: int) -> float:
    items = {len(kept.query) for kept in runs.base.seen.kept.values()}
    shapes = {path: shape for path, shape in runs.base.shapes.items() if shape[:1] and shape[0] in items}
    return float(scalar(runs.metric(_copy(out, shapes, number, copies)), "metric"))


@contextmanager
def _copied_from(runs: PatchRuns, patched: set[str], copies: int) -> Iterator[None]:
    """A block in which layers copy the items of their inputs, from the first with a patched call on."""
    sites = list(runs.base.seen.calls)
    first = next(n for n, site in enumerate(sites) if site.name in patched)
    items = len(runs.base.seen.kept[sites[first].name].query)

    thread = threading.get_ident()

    def copied(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return None
        return tree_map(lambda leaf: _repeated(leaf, items, copies), (args, kwargs))

    with ExitStack() as stack:
        for path in dict.fromkeys(_layer(site.path) for site in sites[first:]):
            hook = runs.model.get_submodule(path).register_forward_pre_hook(copied, with_kwargs=True)
            stack.callback(hook.remove)
        yield


def _layer(path: str) -> str:
    """The path up to its last number: "layers.3.attention" is in "layers.3"."""
    parts = path.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1]) if numbers else path


def _repeated(leaf: Any, items: int, copies: int) -> Any:
    has_items = isinstance(leaf, Tensor) and leaf.dim() > 1 and len(leaf) == items
    return leaf.repeat(copies, *[1] * (leaf.dim() - 1)) if has_items else leaf


class _CopyPatch(Patch):
    """A patch that lets the model compute what it replaces: unpatched copies are then computed in the same way, to the
    last bit, in every batch."""

    def _replaced(self, call: AttentionCall, place: CallPlace) -> Tensor | None:
        return None


class _RepeatedSource(Observations):
    """The source's tensors as if its input were repeated."""

    def __init__(self, runs: PatchRuns, copies: int) -> None:
        super().__init__()
        self._copies = {name: _repeated_call(kept, copies) for name, kept in runs.source.seen.kept.items()}

    @property
    def kept(self) -> dict[str, KeptCall]:
        return self._copies


def _repeated_call(kept: KeptCall, copies: int) -> KeptCall:
    names = ("query", "key", "value", "out")
    return dataclasses.replace(
        kept, **{name: _repeated(getattr(kept, name), len(kept.query), copies) for name in names}
    )


def _copy(out: Any, shapes: Shapes, number: int, copies: int, path: tuple[Any, ...] = ()) -> Any:
    """The output for one copy. None instead of a part that is not one value for each item, such as a cache, a mean or a
    product of all pairs: it has not `copies` times the items of the base run's output, whose `shapes` are given."""
    if isinstance(out, Tensor):
        base = shapes.get(path, ())
        is_split = bool(base) and out.shape == (copies * base[0], *base[1:])
        return out.chunk(copies)[number] if is_split else None
    parts = {key: _copy(part, shapes, number, copies, (*path, key)) for key, part in parts_of(out).items()}
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        return dataclasses.replace(out, **parts)
    if isinstance(out, dict):
        new = copy.copy(out)
        new.update(parts)
        return new
    if isinstance(out, (tuple, list)):
        return type(out)(*parts.values()) if hasattr(out, "_fields") else type(out)(parts.values())
    return None

"""`watch(model)`: observe every attention call in the forwards of a model while a block runs.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ...operator._call import ObservedCall
from ...operator._masks._data import describe, from_zero, whole
from ...operator._observers import padding_in_place
from ...operator._statistics import Statistics, step_numbers
from ._alarms import Alarm, Alarms
from ._alarms_reading import StepRecord, steps_together
from ._alarms_thresholds import Thresholds
from ._gradients import GradientNorms
from ._kept_calls import kept_of
from ._observations import Observations
from ._observe import Groups, ObservationRequest, observed, of_step, real_keys, row_samples, step_samples
from ._observed import SiteObservations
from ._record import ROWS_UNKNOWN, CallRecord, CallSite, GradientRecord, OnGradients, OnRecord
from ._walk import ModuleWalk

Chosen = Callable[[CallSite, int], bool]
_TOGETHER = 1024  # calls
NO_GRAPH = "gradients=True, but the call has no graph (no_grad, or a reentrant checkpoint)"


@dataclass(frozen=True)
class WatchSettings:
    """The watched modules, and the receiver of their calls."""

    every: int
    layers: Chosen | None
    heads: tuple[int, ...] | None
    keep: Chosen | None
    gradients: bool
    on_record: OnRecord | None
    on_gradients: OnGradients | None


class ModelWatch(Observations):
    """A watch on a model, with its observations. `saccade.watch` returns it.

    It is a context manager; a second block continues the counts.

    Example:
        >>> import torch, saccade
        >>> model = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4))
        >>> watched = saccade.watch(model)
        >>> with watched:
        ...     _ = model(torch.randn(2, 5, 16))
        >>> watched.steps, watched.alarms, watched.unobserved
        (1, [], {})
    """

    edits_calls = False

    def __init__(
        self, model: nn.Module, request: ObservationRequest, choice: WatchSettings, alarms: Alarms | None
    ) -> None:
        super().__init__()
        self._request, self._choice, self._judge = request, choice, alarms
        self._together = request == ObservationRequest() and choice.on_record is None and not choice.gradients
        self._walk = ModuleWalk(model, choice.every, self)
        self._gradients = GradientNorms(self._told_gradients, self.missed)
        self._waiting: list[StepRecord] = []  # calls whose numbers are not added up yet
        self._adding = threading.RLock()  # another thread may read a watch that runs

    def __enter__(self) -> ModelWatch:
        self._walk.enter("watch", *(() if self._choice.keep is None else (padding_in_place(),)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._walk.leave()
        self._add_up()

    @property
    def _places(self) -> dict[str, SiteObservations]:
        self._add_up()
        return dict(self._known)  # which the watched thread may add to

    @property
    def alarms(self) -> list[Alarm]:
        self._add_up()
        return [] if self._judge is None else self._judge.fired

    @property
    def without_attention(self) -> dict[str, str]:
        return self._walk.layers_without_attention(self.unobserved)

    @property
    def module(self) -> nn.Module | None:
        """The innermost running module."""
        return self._walk.module

    def edits(self, source: str) -> tuple[Any, ...]:
        return ()

    def missing(self, what: str, reason: str) -> Callable[[], None]:
        """A function that counts an unobserved call of the running module."""
        if self._walk.hidden:  # it was counted as a whole
            return lambda: None
        return functools.partial(self.missed, f"{self._walk.path}: {what}" if self._walk.path else what, reason)

    def not_shown(self, source: str, reason: str) -> None:
        """Count an unobserved call under its name; later calls of its module keep theirs."""
        if not self._walk.hidden:
            self.missed(self._walk.site(source).name or "the model", reason)

    def observe(self, call: ObservedCall) -> None:
        """Observe an attention call in a forward of the model."""
        if self._walk.hidden:
            return
        site, step, choice = self._walk.site(call.source), self.steps - 1, self._choice
        if choice.layers is not None and not choice.layers(site, step):
            self.passed_over += 1
            return
        keep = choice.keep is not None and choice.keep(site, step)
        with self._adding, torch.no_grad(), torch._C.DisableTorchFunction():
            try:
                record = self._looked_at(call, site, step, keep)
            except Exception as error:  # must not end a training run: counted as unobserved
                self.missed(site.name or "the model", f"{type(error).__name__}: {error}")
                return
        if choice.on_record is not None and record is not None:
            choice.on_record(record)

    def _looked_at(self, call: ObservedCall, site: CallSite, step: int, keep: bool) -> CallRecord | None:
        """The record of a call; None if its numbers wait for those of other steps."""
        place = self._site_observations(site, call.query.shape[1])
        numbers = step_numbers(call) if self._together and not keep and not call.rows_unknown else None
        if numbers is not None:
            if self._waiting and len(self._waiting[-1].numbers.norms) != len(numbers.norms):
                self._add_up()  # alarms read the calls of a place in their order
            self._waiting.append(StepRecord(site, step, numbers))
            if len(self._waiting) >= _TOGETHER:
                self._add_up()
            return None
        self._add_up()
        measured, out_norm = observed(call, self._request)
        if measured.counted.numel():
            self._add(place, measured, out_norm)
        record = CallRecord(site.name, site.path, site.layer, site.order, step, measured, out_norm)
        if keep:
            place.kept = kept_of(call, measured.lse, step)
        if self._choice.gradients and not self._gradients.listen(
            site, step, call.graph_tensors(), measured.counted, real_keys(call)
        ):
            self.missed(f"{site.name}: gradients", NO_GRAPH)
        if getattr(call, "rows_unknown", False):
            self.not_known(site.name, ROWS_UNKNOWN)
        if self._judge is not None:
            self._judge.observe(record)
        return record

    def _add(self, place: SiteObservations, measured: Statistics, out_norm: Tensor) -> None:
        place.add("rows", row_samples(measured, place.heads))
        place.add("steps", step_samples(measured, out_norm, place.heads))

    def _add_up(self) -> None:
        """Add up the numbers of calls of one query, those of many steps at once."""
        with self._adding, torch.no_grad(), torch._C.DisableTorchFunction():
            waiting, self._waiting = self._waiting, []
            if not waiting:
                return
            try:
                parts = steps_together(waiting)
                for part in parts:
                    self._add(self._known[part.records[0].site.name], part.measured, part.out_norm)
                if self._judge is not None:
                    self._judge._observe_steps(parts)
            except Exception as error:  # as in `observe`
                for record in waiting:
                    self.missed(record.name, f"{type(error).__name__}: {error}")

    def _site_observations(self, site: CallSite, heads: int) -> SiteObservations:
        """The place to add the numbers of a call."""
        known = self._known.get(site.name)
        if known is not None and known.of_all == heads and self._choice.heads is None:
            return known
        chosen = range(heads) if self._choice.heads is None else self._choice.heads
        for head in (head for head in chosen if head >= heads):
            self.missed(f"{site.name}: head {head}", f"the call has {heads} query heads")
        watched = tuple(head for head in chosen if head < heads)
        place = self._known.setdefault(site.name, SiteObservations(site, watched, heads))
        if place.of_all != heads:
            raise ValueError(f"a call of {heads} query heads after a call of {place.of_all}")
        return place

    def _told_gradients(self, record: GradientRecord) -> None:
        place = self._known[record.name]
        norms = {f"{n}.gradient": norm for n, norm in record.gradients.items() if place.of_all % norm.shape[0] == 0}
        if norms:
            place.add("gradients", of_step(norms, place.of_all, place.heads))
        if self._judge is not None and len(norms) == len(record.gradients):
            self._judge.observe_gradients(record)
        if self._choice.on_gradients is not None:
            self._choice.on_gradients(record)


def watch(
    model: nn.Module,
    *,
    every: int = 1,
    layers: Any = None,
    heads: Sequence[int] | None = None,
    keep: Any = None,
    gradients: bool = False,
    top: int = 0,
    received: bool = False,
    groups: Groups | None = None,
    histograms: Any = None,
    alarms: bool | Thresholds = True,
    on_record: OnRecord | None = None,
    on_gradients: OnGradients | None = None,
) -> ModelWatch:
    """Observe every attention call in the forwards of a model while a block runs.

    Observed are the calls of Saccade's modules, of F.scaled_dot_product_attention, of nn.MultiheadAttention with and
    without weights, of nn.TransformerEncoder, of Hugging Face models with any attention implementation, and attention
    written by hand as matrix product, softmax, matrix product. Unobservable calls are listed under `unobserved`.
    Outputs do not change by a bit, with one exception: within the block PyTorch's modules do not use their native fast
    path on this thread, so padded positions have other numbers.

    Only forwards of the model and of modules within it are watched, on the thread that entered the block. A
    checkpointed region is not counted again when the backward pass repeats it. Watches nest, and each observes
    everything.

    Args:
        model: the module whose forwards are watched.
        every: observe every n-th step, starting with the first; a step is one forward of the model, or of a module
            within it that is called by itself. Other steps have almost no cost.
        layers: which calls: None is all; layer numbers, names or paths (with * and ? as in file names), or a function
            of `CallSite` and step.
        heads: the query heads to aggregate; None is all.
        keep: calls whose q, k, v, out, lse and other inputs are kept, so that `weights` can compute any part of their
            map and `saccade.intervene` can patch them into another run: True for all, or as `layers`. The latest of
            each call is kept. Within the block models of `saccade.models` compute padding as well, instead of packing
            it away.
        gradients: whether to measure the norms of the gradients of q, k, v and out in each backward pass, also after
            the block.
        top: as in `saccade.statistics`, for `on_record`.
        received: the same.
        groups: the same, or a function of the `ObservedCall`.
        histograms: as in `saccade.statistics`, for `on_record`.
        alarms: whether to raise alarms on suspicious numbers; or the `Thresholds`.
        on_record: called with a `CallRecord` after each observed call.
        on_gradients: called after a backward pass with a `GradientRecord` for each call that it reached.

    Raises:
        TypeError: a model that is not a module, or a choice of another type.
        ValueError: every below 1, a negative head.

    Example:
        >>> import torch, saccade
        >>> config = saccade.nn.BlockConfig(saccade.nn.AttentionConfig(16, heads=4))
        >>> model = saccade.nn.Encoder(config, layers=2)
        >>> with saccade.watch(model) as watched:
        ...     out = model(torch.randn(2, 5, 16))
        >>> print(watched)
        2 attention calls a step, 1 of 1 step observed.
        ...
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {describe(model)}")
    choice = WatchSettings(
        whole(every, "every", least=1),
        _chosen(layers, "layers"),
        None if heads is None else tuple(dict.fromkeys(from_zero(head, "heads") for head in heads)),
        _chosen(keep, "keep"),
        gradients,
        on_record,
        on_gradients,
    )
    thresholds = alarms if isinstance(alarms, Thresholds) else None
    return ModelWatch(
        model, ObservationRequest(top, received, groups, histograms), choice, Alarms(thresholds) if alarms else None
    )


def _chosen(given: Any, name: str) -> Chosen | None:
    """The function for a value of `layers` or `keep`; None if it chooses nothing."""
    if given is None or given is False:
        return None
    if given is True:
        return lambda site, step: True
    if callable(given):
        return lambda site, step: bool(given(site, step))
    wanted = [given] if isinstance(given, (str, int)) or not isinstance(given, Iterable) else list(given)
    if not all(isinstance(choice, (str, int)) and not isinstance(choice, bool) for choice in wanted):
        raise TypeError(f"{name} must be layer numbers, names or paths, or a function, got {describe(given)}")
    return lambda site, step: any(_fits(site, choice) for choice in wanted)


def _fits(site: CallSite, wanted: str | int) -> bool:
    if isinstance(wanted, int):
        return site.layer == wanted
    return fnmatchcase(site.name, wanted) or fnmatchcase(site.path, wanted)

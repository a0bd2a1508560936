"""The modules that are running, outermost first, and the layer that an operation belongs to.

A layer is found by runs and not by paths: a module that several layers share, such as an activation, or one layer that
runs twelve times, has one path and many runs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import nn


class Entry(NamedTuple):
    """One run of one module; no other run has its number."""

    path: str
    number: int


@contextmanager
def following(module: nn.Module, running: list[Entry]) -> Iterator[None]:
    """A block in which `running` has the modules that are running on this thread."""
    thread, number = threading.get_ident(), 0
    with ExitStack() as hooks:
        for path, part in module.named_modules():

            def enter(*_: Any, path: str = path) -> None:
                nonlocal number
                if threading.get_ident() == thread:
                    number += 1
                    running.append(Entry(path, number))

            def leave(*_: Any) -> None:
                if threading.get_ident() == thread:
                    running.pop()

            hooks.callback(part.register_forward_pre_hook(enter).remove)
            hooks.callback(part.register_forward_hook(leave, always_call=True).remove)
        yield


def layer_runs(calls: Sequence[tuple[Entry, ...]]) -> list[Entry | None]:
    """The run of each call's layer: the outermost one without another call. None where there is none."""
    around = Counter(entry.number for within in calls for entry in within)
    found: list[Entry | None] = []
    for within in calls:
        alone = [entry for entry in within if around[entry.number] == 1]
        if len(calls) == 1:  # of one layer, nothing but the number in its path says where it begins
            alone = [entry for entry in alone if entry.path.rpartition(".")[2].isdigit()]
        found.append(alone[0] if alone else None)
    return found


class Place(NamedTuple):
    """Where an operation ran: inside which modules, and after how many attention calls."""

    within: tuple[Entry, ...]
    calls: int


class Layers:
    """The attention call whose layer an operation belongs to.

    A call's layer is that of `layer_runs`, such as a block. Operations outside of all layers belong to the call before
    them where layers are attention alone, as in a model that has attention and feed-forward layers in two lists;
    everything else, such as a head or a layer without attention, goes by its path.

    Args:
        calls: the runs around each attention call.
        places: of the operations.
    """

    def __init__(self, calls: Sequence[tuple[Entry, ...]], places: Sequence[Place]) -> None:
        self._calls = len(calls)
        self._around = Counter(entry.number for within in calls for entry in within)
        self._first = {entry.number: call for call in reversed(range(len(calls))) for entry in calls[call]}
        self._layer = {run.number: call for call, run in enumerate(layer_runs(calls)) if run is not None}
        self._alone = not any(entry.number in self._layer for place in places for entry in place.within)
        gaps = Counter(place.calls for place in places)
        counts = {gaps[call] for call in range(len(calls))}
        # as many before each call and none behind the last: each layer begins with them
        self._ahead = self._alone and len(calls) > 1 and not gaps[len(calls)] and len(counts) == 1
        self._behind = self._behind_the_last_call(places) if self._alone else frozenset()

    def __call__(self, place: Place) -> int | str:
        """The number of the call, or a path."""
        before = place.calls if self._ahead else max(0, place.calls - 1)
        for entry in place.within:
            if entry.number in self._layer:
                return self._layer[entry.number]
        for entry in place.within:
            if 1 < self._around[entry.number] < self._calls:
                return max(before, self._first[entry.number])
        outer = self._outer(place)
        between = self._alone and 0 < place.calls < self._calls
        if outer is None or outer in self._behind or between or self._ahead:
            return before
        return outer.path

    def _behind_the_last_call(self, places: Sequence[Place]) -> frozenset[Entry]:
        """As many modules as ran between the two calls before."""
        by_gap = [
            dict.fromkeys(self._outer(each) for each in places if each.calls == n) for n in range(self._calls + 1)
        ]
        count = len(by_gap[-2]) if self._calls > 1 else 0
        return frozenset(outer for outer in list(by_gap[-1])[:count] if outer is not None)

    def _outer(self, place: Place) -> Entry | None:
        """The outermost run without any attention call."""
        return next((entry for entry in place.within if entry.number not in self._around), None)

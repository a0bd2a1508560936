"""Caches: full windows, slots that hold nothing, a second use, reordered positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from stacks.reports.case import Case, Proof
from stacks.reports.model import Cache, Call, Model, decoding
from torch import Tensor

WINDOW = 4
DOCUMENT = [[7, 11, 13, 17, 19, 23, 29]]


class Sliding(Cache):
    """Keeps what the next query may see beside itself."""

    def kept(self, states: Tensor) -> Tensor:
        return states[:, :, -(WINDOW - 1) :]


class RolledEarly(Cache):
    """The oldest key leaves when the window is full, not when it is more than full."""

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().update(layer, key, value)
        early = key.shape[2] >= WINDOW
        return (key[:, :, 1:], value[:, :, 1:]) if early else (key, value)

    def kept(self, states: Tensor) -> Tensor:
        return states[:, :, -(WINDOW - 1) :]


class EmptySlots(Cache):
    """A buffer of the window's width: its slots take part before they are written."""

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().update(layer, key, value)
        missing = max(0, WINDOW - key.shape[2])
        return tuple(torch.nn.functional.pad(part, (0, 0, missing, 0)) for part in (key, value))  # type: ignore[return-value]

    def kept(self, states: Tensor) -> Tensor:
        return states[:, :, -(WINDOW - 1) :]


class Blockwise(Cache):
    """Keeps the keys of the newest block only."""

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.newest = (self.length + key.shape[2]) % WINDOW
        return super().update(layer, key, value)

    def kept(self, states: Tensor) -> Tensor:
        return states[:, :, states.shape[2] - self.newest :]


class SlotPositions(Model):
    """The position of a new token is the number of keys that are held, not of tokens that came."""

    def positions(self, call: Call) -> Tensor:
        return super().positions(call).clamp(max=WINDOW - 1) if call.past else super().positions(call)


class Untriangled(Model):
    """With a cache there is no triangle: single tokens need none, a prompt does."""

    def reach(self, call: Call, count: int) -> Tensor:
        reached = super().reach(call, count)
        return torch.ones_like(reached) if call.cached else reached


class LateValues(Cache):
    """Values stand one place behind their keys."""

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().update(layer, key, value)
        return key, value.roll(1, 2) if key.shape[2] > 2 else value


def sliding(make: Callable[[], Model], cache: Callable[[], Cache]) -> dict[str, Any]:
    model = make()
    return {"model": model, "decode": decoding(model, cache), "window": WINDOW, "causal": True}


def plain(make: Callable[[], Model], cache: Callable[[], Cache] = Cache) -> dict[str, Any]:
    model = make()
    return {"model": model, "decode": decoding(model, cache), "causal": True}


def windowed() -> Model:
    return Model(window=WINDOW)


def forgetful(model: Model) -> Any:
    """The pointer into the cache is the model's own, and nothing sets it back."""
    kept: list[Cache] = []

    def decode(tokens: list[int], state: Cache | None) -> tuple[Tensor, Cache]:
        if state is None and kept:
            state = Cache()
            state.length, state.held = 0, dict(kept[0].held)
        logits, state = decoding(model)(tokens, state)
        kept[:] = [state]
        return logits, state

    return decode


def used_again() -> dict[str, Any]:
    model = Model()
    return {"model": model, "decode": forgetful(model), "causal": True}


def case(report: str, fault: str, words: tuple[str, ...], faulty: Any, right: Any, proof: Proof, tokens: int) -> Case:
    return Case(report, "cache", fault, ("cache",), words, tokens, faulty, right, proof)


def steps(*pairs: tuple[int, int, int], **more: Any) -> Proof:
    return Proof(frozenset(pairs), **{"documents": DOCUMENT, "path": "decode", **more})


CASES = (
    case(
        "huggingface/transformers#37574",
        "the oldest key leaves one step before the window is full",
        ("at once",),
        lambda: sliding(windowed, RolledEarly),
        lambda: sliding(windowed, Sliding),
        steps((0, 3, 0), (0, 4, 1), (0, 5, 2), (0, 6, 3)),
        WINDOW,
    ),
    case(
        "huggingface/transformers#45940",
        "empty slots take part until the window is full",
        ("at once",),
        lambda: sliding(windowed, EmptySlots),
        lambda: sliding(windowed, Sliding),
        steps(differs=frozenset({(0, 0), (0, 1), (0, 2)})),
        3,
    ),
    case(
        "rasbt/LLMs-from-scratch#925",
        "the cache is not set back before a second use",
        ("used a second time",),
        used_again,
        lambda: plain(Model),
        steps(documents=[[7, 11, 13], [17, 19]], differs=frozenset({(1, 0), (1, 1)})),
        8,
    ),
    case(
        "lucidrains/native-sparse-attention-pytorch#20",
        "decoding keeps blocks where one pass sees a sliding window",
        ("at once",),
        lambda: sliding(windowed, Blockwise),
        lambda: sliding(windowed, Sliding),
        steps((0, 4, 1), (0, 4, 2), (0, 4, 3), (0, 5, 2), (0, 5, 3), (0, 6, 3)),
        WINDOW + 1,
    ),
    case(
        "planted",
        "positions count held keys, not tokens",
        ("at once", "past the window"),
        lambda: sliding(lambda: SlotPositions(window=WINDOW), Sliding),
        lambda: sliding(windowed, Sliding),
        steps(positions={0: [0, 1, 2, 3, 3, 3, 3]}),
        WINDOW + 1,
    ),
    case(
        "planted",
        "tokens of the prompt see each other whole",
        ("at once",),
        lambda: plain(lambda: Untriangled(layers=2)),
        lambda: plain(lambda: Model(layers=2)),
        steps((0, 0, 1), (0, 0, 2), (0, 1, 2), prompt=3),
        3,
    ),
    case(
        "planted",
        "values are one token behind their keys",
        ("at once",),
        lambda: plain(Model, LateValues),
        lambda: plain(Model),
        steps(differs=frozenset((0, at) for at in range(2, 7))),
        3,
    ),
)

"""The trained mechanisms, and their names on the command line."""

from __future__ import annotations

from torch import nn

from ...operator import variants
from .contenders import AttentionBlocks, RecurrentNetwork, TaskContender
from .examples import SyntheticTask
from .recall import Recall

EXACT, WINDOW = "exact", "window"
NETWORKS: dict[str, type[nn.LSTM] | type[nn.GRU]] = {"LSTM": nn.LSTM, "GRU": nn.GRU}

# Chunks, blocks, windows and numbers of features are smaller than in papers, whose values exceed a whole example: here
# they # are as small relative to an example as theirs relative to a text.
SMALL = {
    "reformer": "reformer:buckets=8,chunk=8",
    "block-topk": "block-topk:block=4",
    "longformer": "longformer:window=16",
    "performer": "performer:features=64",
}

SIZES = (
    "linear:head=4",
    "linear:head=8",
    "linear:head=16",
    "linear",
    "linear:head=64",
    "linear:head=128",
    "linear:feature_map=taylor,head=4",
    "linear:feature_map=taylor,head=8",
    "linear:feature_map=taylor,head=16",
    "performer:features=16",
    "performer:features=64",
    "performer:features=256",
)
"""Mechanisms with a state of fixed size, from small to large within each kind."""


def usual_contenders(task: SyntheticTask) -> list[str]:
    """Default mechanisms: all causal ones; for recall also states of many sizes."""
    causal = [SMALL.get(config.name, config.name) for config in variants.MECHANISMS if config.traits.causal is True]
    names = [EXACT, f"{WINDOW}:size=8", *causal, "linear:feature_map=taylor,head=8", *NETWORKS]
    return list(dict.fromkeys([*names, *SIZES])) if isinstance(task, Recall) else names


def refused_contenders() -> dict[str, str]:
    """Mechanisms that cannot be causal, with the reason."""
    causal = {config.name: config.traits.causal for config in variants.MECHANISMS}
    return {name: reason for name, reason in causal.items() if isinstance(reason, str)}


def contender_named(text: str) -> TaskContender:
    """The contender with the name `name`, or `name:setting=value,...`; for mechanisms `head` is the width of a head.

    Raises:
        ValueError: an unknown name, an invalid setting, a mechanism that cannot be causal.
    """
    name, _, settings = text.partition(":")
    if name in NETWORKS and not settings:
        return RecurrentNetwork(text, NETWORKS[name])
    parts = {key: value for key, _, value in (part.partition("=") for part in settings.split(",") if part)}
    known = [EXACT, f"{WINDOW}:size=N", *(config.name for config in variants.MECHANISMS), *NETWORKS]
    if name not in (EXACT, WINDOW, *(config.name for config in variants.MECHANISMS)):
        raise ValueError(f"mechanism: expected one of {', '.join(known)}; got {text!r}")
    head = _whole("head", parts.pop("head")) if "head" in parts else None
    if name == WINDOW:
        return AttentionBlocks(text, head=head, window=_size(text, parts))
    rest = ",".join(f"{key}={value}" for key, value in parts.items())
    if name == EXACT and rest:
        raise ValueError(f"mechanism: exact attention takes only head=...; got {rest!r}")
    return AttentionBlocks(text, None if name == EXACT else variants.parse(f"{name}:{rest}"), head=head)


def _size(text: str, parts: dict[str, str]) -> int:
    if set(parts) != {"size"}:
        raise ValueError(f"mechanism: a window has a size, as in window:size=8; got {text!r}")
    return _whole("size", parts["size"])


def _whole(name: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"mechanism: {name}: expected a whole number of at least 1, got {value!r}")
    return int(value)

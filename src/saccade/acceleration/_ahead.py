"""Steps of decoder layers ahead of their calls: layers that follow each other are computed in one native call.

Which layers follow each other the step before tells. A step that was computed ahead travels with the input that it was
computed for, as an attribute of this tensor: so it is gone with it, and serves no other call. What an observer writes
into the weights of a later layer while the model runs is seen at the next token.

Shape legend: R items, E width.
"""

from __future__ import annotations

import sys
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..operator._native_step import StepMemory
from ._decoder_caches import Buffer

FOLLOWED = "_saccade_step"
_BETWEEN = "torch.nn.modules.module", "transformers.modeling_layers"  # of frames between a model and its layer


class LayerStep(NamedTuple):
    """A step of one layer: of the cache its layer, the buffer with the new token, memory that was used, the output."""

    layer: Any
    buffer: Buffer
    used: StepMemory
    out: Tensor  # (R, 1, E)


class _Output(NamedTuple):
    """How a hidden state came about, and the step of the next layer, if it is computed already."""

    stack: int
    place: int  # of the layer in its stack
    arguments: tuple[int, ...]  # their addresses; whoever compares them holds their objects
    named: dict[str, Any]  # of the next step
    copy: Tensor | None  # of the hidden state, which tells of writes to it
    step: LayerStep | None


def mark(x: Tensor, stack: object, place: int, named: dict[str, Any], step: LayerStep | None = None) -> None:
    """Note that x is the output of the layer at `place`, called with these arguments, and the next layer's `step`."""
    copy, kept = (None, {}) if step is None else (x.clone(), named)
    setattr(x, FOLLOWED, _Output(id(stack), place, _addresses(named), kept, copy, step))


def follows(x: Tensor, stack: object, place: int, named: dict[str, Any]) -> bool:
    """Whether x is the output of the layer before, which was called with the same arguments."""
    output: _Output | None = getattr(x, FOLLOWED, None)
    same = output is not None and (output.stack, output.place) == (id(stack), place - 1)
    return same and output is not None and output.arguments == _addresses(named)


def take(x: Tensor, follows: bool, named: dict[str, Any]) -> LayerStep | None:
    """The step that was computed ahead for a call of the next layer, with x and these arguments; None if there is none.
    What another layer is called with is not kept for it."""
    output: _Output | None = x.__dict__.pop(FOLLOWED, None)
    if not follows or output is None or output.step is None or output.copy is None or torch.is_grad_enabled():
        return None
    layer, buffer, _, _ = output.step
    fits = _same_arguments(output.named, named) and buffer.keys is layer.keys and buffer.values is layer.values
    return output.step if fits and torch.equal(output.copy, x) else None


def called_by_its_model() -> bool:
    """Whether the running layer's call comes from a model of transformers: loops of others may do anything between
    two layers, such as writing the next one's weights."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(__package__):
        frame = frame.f_back  # type: ignore[assignment]
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_globals.get("__name__", "").startswith("transformers.models.")


def _addresses(named: dict[str, Any]) -> tuple[int, ...]:
    return tuple(map(id, named.values()))


def _same_arguments(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return len(a) == len(b) and all(map(is_, a.values(), b.values())) and (*a,) == (*b,)

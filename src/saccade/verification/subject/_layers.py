"""Attention layers and blocks of transformers' models as subjects, on their own.

Shape legend: B batch, H heads, L length, E model width.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from ..findings._finding import Undecided
from ._calling import guarded
from ._families import promised
from ._reading import MaskReading, Promise, Reading
from ._subject import Subject
from ._token_models import named
from ._transformers import heads_of, is_transformers


class RotaryLayer(nn.Module):
    """A layer that is given rotary embeddings from outside. They are made by its own model's file, for positions from 0
    on."""

    def __init__(self, layer: nn.Module, rotary: nn.Module):
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Any:
        positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        turned = self.rotary(hidden_states, positions)
        return self.layer(hidden_states, position_embeddings=turned, attention_mask=attention_mask)


def layer_subject(layer: nn.Module, promise: Promise | None = None) -> Subject | None:
    """An attention layer or block of a transformers model, or nn.Transformer; None if it is neither.

    A layer that is given rotary embeddings gets those of its own model's file.
    """
    if type(layer) is nn.Transformer:
        return Subject(layer.eval(), _of_transformer(layer), promise or Promise())
    if not type(layer).__module__.startswith("transformers.models.") or is_transformers(layer):
        return None
    file = sys.modules.get(type(layer).__module__)
    taken = inspect.signature(layer.forward).parameters
    config: Any = getattr(layer, "config", None) or next(
        (part.config for part in layer.modules() if hasattr(part, "config")), None
    )
    if "hidden_states" not in taken or config is None:
        return None
    target: nn.Module = layer.eval()
    if "position_embeddings" in taken:
        target = RotaryLayer(layer, _rotary(file, config)).eval()
    mask = "attention_mask" if isinstance(target, RotaryLayer) else named(taken, ("attention_mask", "mask"))
    width = getattr(config, "hidden_size", None) or config.d_model
    required = mask and inspect.signature(target.forward).parameters[mask].default is inspect.Parameter.empty
    constants = {mask: None} if mask and required else {}
    returned = guarded(target, torch.zeros(2, 5, width, dtype=next(layer.parameters()).dtype), **constants)
    out = None if isinstance(returned, Tensor) else 0
    reading = Reading(
        "self",
        "BLD",
        width,
        *heads_of(config),
        names=("hidden_states",),
        out=out,
        weights=_weights(returned),
        masks=(MaskReading(mask, "B1QK", "additive"),) if mask else (),
        constants=constants,
    )
    return Subject(target, reading, promised(layer, config, promise or Promise()))


def _of_transformer(module: nn.Transformer) -> Reading:
    """The padding of its source is passed twice: to its encoder, and to its decoder."""
    why = "src_key_padding_mask and memory_key_padding_mask are given the same"
    return Reading(
        "cross",
        "BLD" if module.batch_first else "LBD",
        module.d_model,
        module.nhead,
        assumed=(why,),
        masks=(MaskReading("padding", "BK", "ignore", documented="ignore", behaves="ignore"),),
        call=_called_with_padding,
    )


def _called_with_padding(module: nn.Transformer, x: Tensor, context: Tensor, padding: Tensor | None = None) -> Tensor:
    return module(context, x, src_key_padding_mask=padding, memory_key_padding_mask=padding)


def _rotary(file: Any, config: Any) -> nn.Module:
    for name, kind in vars(file).items():
        if name.endswith("RotaryEmbedding") and inspect.isclass(kind):
            made: Any = kind
            return made(config)
    raise Undecided(f"{file.__name__} has no rotary embedding to give to its layers: pass an adapter with how=")


def _weights(returned: Any) -> int | None:
    if not isinstance(returned, tuple):
        return None
    places = [at for at, tensor in enumerate(returned) if at and isinstance(tensor, Tensor) and tensor.dim() == 4]
    # T5 returns its position bias before the weights, (1, H, L, L).
    return next((at for at in places if returned[at].shape[0] == returned[0].shape[0]), None)

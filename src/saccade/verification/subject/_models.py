"""Whole models as subjects, found by trying calls; those of transformers and of Saccade are known.

Shape legend: B batch, L length.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...interception._hooks import hooked
from ...support._registered import registered
from ..findings._finding import TargetError, Undecided
from ._calling import guarded
from ._kinds import saccade_models
from ._reading import CacheReading, MaskReading, Promise, Reading
from ._shortened import LoadedModel
from ._subject import Subject
from ._token_models import (
    EncoderDecoderModel,
    PatchModel,
    TokenModel,
    WithTargets,
    longest_input,
    named,
    padding_masks,
    with_direction,
)
from ._transformers import is_transformers, transformers_subject
from .discovery._documentation import DocumentedSource

_SOURCES = ("src", "source", "input_ids", "encoder_input_ids", "src_ids", "enc_input", "src_tokens", "encoder_input")
_TARGETS = tuple(
    "tgt trg target decoder_input_ids tgt_ids trg_ids dec_input tgt_tokens prev_output_tokens decoder_input".split()
)
_EMPTY = inspect.Parameter.empty


def takes_tokens(target: Any) -> bool:
    """Whether a module is a whole model of token ids or of images; tested by calling it."""
    if isinstance(target, LoadedModel | TokenModel | PatchModel) or is_transformers(target) or _is_saccade(target):
        return True
    if not isinstance(target, nn.Module) or not any(isinstance(module, nn.Embedding) for module in target.modules()):
        return False
    return _table(target) is not None


def token_subject(target: Any, promise: Promise | None = None) -> Subject:
    """The subject of a whole model. Form "tokens" for a model that reads token ids; form "self", on the embedded
    patches, for one that reads images.

    Raises:
        Undecided: the model reads neither token ids nor images.
    """
    promise = promise or Promise()
    if isinstance(target, LoadedModel):
        subject = token_subject(target.model, promise)
        reading = replace(subject.reading, assumed=(*target.assumed, *subject.reading.assumed))
        return replace(subject, reading=reading)
    if is_transformers(target):
        return transformers_subject(target, promise)
    if _is_saccade(target):
        known: Subject = registered("verified_models").text_subject(target, promise)
        return known
    return _plain_module(target, promise)


def _is_saccade(target: Any) -> bool:
    """Whether the target is a language model of Saccade, or a published text model that Saccade computes."""
    known = saccade_models()
    return known is not None and bool(known.is_text_model(target))


def _plain_module(module: nn.Module, promise: Promise) -> Subject:
    table = _table(module)
    if table is None:
        raise Undecided(f"{type(module).__name__} takes no token numbers: an input (batch, length) of them fails")
    vocabulary, names, two = table
    target: nn.Module = module.eval()
    masks: tuple[MaskReading, ...] = ()
    assumed: tuple[str, ...] = ()
    if two:
        taken = inspect.signature(module.forward).parameters
        own = tuple(named(taken, options) for options in _PAIR_MASKS)
        target = EncoderDecoderModel(module, names, own, vocabulary).eval()  # type: ignore[arg-type]
        assumed = (f"{names[0]} is read by its encoder, {names[1]} by its decoder",)
    tokens = torch.ones(2, 5, dtype=torch.long)
    returned = guarded(target, tokens, **({start: 0} if (start := _start(module)) else {}))
    out = _output_place(returned, 5)
    if out is _NOWHERE and not two:
        argument = named(inspect.signature(module.forward).parameters, ("targets", "labels", "target", "y"))
        if argument is not None:
            target = WithTargets(module, argument).eval()
            out = _output_place(guarded(target, tokens), 5)
            assumed = (f"every position's logits come only with {argument}=: the tokens themselves are given",)
    if out is _NOWHERE:
        raise Undecided(f"{type(module).__name__} gives no output (batch, length, ...) for token numbers")
    if not two and target is module:
        masks = padding_masks(inspect.signature(module.forward).parameters, "bool")
    layout = "LB" if DocumentedSource.of(module).layout(names[0], 2) == "LB" else "BL"
    assumed += ("tokens are (length, batch), as documented",) if layout == "LB" else ()
    reading = Reading(
        "tokens",
        layout,
        0,
        out=out,
        masks=masks,
        vocabulary=vocabulary,
        max_length=longest_input(module),
        assumed=assumed,
        constants={} if start is None else {start: 0},
        cache=None if start is None else CacheReading("inside", position=start),
    )
    return Subject(target, reading, with_direction(promise, True if two else None))


_NOWHERE = "nowhere"
_PAIR_MASKS = (
    ("attention_mask", "src_mask", "src_key_padding_mask", "source_mask"),
    ("decoder_attention_mask", "tgt_key_padding_mask"),
)


def _table(module: nn.Module) -> tuple[int, tuple[str, ...], bool] | None:
    """(vocabulary, names of the inputs, whether there are two) of a module that looks up token embeddings, otherwise
    None."""
    read: list[tuple[int, Tensor]] = []

    def keep(table: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        read.append((table.num_embeddings, given[0]))

    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    tokens = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 1, 0, 1]])
    try:
        needed = _needed(module)
        if not 1 <= len(needed) <= 2:
            return None
        two = len(needed) == 2 and needed[0] in _SOURCES and needed[1] in _TARGETS
        if len(needed) == 2 and not two:
            return None
        with torch.no_grad(), hooked(embeddings, before=keep):
            guarded(module, *[tokens] * len(needed), **({start: 0} if (start := _start(module)) else {}))
    except TargetError:
        return None
    sizes = [size for size, given in read if isinstance(given, Tensor) and torch.equal(given.cpu(), tokens)]
    return (min(sizes), tuple(needed), two) if sizes else None


def _needed(module: nn.Module) -> list[str]:
    """The arguments of its forward that have no default."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = inspect.signature(module.forward).parameters.values()
    needed = [
        parameter.name
        for parameter in taken
        if parameter.default is _EMPTY and parameter.kind in kinds and parameter.name not in _STARTS
    ]
    return needed or [parameter.name for parameter in taken if parameter.kind in kinds][:1]


_STARTS = ("start_pos", "start_position", "offset", "past_length", "pos_offset", "cur_pos")


def _start(module: nn.Module) -> str | None:
    """The required argument for the position of the first token, as in the published reference of Llama; None if there
    is none."""
    taken = inspect.signature(module.forward).parameters
    return next((name for name in _STARTS if name in taken and taken[name].default is _EMPTY), None)


def _output_place(returned: Any, length: int) -> int | str | None:
    """The place of the output for each position in a result; `_NOWHERE` if there is none."""

    def fits(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() == 3 and value.shape[:2] == (2, length)

    if fits(returned):
        return None
    if isinstance(returned, (tuple, list)):
        return next((at for at, item in enumerate(returned) if fits(item)), _NOWHERE)
    return next((name for name in ("logits", "last_hidden_state") if fits(_item(returned, name))), _NOWHERE)


def _item(returned: Any, name: str) -> Any:
    return returned.get(name) if isinstance(returned, dict) else getattr(returned, name, None)

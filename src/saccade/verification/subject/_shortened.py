"""Shortens a large model, because checks copy and call it often: repeated layers and most of the vocabulary are left
out. Parameters are shared with the model; only the token tables are copied, in part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...support._numbers import joined
from ._subject import copied

LARGE = 64 * 2**20  # bytes: a model from this size on is shortened
_TOKENS = 4096
_NUMBERS = ("layer_idx", "layer_index", "layer_id", "layer_number", "layer_num", "layer")  # of a layer in its model
_PLAIN = (bool, int, str, type(None))


@dataclass(frozen=True)
class LoadedModel:
    """A model that was opened by name, and what the report says of it."""

    model: Any
    assumed: tuple[str, ...] = ()


def shortened(target: Any, *, whole: int = 0) -> tuple[Any, tuple[str, ...]]:
    """(the model, or a shorter one, what was left out in words).

    Of repeated layers the first of each kind stays, or the first two if all are of one kind; a model of at most `whole`
    parameters keeps all. The caller must test whether the shorter model can still be called.
    """
    if isinstance(target, LoadedModel):
        model, words = shortened(target.model, whole=whole)
        return replace(target, model=model), words
    if not isinstance(target, nn.Module) or isinstance(target, torch.jit.ScriptModule) or size_of(target) < LARGE:
        return target, ()
    try:
        short = copied(target, shared=(*target.parameters(), *target.buffers()))
        small = sum(parameter.numel() for parameter in target.parameters()) <= whole
        words = (*(() if small else _without_layers(short)), *_without_tokens(short))
    except Exception:  # whatever a foreign model's own copying or attributes raise: it is tested whole
        return target, ()
    return (short, (f"it is large: {joined(words)} are tested, the others are alike",)) if words else (target, ())


def size_of(target: Any) -> int:
    """The bytes of a model's parameters and buffers, 0 of anything else."""
    model = target.model if isinstance(target, LoadedModel) else target
    if not isinstance(model, nn.Module):
        return 0
    return sum(parameter.numel() * parameter.element_size() for parameter in (*model.parameters(), *model.buffers()))


# Layers


def _without_layers(module: nn.Module) -> Iterator[str]:
    for name, layers in _stacks(module).items():
        owner, _, attribute = name.rpartition(".")
        config = _config_of(module, owner)
        kept = _kept(layers, config)
        if len(kept) == len(layers):
            continue
        yield f"{len(kept)} of {len(layers)} {name or 'layers'} ({', '.join(map(str, kept))})"
        if config is not None:
            _shorten_config(config, len(layers), kept)
        for to, at in enumerate(kept):
            _renumber(layers[at], at, to)
        setattr(module.get_submodule(owner), attribute, nn.ModuleList(layers[at] for at in kept))


def _stacks(module: nn.Module) -> dict[str, nn.ModuleList]:
    """Each outermost list of more than two large blocks, by its name."""
    lists = {
        name: part
        for name, part in module.named_modules()
        if type(part) is nn.ModuleList and len(part) > 2 and size_of(part) > LARGE // 10
    }
    return {name: lists[name] for name in lists if not any(name.startswith(f"{other}.") for other in lists)}


def _kept(layers: nn.ModuleList, config: Any) -> list[int]:
    """The first layer of each kind, or the first two if all layers are of one kind."""
    kinds = [
        (_kind(layer), [str(value[at]) for _, value in _lists(config, len(layers))]) for at, layer in enumerate(layers)
    ]
    first = [at for at, kind in enumerate(kinds) if kinds.index(kind) == at]
    return first if len(first) > 1 else [0, 1]


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """The properties that distinguish layers: classes, shapes, settings, and replaced attributes and hooks."""
    return tuple(
        (
            name,
            type(part),
            _settings(part),
            tuple(parameter.shape for parameter in part.parameters(recurse=False)),
            len(part._forward_hooks) + len(part._forward_pre_hooks),
        )
        for name, part in layer.named_modules()
    )


def _settings(part: nn.Module) -> tuple[Any, ...]:
    return tuple(
        (name, value if type(value) in _PLAIN else getattr(value, "__qualname__", ""))
        for name, value in sorted(vars(part).items())
        if not name.startswith("_") and name not in _NUMBERS and (type(value) in _PLAIN or callable(value))
    )


def _renumber(layer: nn.Module, at: int, to: int) -> None:
    for part in layer.modules():
        for name in _NUMBERS:
            if vars(part).get(name) == at:
                setattr(part, name, to)


def _lists(config: Any, count: int) -> list[tuple[str, Any]]:
    named = vars(config).items() if config is not None else ()
    return [(name, value) for name, value in named if isinstance(value, (list, tuple)) and len(value) == count]


def _config_of(module: nn.Module, owner: str) -> Any:
    """The configuration of the module that holds the layers, or of the nearest one around it."""
    names = owner.split(".") if owner else []
    around: list[Any] = [module.get_submodule(".".join(names[:count])) for count in range(len(names), -1, -1)]
    return next((module.config for module in around if hasattr(module, "config")), None)


def _shorten_config(config: Any, count: int, kept: list[int]) -> None:
    for name, value in _lists(config, count):
        setattr(config, name, type(value)(value[at] for at in kept))
    for name, value in list(vars(config).items()):
        if type(value) is int and value == count and "layer" in name:
            setattr(config, name, len(kept))


# Tokens


def _without_tokens(module: nn.Module) -> Iterator[str]:
    parts = list(module.modules())
    sizes = {table.num_embeddings for table in parts if isinstance(table, nn.Embedding)}
    vocabulary = max(sizes, default=0)
    if vocabulary < 2 * _TOKENS:
        return
    made: dict[int, nn.Parameter] = {}
    for part in parts:
        if isinstance(part, nn.Embedding) and part.num_embeddings == vocabulary:
            if (part.padding_idx or 0) >= _TOKENS:
                raise ValueError("its padding is beyond the tokens that stay")
            part.num_embeddings = _TOKENS
        elif isinstance(part, nn.Linear) and part.out_features == vocabulary:
            part.out_features = _TOKENS
        for name, table in list(part._parameters.items()):
            if table is not None and table.shape[:1] == (vocabulary,):
                part._parameters[name] = made.setdefault(
                    id(table), nn.Parameter(table[:_TOKENS].detach().clone(), table.requires_grad)
                )
        config = getattr(part, "config", None)
        if getattr(config, "vocab_size", None) == vocabulary:
            config.vocab_size = _TOKENS  # type: ignore[union-attr]
    yield f"{_TOKENS:,} of {vocabulary:,} tokens"

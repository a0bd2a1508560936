"""Implements `saccade.prune`: checks a model, cuts its layers and updates its configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...operator.nn import MultiHeadAttention
from ...operator.nn._cuts import Change, Cut, commit
from ...operator.nn._fewer_heads import configurations
from ...operator.nn.attention import HeadsLeft
from ..models import DecoderLM, LanguageModel, Model
from ..models.checkpoints.settings import CheckpointSettings
from ..models.pruned_heads import PRUNED, UNREADABLE, published_sizes, removed_heads, saved_heads
from ..models.text.contacts import ContactHead
from ._heads import Heads, chosen_heads
from ._layers import PrunableLayer, attention_layers, prunable
from ._report import PrunedLayer, Pruning, parameter_count
from ._transformers import is_theirs

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None
_PARALLEL = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def prune_heads(model: nn.Module, heads: Heads, optimizer: Optimizers = None) -> Pruning:
    """See `saccade.prune`."""
    layers = _checked(model)
    removed = chosen_heads(heads, layers)
    kept = {layer: [head for head in range(layer.heads) if head not in gone] for layer, gone in removed.items()}
    cuts = [_cut(layer, left) for layer, left in kept.items()]
    ours = {layer.module: left for layer, left in kept.items() if isinstance(layer.module, MultiHeadAttention)}
    before = parameter_count(model)
    with torch.inference_mode(False):  # its parameters could not be trained
        commit(model, [*cuts, configurations(model, ours), *_around(model, kept)], _listed(optimizer))
    _configure_theirs(model)
    now = {layer.path: layer for layer in attention_layers(model)}
    done = tuple(
        PrunedLayer(
            layer.name,
            layer.path,
            tuple(gone),
            (layer.heads, now[layer.path].heads),
            (layer.kv_heads, now[layer.path].kv_heads),
        )
        for layer, gone in removed.items()
    )
    return Pruning(done, (before, parameter_count(model)), _note(model))


def _checked(model: nn.Module) -> list[PrunableLayer]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    for path, module in model.named_modules():
        if type(module).__name__ in _PARALLEL:
            raise ValueError(
                f"model: {path or 'it'} is a {type(module).__name__}, which keeps references to parameters; prune the "
                "module inside before wrapping it"
            )
        if isinstance(module, ContactHead):
            raise ValueError(
                f"model: {path} predicts contacts from the maps of all heads, so it cannot lose some; set it to None "
                "first"
            )
    prunable(model)
    return attention_layers(model)


def _cut(layer: PrunableLayer, kept: Sequence[int]) -> Cut:
    assert layer.cut is not None
    try:
        return layer.cut(kept)
    except ValueError as error:
        raise ValueError(f"heads: layer {layer.name} ({layer.path or type(layer.module).__name__}): {error}") from None


def _listed(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    for member in given:
        if not isinstance(member, torch.optim.Optimizer):
            raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(member).__name__}")
    return given


def _around(model: nn.Module, kept: Mapping[PrunableLayer, Sequence[int]]) -> list[Cut]:
    """Changes of modules that contain attention and store head counts: Saccade's language models, PyTorch's encoder."""
    by_module = {layer.module: left for layer, left in kept.items()}
    changes: list[Change] = []
    for module in model.modules():
        if isinstance(module, DecoderLM):
            changes.append(Change(module, "config", _own_config(module, by_module)))
        elif isinstance(module, nn.TransformerEncoder) and any(part in by_module for part in module.modules()):
            changes.append(Change(module, "use_nested_tensor", False))  # its fused path checks only layer 0
        elif isinstance(module, LanguageModel):
            config = _own_config(module.model, by_module)
            changes.append(Change(module, "settings", CheckpointSettings(config.to_dict(), module.settings.path)))
            changes.append(Change(module, "heads", _own_roles(module, by_module)))
    return [Cut([], changes)]


def _own_config(model: DecoderLM, kept: Mapping[nn.Module, Sequence[int]]) -> Any:
    removed = []
    for block in model.decoder.blocks:
        attention: Any = block.attention
        now = range(attention.config.heads)
        held = attention.heads_left or HeadsLeft(tuple(now), len(now))
        left = {held.numbers[head] for head in kept.get(attention, now)}
        removed.append(tuple(head for head in range(held.original_heads) if head not in left))
    return replace(model.config, pruned_heads=tuple(removed))


def _own_roles(lm: LanguageModel, kept: Mapping[nn.Module, Sequence[int]]) -> Any:
    """heads.json without the removed heads, and with the others renumbered."""
    if lm.heads is None or not isinstance(lm.heads.get("heads"), list):
        return lm.heads
    blocks: Any = lm.model.decoder.blocks
    left = [kept.get(block.attention, range(block.attention.config.heads)) for block in blocks]
    measured = [
        {**entry, "head": left[entry["layer"]].index(entry["head"])}
        for entry in lm.heads["heads"]
        if entry["head"] in left[entry["layer"]]
    ]
    return {**lm.heads, "heads": measured}


def _configure_theirs(model: nn.Module) -> None:
    """Update the configuration of a transformers model, which is saved with it."""
    config: Any = getattr(model, "config", None)
    layers = [layer for layer in attention_layers(model) if getattr(layer.module, "config", None) is config]
    if not layers or not type(config).__module__.startswith("transformers."):
        return
    removed = removed_heads({layer.path: getattr(layer.module, "heads_left", None) for layer in layers})
    sizes = {(layer.heads, layer.kv_heads, layer.key_width) for layer in layers}
    own_width = hasattr(config, "num_key_value_heads")  # Llama and later models, which read head_dim
    plain = published_sizes(getattr(config, "hidden_size", 1), sizes) if own_width and removed else None
    if plain is not None:
        for name, value in plain.items():
            setattr(config, name, value)
        for layer in layers:
            layer.module.heads_left = None  # type: ignore[assignment]
        vars(config).pop(PRUNED, None)
    elif removed:
        setattr(config, PRUNED, removed)


def _note(model: nn.Module) -> str:
    """A note to read before saving the model."""
    if isinstance(model, Model) and not isinstance(model, LanguageModel):
        return UNREADABLE if PRUNED in saved_heads(model, model.family.own_head_width) else ""
    theirs = (module for module in model.modules() if is_theirs(module))
    return UNREADABLE if any(getattr(module, "heads_left", None) is not None for module in theirs) else ""

"""Removed heads (`saccade.prune`) in config.json.

Published formats have one number of heads for all layers, and most have no head width besides the model's. If the
format can describe the remaining heads, it is used; otherwise config.json gets an extension, which
`saccade.models.load` reads and transformers does not:

    "saccade_pruned_heads": {"4": [1, 3], "7": [0]}      heads 1 and 3 of layer 4 were removed (original numbers)

Layers of an encoder-decoder are "encoder.4", "decoder.4", and "cross.4", the decoder's cross-attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ...operator.nn import MultiHeadAttention
from ...operator.nn._cuts import commit
from ...operator.nn._fewer_heads import configurations, cut_heads, kept_heads
from ...operator.nn.attention import HeadsLeft
from .checkpoints.settings import CheckpointSettings

PRUNED = "saccade_pruned_heads"
UNREADABLE = (
    "transformers cannot load the folder, since its layers have different numbers of heads; saccade.models.load can, "
    "if it knows the family"
)
SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim")
_CROSS = {"cross", "crossattention", "cross_attn", "encoder_attn", "multihead_attn"}


def layer_numbers(paths: Sequence[str]) -> list[int]:
    """The first number in each path, as counted by `saccade.watch`; without a number, the position in the list."""
    numbers = ((place, (part for part in path.split(".") if part.isdigit())) for place, path in enumerate(paths))
    return [int(next(digits, place)) for place, digits in numbers]


def layer_names(paths: Sequence[str]) -> list[str]:
    """A unique name for each attention layer: its number, with the side ("encoder", ...) if several have it."""
    numbers = layer_numbers(paths)
    if len(set(numbers)) == len(numbers):
        return [str(number) for number in numbers]
    sides = [f"{_side(path)}.{number}" for path, number in zip(paths, numbers, strict=True)]
    counts = Counter(sides)
    return [side if counts[side] == 1 else path for side, path in zip(sides, paths, strict=True)]


def removed_heads(left: Mapping[str, HeadsLeft | None]) -> dict[str, list[int]]:
    """The removed heads of each layer, by the layer's name; `left` has the remaining heads by path."""
    named = zip(layer_names(list(left)), left.values(), strict=True)
    return {name: sorted({*range(held.original_heads)} - {*held.numbers}) for name, held in named if held is not None}


def attention_layers(model: nn.Module) -> dict[str, MultiHeadAttention]:
    """Saccade's attention layers by their paths."""
    return {path: module for path, module in model.named_modules() if isinstance(module, MultiHeadAttention)}


def keep_heads(model: nn.Module, kept: Mapping[MultiHeadAttention, Sequence[int]]) -> None:
    """Keep only these heads, in place. ValueError as of `cut_heads`."""
    cuts = [cut_heads(module, heads) for module, heads in kept.items()]
    commit(model, [*cuts, configurations(model, kept)])


def remove_saved(model: nn.Module, settings: CheckpointSettings) -> None:
    """Remove the heads listed in config.json from a newly built model.

    Raises:
        ValueError: unknown layers or heads.
    """
    saved = settings.get(PRUNED)
    if saved is None:
        return
    layers = attention_layers(model)
    by_name = dict(zip(layer_names(list(layers)), layers.values(), strict=True))
    if not isinstance(saved, dict) or not saved.keys() <= by_name.keys():
        raise settings.error(PRUNED, f"an object with lists of heads by layer, of {', '.join(by_name)}")
    try:
        keep_heads(model, {by_name[name]: kept_heads(x, by_name[name].config.heads) for name, x in saved.items()})
    except ValueError as error:
        raise ValueError(f"{settings.path}: {PRUNED}: {error}") from None


def saved_heads(model: nn.Module, own_width: bool) -> dict[str, Any]:
    """Entries of config.json that describe the remaining heads; {} if none was removed.

    Args:
        own_width: whether the published format has the width of a head (`head_dim`) besides the model's, so that it can
            describe any number of heads, equal in all layers.
    """
    layers = attention_layers(model)
    removed = removed_heads({path: module.heads_left for path, module in layers.items()})
    if not removed:
        return {}
    sizes = {(module.config.heads, module.shape.kv_heads, module.shape.head) for module in layers.values()}
    width = next(iter(layers.values())).config.width
    plain = published_sizes(width, sizes) if own_width else None
    return {PRUNED: removed} if plain is None else plain


def published_sizes(width: int, sizes: set[tuple[int, int, int]]) -> dict[str, int] | None:
    """Settings for the numbers of heads and key-value heads and the head width; None if they cannot describe them.

    The settings apply to all layers, and transformers requires that the number of heads divides the model's width.
    """
    [common, *others] = sizes
    return None if others or width % common[0] else dict(zip(SIZES, common, strict=True))


def _side(path: str) -> str:
    parts = set(path.split("."))
    return "cross" if parts & _CROSS else "decoder" if "decoder" in parts else "encoder"

"""The result of pruning: heads by layer, parameters, and FLOPs of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ._layers import PrunableLayer


@dataclass(frozen=True)
class PrunedLayer:
    """An attention layer that lost heads.

    Attributes:
        name, path: of the layer.
        removed: heads, by their numbers before.
        heads, kv_heads: query and key-value heads, (before, after).

    Example:
        >>> import saccade
        >>> config = saccade.nn.BlockConfig(saccade.nn.AttentionConfig(16, heads=4, kv_heads=2))
        >>> layer = saccade.prune(saccade.nn.Encoder(config, layers=2), {1: [0, 1]}).layers[0]
        >>> layer.path, layer.removed, layer.heads, layer.kv_heads
        ('blocks.1.attention', (0, 1), (4, 2), (2, 1))
    """

    name: str
    path: str
    removed: tuple[int, ...]
    heads: tuple[int, int]
    kv_heads: tuple[int, int]


@dataclass(frozen=True)
class Pruning:
    """The result of `saccade.prune`.

    Attributes:
        layers: the layers that lost heads.
        parameters: of the model, (before, after).
        note: what changes when the model is saved; "" if nothing does.

    Example:
        >>> import saccade
        >>> config = saccade.nn.BlockConfig(saccade.nn.AttentionConfig(16, heads=4))
        >>> pruning = saccade.prune(saccade.nn.Encoder(config, layers=2), {1: [0, 2]})
        >>> pruning.parameters, [layer.name for layer in pruning.layers]
        ((8272, 7760), ['1'])
    """

    layers: tuple[PrunedLayer, ...]
    parameters: tuple[int, int]
    note: str = ""

    def __str__(self) -> str:
        lines = [f"layer {layer.name}: {layer.heads[0]} heads, {layer.heads[1]} left" for layer in self.layers]
        before, after = self.parameters
        lines.append(f"{before:,} parameters, {after:,} left ({after / before:.1%})")
        return "\n".join([*lines, *([self.note] if self.note else [])])


def all_layers(
    before: Sequence[PrunableLayer], after: Sequence[PrunableLayer], pruning: Pruning
) -> tuple[PrunedLayer, ...]:
    """All attention layers of a model, including unchanged ones."""
    removed = {layer.path: layer.removed for layer in pruning.layers}
    return tuple(
        PrunedLayer(
            layer.name,
            layer.path,
            removed.get(layer.path, ()),
            (layer.heads, now.heads),
            (layer.kv_heads, now.kv_heads),
        )
        for layer, now in zip(before, after, strict=True)
    )


def parameter_count(model: nn.Module) -> int:
    """Number of entries of a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def attention_flops(layers: Sequence[PrunableLayer], length: int, *, causal: bool) -> int:
    """FLOPs of these layers for one sequence: projections, logits and weighted sums of values.

        2 W L + 2 H (D + Dv) P,   W entries of the projections, P visible query-key pairs

    P is L (L + 1) / 2 if causal, else L^2. Masks, the softmax and norms are not counted. Other mechanisms are counted
    as softmax attention.

    Args:
        layers: with their numbers of heads and weights, as found by `saccade.prune`.
        length: L.
        causal: whether tokens attend only to themselves and earlier ones.

    Example:
        >>> import saccade
        >>> from saccade.pruning import attention_flops
        >>> from saccade.pruning._layers import prunable
        >>> config = saccade.nn.BlockConfig(saccade.nn.AttentionConfig(16, heads=4))
        >>> layers = prunable(saccade.nn.Encoder(config, layers=1))
        >>> attention_flops(layers, 8, causal=False)  # 2 · (4 · 16²) · 8 + 2 · 4 · (4 + 4) · 8²
        20480
    """
    pairs = length * (length + 1) // 2 if causal else length**2
    return sum(2 * layer.projection_weights * length + layer.per_pair() * pairs for layer in layers)


def parameters_line(pruning: Pruning) -> tuple[str, str, str]:
    """Name, values and remark of the number of parameters, for people."""
    whole, left = pruning.parameters
    return "Parameters", f"{whole:,} -> {left:,}", f"{left / whole:.1%}"


def as_json(pruning: Pruning) -> dict[str, Any]:
    """The report as JSON values."""
    return {
        "layers": [
            {
                "name": layer.name,
                "path": layer.path,
                "removed": list(layer.removed),
                "heads": list(layer.heads),
                "kv_heads": list(layer.kv_heads),
            }
            for layer in pruning.layers
        ],
        "parameters": list(pruning.parameters),
        "note": pruning.note,
    }

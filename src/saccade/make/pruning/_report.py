"""What pruning did, in numbers: heads by layer, parameters, and the arithmetic of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ._layers import AttentionLayer


@dataclass(frozen=True)
class PrunedLayer:
    """One attention layer that lost heads.

    Attributes:
        name, path: of the layer.
        removed: heads, as they were numbered before.
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
    """What `saccade.prune` removed.

    Attributes:
        layers: those that lost heads.
        parameters: of the model, (before, after).
        note: what changes when the model is saved; "" where nothing changes.

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
        lines = [f"layer {one.name}: {one.heads[0]} heads, {one.heads[1]} left" for one in self.layers]
        before, after = self.parameters
        lines.append(f"{before:,} parameters, {after:,} left ({after / before:.1%})")
        return "\n".join([*lines, *([self.note] if self.note else [])])


def all_layers(
    before: Sequence[AttentionLayer], after: Sequence[AttentionLayer], pruning: Pruning
) -> tuple[PrunedLayer, ...]:
    """All attention layers of a model, also those that lost nothing."""
    removed = {layer.path: layer.removed for layer in pruning.layers}
    return tuple(
        PrunedLayer(one.name, one.path, removed.get(one.path, ()), (one.heads, now.heads), (one.kv_heads, now.kv_heads))
        for one, now in zip(before, after, strict=True)
    )


def parameter_count(model: nn.Module) -> int:
    """Numbers in a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def attention_flops(layers: Sequence[AttentionLayer], length: int, *, causal: bool) -> int:
    """Additions and multiplications of these layers for one sequence: projections, logits and weighted values.

        2 W L + 2 H (D + Dv) P,   W numbers in the projections, P pairs of a query and a key it sees

    P is L (L + 1) / 2 where causal, else L^2. Masks, the softmax and norms are left out. A mechanism instead of
    softmax attention counts as if it were softmax attention.

    Args:
        layers: with the numbers of heads and weights, as `saccade.prune` finds them.
        length: L.
        causal: whether tokens see nothing later.

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
    """The report as JSON has it."""
    return {
        "layers": [
            {
                "name": one.name,
                "path": one.path,
                "removed": list(one.removed),
                "heads": list(one.heads),
                "kv_heads": list(one.kv_heads),
            }
            for one in pruning.layers
        ],
        "parameters": list(pruning.parameters),
        "note": pruning.note,
    }

"""Selects the least important heads, subject to at least one head a layer and groups of equal size.

Shape legend: H heads of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from ...see.attribution._importance_result import HeadImportance, kept_count
from ._layers import PrunableLayer, prunable


def choose_heads(
    model: nn.Module, importance: HeadImportance | Mapping[str, Tensor], keep: float
) -> dict[str, list[int]]:
    """Choose the least important heads of all layers, so that a share of `keep` stays.

    At least one head of each layer stays. With grouped queries, either a whole group is removed with its key-value
    head, or the least important head of every group, so that groups stay equal. Each step removes the heads with the
    least mean importance.

    Args:
        importance: the result of `saccade.head_importance`, or tensors (H,) by the path of the layer; tensors of
            several rows are summed.
        keep: the number of query heads that stay (an int), or their share (a float in (0, 1]).

    Returns:
        heads by the layer's path, for `prune`.

    Raises:
        ValueError: an invalid `keep`; a layer without importance, of the wrong number of heads, or with numbers that
            are not finite.

    Example:
        >>> import saccade, torch
        >>> from saccade.pruning import choose_heads
        >>> config = saccade.nn.BlockConfig(saccade.nn.AttentionConfig(16, heads=4))
        >>> model = saccade.nn.Encoder(config, layers=1)
        >>> importance = {"blocks.0.attention": torch.tensor([0.5, 0.1, 0.9, 0.2])}
        >>> heads = choose_heads(model, importance, keep=0.5)
        >>> heads
        {'blocks.0.attention': [1, 3]}
        >>> saccade.prune(model, heads).layers[0].heads
        (4, 2)
    """
    if isinstance(importance, HeadImportance):
        importance = importance.costs()
    layers = prunable(model)
    stay = kept_count(keep, sum(layer.heads for layer in layers))
    missing = [layer.path for layer in layers if layer.path not in importance]
    if missing:
        raise ValueError(
            f"importance: missing for {', '.join(missing)}; given for {', '.join(importance) or 'no layer'}"
        )
    for layer in layers:
        _check(layer, importance[layer.path])
    left = {layer.path: _groups(layer, importance[layer.path].tolist()) for layer in layers}
    spare = sum(layer.heads for layer in layers) - stay
    removed: dict[str, list[int]] = {}
    while moves := [move for path, groups in left.items() for move in _moves(path, groups) if len(move.heads) <= spare]:
        best = min(moves, key=lambda move: move.cost / len(move.heads))
        gone = {head.number for head in best.heads}
        rest = ([head for head in group if head.number not in gone] for group in left[best.path])
        left[best.path] = [group for group in rest if group]
        removed.setdefault(best.path, []).extend(sorted(gone))
        spare -= len(gone)
    return {path: sorted(numbers) for path, numbers in removed.items()}


def _check(layer: PrunableLayer, numbers: Tensor) -> None:
    if numbers.shape != (layer.heads,):
        raise ValueError(
            f"importance: layer {layer.path} has {layer.heads} heads, got numbers of shape {tuple(numbers.shape)}"
        )
    if not bool(numbers.isfinite().all()):
        raise ValueError(f"importance: expected finite numbers for layer {layer.path}, got {numbers.tolist()}")


class _Head(NamedTuple):
    number: int
    importance: float


class _Move(NamedTuple):
    """Heads of a layer that are removed together."""

    path: str
    heads: list[_Head]

    @property
    def cost(self) -> float:
        return sum(head.importance for head in self.heads)


def _groups(layer: PrunableLayer, importance: list[float]) -> list[list[_Head]]:
    """The query heads of each key-value head, least important first."""
    heads = [_Head(number, value) for number, value in enumerate(importance)]
    size = layer.heads // layer.kv_heads
    return [
        sorted(heads[start : start + size], key=lambda head: head.importance) for start in range(0, layer.heads, size)
    ]


def _moves(path: str, groups: list[list[_Head]]) -> Iterator[_Move]:
    if len(groups) > 1:
        yield _Move(path, min(groups, key=lambda group: sum(head.importance for head in group)))
    if len(groups[0]) > 1:
        yield _Move(path, [group[0] for group in groups])

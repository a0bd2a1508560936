"""Which heads matter least, and which of them to remove.

Shape legend: H heads of a layer, Dv width of a head's values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._layers import AttentionLayer, prunable


def rank(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], *, told: Callable[[], None] | None = None
) -> dict[str, Tensor]:
    """How much the loss hangs on each head: (H,) for each layer, by its path, float64 on the CPU.

        I_h = mean over batches |d loss / d g_h| at g_h = 1,   g_h a factor on what the output projection reads from h

    divided by the l2 norm of its layer's. Michel et al., "Are Sixteen Heads Really Better than One?" (2019), equation 2
    and section 4.1. One backward pass a batch; the smaller the batches, the less do examples cancel out.

    Args:
        model: gives a `loss` for each batch, `model(**batch).loss`; its output projections are modules that are called,
            which those of `nn.MultiheadAttention` are not.
        batches: arguments of the model, with labels.
        told: called after each batch.

    Raises:
        ValueError: no batch, a loss that is missing or no scalar, attention that no gate can reach.
    """
    layers = prunable(model)
    device = next(model.parameters()).device
    gates = [torch.ones(layer.heads, device=device, requires_grad=True) for layer in layers]
    totals = [torch.zeros(layer.heads, dtype=torch.float64) for layer in layers]
    count = 0
    with _gated(layers, gates), torch.enable_grad():
        for count, batch in enumerate(batches, 1):  # noqa: B007
            found = torch.autograd.grad(_loss(model(**batch)), gates, allow_unused=True)
            for layer, total, gradient in zip(layers, totals, found, strict=True):
                if gradient is None:
                    raise ValueError(f"model: the loss does not hang on the heads of layer {layer.name} ({layer.path})")
                total += gradient.detach().abs().to("cpu", torch.float64)
            if told is not None:
                told()
    if not count:
        raise ValueError("batches: none came")
    return {layer.path: total / total.norm().clamp(min=1e-300) for layer, total in zip(layers, totals, strict=True)}


def choose_heads(model: nn.Module, importance: Mapping[str, Tensor], keep: float) -> dict[str, list[int]]:
    """The least important heads of all layers, so that a share of `keep` stays, and one of each layer at least.

    Of grouped queries whole groups go, with their key-value head, or the weakest head of every group at once, so that
    groups stay equal; always what costs least importance a head.

    Args:
        importance: of each layer's heads, by its path, as `rank` gives it.
        keep: share of all query heads, in (0, 1].

    Returns:
        heads by the layer's path, for `prune`.
    """
    if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 < keep <= 1:
        raise ValueError(f"keep: expected a share in (0, 1], got {keep!r}")
    left = {layer.path: _groups(layer, importance[layer.path].tolist()) for layer in prunable(model)}
    heads = sum(len(group) for groups in left.values() for group in groups)
    spare = heads - max(1, round(keep * heads))
    removed: dict[str, list[int]] = {}
    while moves := [move for path, groups in left.items() for move in _moves(path, groups) if len(move.heads) <= spare]:
        best = min(moves, key=lambda move: move.cost / len(move.heads))
        gone = {head.number for head in best.heads}
        rest = ([head for head in group if head.number not in gone] for group in left[best.path])
        left[best.path] = [group for group in rest if group]
        removed.setdefault(best.path, []).extend(sorted(gone))
        spare -= len(gone)
    return {path: sorted(numbers) for path, numbers in removed.items()}


class _Head(NamedTuple):
    number: int
    importance: float


class _Move(NamedTuple):
    """Heads of a layer that go together."""

    path: str
    heads: list[_Head]

    @property
    def cost(self) -> float:
        return sum(head.importance for head in self.heads)


def _groups(layer: AttentionLayer, importance: list[float]) -> list[list[_Head]]:
    """The heads that read each key-value head, weakest first."""
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


@contextmanager
def _gated(layers: list[AttentionLayer], gates: list[Tensor]) -> Iterator[None]:
    """A factor on what each output projection reads from each head."""

    def gate(module: nn.Module, inputs: tuple[Tensor, ...], *, factors: Tensor, width: int) -> tuple[Tensor, ...]:
        return (inputs[0] * factors.repeat_interleave(width).to(inputs[0].dtype), *inputs[1:])

    with ExitStack() as hooks:
        for layer, factors in zip(layers, gates, strict=True):
            if layer.output is None or type(layer.module) is nn.MultiheadAttention:
                raise ValueError(
                    f"model: layer {layer.name} is a {type(layer.module).__name__}, which calls no output projection "
                    "that a gate could stand before; convert it (saccade.nn.from_torch)"
                )
            hook = functools.partial(gate, factors=factors, width=layer.value_width)
            hooks.enter_context(layer.output.register_forward_pre_hook(hook))
        yield


def _loss(out: Any) -> Tensor:
    loss = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError("batches: expected arguments for which the model gives a scalar loss, with labels among them")
    return loss

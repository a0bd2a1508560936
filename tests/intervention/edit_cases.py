"""Every edit beside what it means, written as functions of dense tensors.

Shape legend: B batch, H query heads, n chosen heads, Lq / Lk lengths, Dv value width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import saccade
from rewritten_attention import Rewrite, on
from saccade.intervention import Ablate, EditBias, EditMask, Freeze, Patch, Scale, Weights

HEADS = [3, 1]  # not in their order: a tensor's first entry is of head 3
ROWS = [4, 2]


class Case(NamedTuple):
    edits: list[Any]
    rewrite: Rewrite
    leaves: tuple[Tensor, ...] = ()  # tensors of the edits that gradients reach
    forward_only: bool = False


class Sizes(NamedTuple):
    """Of the call that is edited."""

    batch: int
    rows: int
    keys: int
    group: int = 1  # query heads to a key head
    value_width: int = 5
    real: Tensor | None = None  # (B, Lq) bool


Clean = dict[str, Tensor]  # what the oracle kept of the call in the other run
Make = Callable[[Sizes, Any, Clean], Case]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).requires_grad_()


def factors(tensor: Tensor) -> Tensor:
    return tensor[:, None, None]


def zero(sizes: Sizes, source: Any, clean: Clean) -> Case:
    return Case([Ablate(HEADS)], Rewrite(out=on(HEADS, torch.zeros_like)))


def zero_one_item(sizes: Sizes, source: Any, clean: Clean) -> Case:
    return Case([Ablate(HEADS, items=1)], Rewrite(out=on(HEADS, torch.zeros_like, [1])))


def mean(sizes: Sizes, source: Any, clean: Clean) -> Case:
    def of(own: Tensor) -> Tensor:
        if sizes.real is None:
            return own.mean(0, keepdim=True).expand_as(own)
        places = []
        for row in range(sizes.rows):
            tokens = [own[item, :, row] for item in range(sizes.batch) if sizes.real[item, row]]
            places.append(sum(tokens) / len(tokens) if tokens else own[0, :, row])
        return torch.stack(places, 1)[None].expand_as(own)

    return Case([Ablate(HEADS, "mean")], Rewrite(out=on(HEADS, of)))


def resampled(sizes: Sizes, source: Any, clean: Clean) -> Case:
    return Case([Ablate(HEADS, "resample")], Rewrite(out=on(HEADS, lambda own: own.flip(0))))  # B is 2


def to_a_tensor(sizes: Sizes, source: Any, clean: Clean) -> Case:
    given = leaf(len(HEADS), 1, sizes.value_width)
    return Case([Ablate(HEADS, given)], Rewrite(out=on(HEADS, lambda own: given.expand_as(own))), (given,))


def scaled(sizes: Sizes, source: Any, clean: Clean) -> Case:
    factor = leaf(len(HEADS))
    return Case([Scale(HEADS, factor)], Rewrite(out=on(HEADS, lambda own: own * factors(factor))), (factor,))


def scaled_one_item(sizes: Sizes, source: Any, clean: Clean) -> Case:
    return Case([Scale(HEADS, 0.3, items=[0])], Rewrite(out=on(HEADS, lambda own: own * 0.3, [0])))


def sharpened(sizes: Sizes, source: Any, clean: Clean) -> Case:
    factor = leaf(len(HEADS))
    change = on(HEADS, lambda products: products * factors(factor))
    return Case([Scale(HEADS, factor, what="logits")], Rewrite(products=change), (factor,))


def seen(sizes: Sizes) -> Tensor:
    """Some pairs; row 3 sees nothing."""
    found = torch.rand(sizes.rows, sizes.keys, generator=torch.Generator().manual_seed(3)) < 0.6
    found[:, 0] = True
    found[3] = False
    return found


def masked(sizes: Sizes, source: Any, clean: Clean) -> Case:
    shown = seen(sizes)
    return Case([EditMask(HEADS, shown)], Rewrite(logits=on(HEADS, lambda x: x.masked_fill(~shown, -math.inf))))


def masked_by_a_value_in_one_item(sizes: Sizes, source: Any, clean: Clean) -> Case:
    offset = sizes.keys - sizes.rows
    rows, keys = torch.arange(sizes.rows)[:, None] + offset, torch.arange(sizes.keys)
    shown = (keys - rows).abs() <= 2
    change = on(HEADS, lambda x: x.masked_fill(~shown, -math.inf), [1])
    return Case([EditMask(HEADS, saccade.Window(2, 2), items=[1])], Rewrite(logits=change))


def biased(sizes: Sizes, source: Any, clean: Clean) -> Case:
    bias = leaf(sizes.rows, sizes.keys)
    return Case([EditBias(HEADS, bias)], Rewrite(logits=on(HEADS, lambda x: x + bias)), (bias,))


def biased_one_item(sizes: Sizes, source: Any, clean: Clean) -> Case:
    bias = leaf(1, 1, 1, sizes.keys)
    return Case([EditBias(HEADS, bias, items=0)], Rewrite(logits=on(HEADS, lambda x: x + bias, [0])), (bias,))


def of_weights(sizes: Sizes, source: Any, clean: Clean) -> Case:
    def sharper(weights: Tensor, rows: Tensor) -> Tensor:
        assert weights.shape[1:] == (2, len(rows), sizes.keys)
        return weights * weights * (1 + rows[:, None])

    rows = torch.arange(sizes.rows)
    change = on(HEADS, lambda w: w * w * (1 + rows[:, None]) * torch.ones(1))
    return Case([Weights(HEADS, sharper)], Rewrite(weights=change), forward_only=True)


def of_weights_in_order(sizes: Sizes, source: Any, clean: Clean) -> Case:
    """The first head that is chosen is the first that the function gets."""

    def numbered(weights: Tensor, rows: Tensor) -> Tensor:
        return weights * torch.arange(1, 3)[:, None, None]

    change = on(HEADS, lambda w: w * torch.arange(1, 3)[:, None, None])
    return Case([Weights(HEADS, numbered)], Rewrite(weights=change), forward_only=True)


def whole(clean: Clean, name: str, heads: list[int]) -> Callable[[Tensor], Tensor]:
    return on(heads, lambda own: clean[name][:, heads])


def some(clean: Clean, name: str, heads: list[int], rows: list[int]) -> Callable[[Tensor], Tensor]:
    def change(own: Tensor) -> Tensor:
        new = own.clone()
        new[:, :, rows] = clean[name][:, heads][:, :, rows]
        return new

    return on(heads, change)


FIELD = {"output": "out"}


def patched(what: str, positions: list[int] | None) -> Make:
    def make(sizes: Sizes, source: Any, clean: Clean) -> Case:
        # With grouped heads the oracle has repeated keys and values: a head's own copy of its group's.
        change = whole(clean, what, HEADS) if positions is None else some(clean, what, HEADS, positions)
        return Case([Patch(HEADS, source, what, positions)], Rewrite(**{FIELD.get(what, what): change}))

    return make


def frozen(sizes: Sizes, source: Any, clean: Clean) -> Case:
    return Case([Freeze(None, source)], Rewrite(weights=lambda own: clean["weights"]))


def all_at_once(sizes: Sizes, source: Any, clean: Clean) -> Case:
    """Given in another order than they work in: weights after logits after queries, outputs last."""
    shown, bias, factor = seen(sizes), leaf(sizes.rows, sizes.keys), 0.3
    edits = [
        Patch([0], source, "weights"),
        Ablate([1]),
        EditMask([0, 3], shown),
        EditBias(HEADS, bias),
        Scale([3, 0], 2.0, what="logits"),
        Scale(HEADS, factor),
        Patch([2], source, "value", ROWS),
    ]
    masks, biases = on([0, 3], lambda x: x.masked_fill(~shown, -math.inf)), on(HEADS, lambda x: x + bias)

    def out(own: Tensor) -> Tensor:
        return on(HEADS, lambda x: x * factor)(on([1], torch.zeros_like)(own))

    rewrite = Rewrite(
        products=on([3, 0], lambda x: x * 2.0),
        logits=lambda own: biases(masks(own)),
        weights=whole(clean, "weights", [0]),
        value=some(clean, "value", [2], ROWS),
        out=out,
    )
    return Case(edits, rewrite, (bias,))


def of_patched_weights(sizes: Sizes, source: Any, clean: Clean) -> Case:
    """Edits of weights are applied in their order: a function after a patch gets what was patched."""

    def halved(weights: Tensor, rows: Tensor) -> Tensor:
        return weights / 2

    edits = [Weights([1, 2], halved), Patch(HEADS, source, "weights"), Weights([3], halved)]

    def weights(own: Tensor) -> Tensor:
        own = on([1, 2], lambda w: w / 2)(own)
        own = whole(clean, "weights", HEADS)(own)
        return on([3], lambda w: w / 2)(own)

    return Case(edits, Rewrite(weights=weights), forward_only=True)


def named(*makers: Make) -> dict[str, Make]:
    return {make.__name__: make for make in makers}


def patches(what: str) -> dict[str, Make]:
    return {what: patched(what, None), f"{what} at positions": patched(what, ROWS)}


BY_STAGE: tuple[dict[str, Make], ...] = (
    {**named(sharpened), **patches("query"), **patches("key")},
    patches("value"),
    named(masked, masked_by_a_value_in_one_item, biased, biased_one_item),
    {**named(of_weights, of_weights_in_order, frozen, of_patched_weights), **patches("weights")},
    {
        **named(zero, zero_one_item, mean, resampled, to_a_tensor, scaled, scaled_one_item),
        **patches("output"),
    },
    named(all_at_once),
)
CASES = {name: make for stage in BY_STAGE for name, make in stage.items()}


def one_of_each_stage(number: int) -> list[str]:
    """Names of cases; the next number gives the next of each stage, so that several models together have all."""
    return [list(stage)[number % len(stage)] for stage in BY_STAGE]

"""Labels of a tensor's elements: the input token, or the score, that each comes from.

A function that only moves elements is called once more on the labels. They are exact for all views, splits, loops and
buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..findings._finding import Location

UNKNOWN = -1


@dataclass(frozen=True)
class ScaleHistory:
    """Factors that rows or scores have been multiplied by."""

    by: float = 1.0
    learned: bool = False  # whether a parameter was among it
    where: Location | None = None  # the last line that did

    def times(self, by: float, learned: bool, where: Location | None) -> ScaleHistory:
        """The history with one more factor. Signs, as in rotary positions, are ignored."""
        return ScaleHistory(self.by * abs(by), self.learned or learned, where)


NOT_SCALED = ScaleHistory()


@dataclass(frozen=True, eq=False)
class TensorShadow:
    """The token, or the pair of tokens, of each element of a traced tensor: `tokens` and `pairs` have its shape.

    Rows of queries, keys and values know their token: which position of which batch item of which input. Scores and
    weights know their pair: which element of which product.
    """

    tokens: Tensor | None = None
    pairs: Tensor | None = None
    scores: frozenset[int] = frozenset()  # the products that its pairs are of
    outer: tuple[Tensor, Tensor] | None = None  # the factors of a product that is not summed yet
    depth: int = 0  # attention computations that it has been through
    scaled: ScaleHistory = NOT_SCALED

    def map(self, change: Callable[[Tensor], Tensor]) -> TensorShadow:
        """The same change to tokens and pairs."""
        return replace(
            self,
            tokens=None if self.tokens is None else change(self.tokens),
            pairs=None if self.pairs is None else change(self.pairs),
            outer=None,
        )


def unknown(shape: Sequence[int], depth: int = 0) -> TensorShadow:
    """The shadow of a tensor that is computed from inputs in an unknown way."""
    return TensorShadow(tokens=torch.full(tuple(shape), UNKNOWN), depth=depth)


def moved(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], shadow: TensorShadow) -> Any:
    """Shadows of the results of a function that only moves elements of its first argument, nested like its results."""
    if name == "pad":
        args, kwargs = (*args[:2],), {"mode": "constant", "value": UNKNOWN}
    rest = args[1:]
    kwargs = {key: value for key, value in kwargs.items() if key not in ("input", "self")}

    def moved_part(own: Tensor) -> Any:
        try:
            return func(own, *rest, **kwargs)
        except RuntimeError:
            if name not in ("view", "view_as"):
                raise
            return own.contiguous().view(*(rest[0].shape if name == "view_as" else rest))  # it may lie otherwise

    results = [None if own is None else moved_part(own) for own in (shadow.tokens, shadow.pairs)]
    several = next((part for part in results if isinstance(part, (tuple, list))), None)
    if several is None:
        return replace(shadow, tokens=results[0], pairs=results[1], outer=None)
    parts = [[None] * len(several) if part is None else part for part in results]
    return [replace(shadow, tokens=part, pairs=other, outer=None) for part, other in zip(*parts, strict=True)]


def joined(
    func: Any,
    tensors: Sequence[Tensor],
    shadows: Sequence[TensorShadow | None],
    rest: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> TensorShadow:
    """The shadow of tensors put together by cat, stack and the like."""
    kwargs = {key: value for key, value in kwargs.items() if key != "tensors"}

    def joined_part(which: str) -> Tensor | None:
        own = [None if shadow is None else getattr(shadow, which) for shadow in shadows]
        if all(part is None for part in own):
            return None
        filled = [
            torch.full(tensor.shape, UNKNOWN) if part is None else part
            for tensor, part in zip(tensors, own, strict=True)
        ]
        joined: Tensor = func(filled, *rest, **kwargs)
        return joined

    known = [shadow for shadow in shadows if shadow is not None]
    return TensorShadow(
        joined_part("tokens"),
        joined_part("pairs"),
        frozenset().union(*(shadow.scores for shadow in known)),
        depth=max(shadow.depth for shadow in known),
        scaled=next((shadow.scaled for shadow in known if shadow.scaled != NOT_SCALED), NOT_SCALED),
    )


def elementwise(shape: torch.Size, shadows: Sequence[TensorShadow]) -> TensorShadow | None:
    """The shadow of an elementwise function, with broadcasting; None if the shapes do not fit such a function."""
    pairs = [shadow for shadow in shadows if shadow.pairs is not None and _fits(shadow.pairs, shape)]
    tokens = [shadow for shadow in shadows if shadow.tokens is not None and _fits(shadow.tokens, shape)]
    if not pairs and not tokens:
        return None
    known = [*pairs, *tokens]
    return TensorShadow(
        _agreed([shadow.tokens for shadow in tokens], shape),
        None if not pairs else _first([shadow.pairs for shadow in pairs], shape),
        frozenset().union(*(shadow.scores for shadow in pairs)),
        depth=max(shadow.depth for shadow in shadows),
        scaled=next((shadow.scaled for shadow in known if shadow.scaled != NOT_SCALED), NOT_SCALED),
    )


def _fits(tensor: Tensor, shape: torch.Size) -> bool:
    if tensor.dim() > len(shape):
        return False
    return all(own in (1, size) for own, size in zip(tensor.shape[::-1], tuple(shape)[::-1], strict=False))


def _first(given: Sequence[Tensor | None], shape: torch.Size) -> Tensor:
    parts = [part.expand(shape) for part in given if part is not None]
    made = parts[0]
    for part in parts[1:]:
        made = torch.where(made == UNKNOWN, part, made)
    return made


def _agreed(given: Sequence[Tensor | None], shape: torch.Size) -> Tensor | None:
    """Labels of the known tensors where they agree; -1 where they differ."""
    parts = [part.expand(shape) for part in given if part is not None]
    if not parts:
        return None
    made = parts[0]
    for part in parts[1:]:
        differ = (made != part) & (made != UNKNOWN) & (part != UNKNOWN)
        made = torch.where(made == UNKNOWN, part, made).masked_fill(differ, UNKNOWN)
    return made


def agreed_along(known: Tensor, axes: Sequence[int], keep: bool) -> Tensor:
    """The common label of the elements along the axes, -1 where they differ."""
    if known.numel() == 0:
        return known.sum(list(axes), keepdim=keep)
    low, high = known.amin(list(axes), keepdim=keep), known.amax(list(axes), keepdim=keep)
    return low.masked_fill(low != high, UNKNOWN)


def placed(own: Tensor | None, shape: Sequence[int], axis: int, index: Tensor, source: Tensor) -> Tensor:
    """The labels of a tensor of `shape` after rows of `source` were written to the indices `index` along an axis: those
    of `source`, -1 where several rows differ, and the former labels elsewhere."""
    if index.dim() < source.dim():
        others = [1] * source.dim()
        others[axis] = index.numel()
        index = index.reshape(others).expand(source.shape)
    source = source[tuple(slice(size) for size in index.shape)]
    nobody = torch.iinfo(source.dtype).max
    low = source.new_full(tuple(shape), nobody).scatter_reduce(axis, index, source, "amin")
    high = source.new_full(tuple(shape), UNKNOWN).scatter_reduce(axis, index, source, "amax")
    before = source.new_full(tuple(shape), UNKNOWN) if own is None else own
    return torch.where(low == nobody, before, low.masked_fill(low != high, UNKNOWN))


def varies(shadow: TensorShadow | None) -> Callable[[Tensor, int], bool]:
    """Whether the tokens or pairs of a factor differ along an axis."""

    def differs(tensor: Tensor, axis: int) -> bool:
        if shadow is None:
            return tensor.shape[axis] > 1
        known = shadow.pairs if shadow.pairs is not None else shadow.tokens
        return known is not None and known.shape == tensor.shape and varying(known, axis)

    return differs


def varying(known: Tensor, axis: int) -> bool:
    """Whether `known` differs along an axis."""
    return known.shape[axis] > 1 and not torch.equal(known, known.select(axis, 0).unsqueeze(axis).expand(known.shape))


# Functions that move elements of their first argument about and change none.
MOVES = frozenset(
    """view reshape transpose permute T mT H mH t movedim moveaxis swapaxes swapdims unsqueeze squeeze expand expand_as
    broadcast_to view_as reshape_as repeat repeat_interleave tile chunk split split_with_sizes tensor_split unbind
    getitem select narrow index_select gather take_along_dim flatten unflatten ravel flip roll diagonal unfold
    as_strided hsplit vsplit dsplit unsafe_split unsafe_chunk pad iter""".split()
)
JOINS = frozenset({"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack"})
REDUCTIONS = frozenset(
    """sum mean amax max amin min logsumexp norm vector_norm var std prod nansum nanmean argmax argmin all any
    median""".split()
)
# After these it does not matter what rows were multiplied by before.
NORMS = frozenset({"layer_norm", "rms_norm", "normalize", "group_norm", "batch_norm", "instance_norm"})
# Of one tensor, but elements change places in a way that nobody follows.
# Rows of the third argument go to places of the first, (tensor, axis, index, source).
PLACES = frozenset("index_add index_copy index_reduce scatter scatter_add scatter_reduce".split())
SHUFFLES = frozenset({"sort", "argsort", "topk", "cumsum", "cumprod", "fft", "ifft", "multinomial"})

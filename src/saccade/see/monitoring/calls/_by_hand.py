"""Attention written by hand, recognised by its calls: a product, a softmax, a product.

    x = q k^T        logits = f(x), elementwise or reshaped        w = softmax(logits)        out = g(w) v

Tensors are followed by identity. Of f, scales, additions and masks with -inf are kept as scale, bias and mask; any
other change of the scores (a soft cap, a fill with -1e9, relative positions) is the bias `logits - scale q k^T`, which
is exact to rounding. A softmax over the last axis of unknown scores is counted as unobserved, and so is one over
another axis of known scores.

Shape legend: ... leading axes, B batch, H heads, Lq / Lk lengths, D / Dv widths.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....interception._tracing import TensorLabels, View, tensors_in, writes
from ....operator import _observers
from ....operator._call import GraphTensor, ObservedCall, without_autocast
from ....operator._masks import FromTensor
from . import _thread
from ._by_hand_edits import FunctionRun, ScoresReplay, edited_output, edited_weights
from ._observed_products import PRODUCTS, AxisLayout, ObservedProduct, ScoreTerm, alike, product_of
from ._origins import TensorOrigins
from ._padded import rows_of
from ._scores import ObservedScores, changed_by

_SOFTMAX = {torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax}
_DROPOUT = {torch.dropout, F.dropout}
UNKNOWN = "a softmax over the last axis of scores that are not known to be a product of queries and keys"
UNUSED = "its softmax was observed, but no product of the weights with values"
AGAIN = "its weights are multiplied a second time, and edits of values or outputs do not reach that product"
TURNED = "a softmax of scores over another axis than the last, or of scores that are not (..., queries, keys)"


@dataclass(frozen=True, eq=False)
class SoftmaxWeights:
    """The weights of a softmax, and the scores they were computed from."""

    scores: ObservedScores
    lead: tuple[int, ...]
    number: int  # of the softmax
    dropout: float = 0.0
    edits: _observers.CallEdits | None = None  # of the call
    spent: bool = False  # whether they were multiplied with values


class ByHandFollower:
    """Follows scores and weights through the functions of a mode.

    Args:
        origins: knows the sequences that queries and keys were computed from.
    """

    def __init__(self, origins: TensorOrigins) -> None:
        self._origins = origins
        self._known = TensorLabels[ObservedScores | SoftmaxWeights]()
        self._made_of = TensorLabels[ObservedProduct]()  # the product from which a tensor before a softmax was computed
        self._numbers = itertools.count()
        self._open: dict[int, Callable[[], None]] = {}  # softmaxes whose weights were not yet multiplied with values
        self._completed: tuple[SoftmaxWeights, ObservedProduct] | None = None  # of the latest call
        self._heads: int | None = None
        self._within_one: Callable[[], bool | None] | None = None
        self._source = "attention by hand"

    @contextmanager
    def within_call(self, source: str, heads: int, within_one: Callable[[], bool | None]) -> Iterator[None]:
        """Within the block the number of heads is known, and whether queries and keys are from one sequence."""
        before = self._source, self._heads, self._within_one
        self._source, self._heads, self._within_one = source, heads, within_one
        try:
            yield
        finally:
            self._source, self._heads, self._within_one = before

    def concerns(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether a function may be part of attention: most are not, and this must be fast for them."""
        if func in _SOFTMAX or func in PRODUCTS:
            return True
        return bool(self._known) and (any(arg in self._known for arg in args) or writes(func))

    def sees(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> ObservedCall | None:
        """Follow scores and weights through a function; returns the attention call that it completes."""
        self._completed = None
        if func in _SOFTMAX:
            self._softmax(args, kwargs, result)
            return None
        if self._known and args and (writes(func) or "out" in kwargs):
            self._written(kwargs.get("out", args[0]), result)
        product = product_of(func, args, kwargs)
        if product is not None:
            return self._product(product, FunctionRun(func, args, kwargs), result)
        match = next(((at, known) for at, arg in enumerate(args) if (known := self._known.get(arg)) is not None), None)
        if match is not None and isinstance(result, Tensor):
            self._follow(match[1], match[0], func, args, kwargs, result)
        return None

    def made(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """For edits: follow, through reshapes, the tensors computed from a product, up to a softmax."""
        if func in _SOFTMAX or not isinstance(result, Tensor) or result in self._made_of:
            return
        products = (self._made_of.get(tensor) for tensor in tensors_in(args))
        product = next((product for product in products if product is not None), None)
        if product is not None:
            self._made_of.put(result, product)

    def edited(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, call: ObservedCall | None
    ) -> tuple[Any, ObservedCall | None]:
        """After `sees`: the result of a softmax, or of the product that completes a call, with this thread's edits."""
        run = FunctionRun(func, args, kwargs)
        if call is not None and self._completed is not None:
            weights, product = self._completed
            own = weights.scores.product
            layout = self._layout(weights, [own.left, own.right, product.right.transpose(-2, -1)])
            if weights.edits is None or layout is None:
                return result, call
            with _observers.aside():
                return edited_output(weights.edits, call, product, layout, run, result)
        known = self._known.get(result) if func in _SOFTMAX else None
        if not isinstance(known, SoftmaxWeights):
            return result, call
        own, replay = known.scores.product, known.scores.replay
        self._release(replay)
        changed, edits = result, _observers.edits_of(self._source)
        if edits is not None:
            layout = self._layout(known, [own.left, own.right])
            if layout is None:
                raise ValueError("intervene: attention by hand cannot be changed: its number of heads is unknown")
            with _observers.aside():
                changed = edited_weights(edits, own, replay, layout, run, result)
            self._known.pop(result)
        self._known.put(changed, replace(known, edits=edits, scores=replace(known.scores, replay=None)))
        return changed, None

    def _release(self, replay: ScoresReplay | None) -> None:
        """Forget scores after their softmax: their replay holds them, and they would never be freed."""
        for _, scores in () if replay is None else replay.since:
            self._known.pop(scores)

    def _layout(self, weights: SoftmaxWeights, factors: list[Tensor]) -> AxisLayout | None:
        heads = self._heads or _hint(weights) or _thread.heads_of_module()
        return AxisLayout.of(alike(factors), heads)

    def ended(self) -> None:
        """The forward has ended: weights that were not multiplied with values are counted as unobserved."""
        for unused in self._open.values():
            unused()
        self._open.clear()
        self._known.clear()
        self._made_of.clear()

    def _forget(self, number: int) -> None:
        """Forget the weights of one softmax: they are one attention call, whatever else they are multiplied by."""
        for tensor, what in self._known.items():
            if isinstance(what, SoftmaxWeights) and what.number == number:
                self._known.pop(tensor)
                if what.edits is not None:
                    self._known.put(tensor, replace(what, spent=True))

    def _written(self, tensor: Any, result: Any) -> None:
        """Forget the scores that share memory with a tensor that was changed in place, such as its views.

        The returned tensor, if it is the same, is followed by name.
        """
        if not isinstance(tensor, Tensor):
            return
        for held, what in self._known.sharing(tensor):
            if held is not result and not isinstance(what, SoftmaxWeights):
                self._known.put(held, replace(what, changed=True, replay=None))

    def _product(self, product: ObservedProduct, run: FunctionRun, result: Tensor) -> ObservedCall | None:
        weights = self._known.get(product.factors[0])
        if isinstance(weights, SoftmaxWeights) and weights.spent:
            _thread.missed(self._source, AGAIN)
        elif isinstance(weights, SoftmaxWeights) and product.over_last:
            self._forget(weights.number)
            self._open.pop(weights.number, None)
            call = self._call(weights, product, result)
            if isinstance(call, ObservedCall):
                self._completed = weights, product
                return call
            _thread.missed(self._source, call)
        elif weights is None:
            lead = tuple(result.shape[:-2])
            bias = None if product.added is None else ScoreTerm(product.added.detach(), lead)
            replay = None if _observers.THREAD.editor is None else ScoresReplay(run)
            self._known.put(result, ObservedScores(product, lead, product.alpha, bias=bias, replay=replay))
            if replay is not None:
                self._made_of.put(result, product)
        return None

    def _softmax(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        logits = args[0] if args else kwargs.get("input")
        axis = args[1] if len(args) > 1 else kwargs.get("dim")
        if not isinstance(logits, Tensor):
            return
        scores, last = self._known.get(logits), axis in (-1, logits.dim() - 1)
        if isinstance(scores, ObservedScores) and not (last and scores.product.natural):
            _thread.missed("softmax", TURNED)
        elif isinstance(scores, ObservedScores):
            if scores.changed:
                scores = _by_difference(scores, logits)
            number = next(self._numbers)
            self._open[number] = _thread.missing("softmax", UNUSED)
            self._known.put(result, SoftmaxWeights(scores, tuple(result.shape[:-2]), number))
        elif last and logits.dim() > 2:
            _thread.missed("softmax", UNKNOWN)

    def _follow(
        self,
        before: ObservedScores | SoftmaxWeights,
        at: int,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Tensor,
    ) -> None:
        product = (before if isinstance(before, ObservedScores) else before.scores).product
        lead = tuple(result.shape[:-2])
        if not product.natural:
            if result.shape == args[at].shape:
                self._known.put(result, before)
            return
        if tuple(result.shape[-2:]) != product.rows_and_columns or math.prod(lead) != math.prod(before.lead):
            return
        if isinstance(before, SoftmaxWeights):
            dropout = _dropped(func, args, kwargs) if func in _DROPOUT else before.dropout
            self._known.put(result, replace(before, lead=lead, dropout=dropout))
        else:
            others = (self._made_of.get(arg) for i, arg in enumerate(args) if i != at and isinstance(arg, Tensor))
            alone = all(other is None or other is product for other in others)  # Transformer-XL adds a second product
            replay = before.replay.then(FunctionRun(func, args, kwargs), args[at]) if before.replay and alone else None
            self._known.put(result, replace(changed_by(before, at, func, args, kwargs), lead=lead, replay=replay))

    def _call(self, weights: SoftmaxWeights, product: ObservedProduct, result: Tensor) -> ObservedCall | str:
        scores = weights.scores
        if torch._C._are_functorch_transforms_active():
            return "inside a torch.func transform"
        own = scores.product
        factors = alike([own.left, own.right, product.right.transpose(-2, -1)])
        layout = self._layout(weights, factors)
        if layout is None:
            return "the leading axes of its factors do not match"
        query, key, value = layout.queries(factors[0]), layout.keys(factors[1]), layout.keys(factors[2])
        # some models multiply queries and keys in float32, and values in their own dtype
        wide = torch.promote_types(query.dtype, value.dtype)
        query, key, value = query.to(wide), key.to(wide), value.to(wide)
        masks = [layout.scores(mask) for mask in scores.masks]
        mask = FromTensor(functools.reduce(torch.logical_and, masks)) if masks else None
        bias = None if scores.bias is None else layout.scores(scores.bias)
        used = {
            "query": _used(own.factors[0], own.views[0], layout),
            "key": _used(own.factors[1], own.views[1], layout),
            "value": _used(product.factors[1], product.views[1], layout, turned=True),
            "out": _used(result, product.out, layout),
        }
        length = query.shape[2]
        within_one = self._within_one or functools.partial(self._origins.same, *own.factors, length)
        rows = rows_of(mask, bias, length, key.shape[2], within_one)
        return ObservedCall(
            query.detach(),
            key.detach(),
            value.detach(),
            mask,
            bias,
            scores.scale,
            dropout=weights.dropout,
            real=rows.real,
            out=layout.queries(product.out(result.detach())),
            source=self._source,
            rows_unknown=rows.unknown,
            used=used,
        )


def _used(factor: Tensor, view: View, layout: AxisLayout, turned: bool = False) -> GraphTensor:
    def seen_as(gradient: Tensor) -> Tensor:
        viewed = view(gradient)
        return layout.own(viewed.transpose(-2, -1) if turned else viewed)

    return GraphTensor(factor, seen_as)


def _by_difference(scores: ObservedScores, logits: Tensor) -> ObservedScores:
    """The same scores with all their changes as one bias."""
    own = scores.product
    with torch.no_grad(), torch._C.DisableTorchFunction(), without_autocast(logits.device):
        wide = torch.promote_types(logits.dtype, torch.float32)
        plain = own.left.to(wide) @ own.right.to(wide).transpose(-2, -1)
        lead = tuple(plain.shape[:-2])
        bias = logits.to(wide).reshape(plain.shape) - scores.scale * plain
    return replace(scores, masks=(), bias=ScoreTerm(bias, lead), changed=False)


def _dropped(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """The probability of a dropout call."""
    names = ("input", "p", "training") if func is F.dropout else ("input", "p", "train")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return float(given.get("p", 0.5)) if given.get(names[2], True) else 0.0


def _hint(weights: SoftmaxWeights) -> int | None:
    """The number of heads, if scores or weights ever had separate axes for batch and heads."""
    for lead in (weights.scores.lead, weights.lead):
        if len(lead) == 2:
            return lead[1]
    return None

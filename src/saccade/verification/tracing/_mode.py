"""Records the PyTorch functions of a call and follows input rows to scores, weights and values.

While a mode is on, PyTorch's modules do not take their native fast path: on this thread alone.

Shape legend: U units (a head of a batch item each), I / J rows of left and right, C their width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...interception._tracing import (
    EinsumSpec,
    FunctionCall,
    FunctionMode,
    ProductLayout,
    TensorLabels,
    is_kernel,
    laid_out,
    outer,
    spelled,
    tensors_in,
)
from ...operator._call import ObservedCall
from ..findings._finding import Location
from ..subject._operations import location_here
from ._calls import (
    CASTS,
    EXP,
    MASKS,
    MINUS,
    OVER,
    PLUS,
    SOFTMAX,
    TIMES,
    as_number,
    axes_of,
    axis_of,
    is_learned,
    is_of_rows,
    is_triangle,
    kind_of,
    softmax_axis_of,
)
from ._fused import Known, fused
from ._scores import ScoreProduct, rows_of
from ._shadow import (
    JOINS,
    MOVES,
    NORMS,
    NOT_SCALED,
    PLACES,
    REDUCTIONS,
    SHUFFLES,
    UNKNOWN,
    TensorShadow,
    agreed_along,
    elementwise,
    joined,
    moved,
    placed,
    unknown,
    varies,
)

_LARGEST = 2**24  # elements of scores that are followed


@dataclass(frozen=True, eq=False)
class TraceStep:
    """One call of PyTorch on the way: its name ("view", "softmax"), the shapes in and out, and where."""

    name: str
    taken: tuple[tuple[int, ...], ...]
    given: tuple[int, ...]
    location: Location | None


def step_line(steps: Iterable[TraceStep], names: Collection[str]) -> Location | None:
    """The line of the first step of one of these names whose line is known."""
    return next((step.location for step in steps if step.name in names and step.location is not None), None)


@dataclass(frozen=True, eq=False)
class ElementwiseFactor:
    """A tensor of numbers, no parameter, that rows of the inputs were multiplied by element for element."""

    numbers: Tensor  # of the result's shape
    tokens: Tensor  # of the same: whose rows
    location: Location | None


@dataclass(eq=False)
class _Call(FunctionCall):
    before: Tensor | None = None  # a copy of what enters a softmax, an exponential or a shift of rows

    @cached_property
    def where(self) -> Location | None:
        return location_here()


class TraceMode(FunctionMode):
    """Records calls and changes none. Tensors that it cannot follow become unknown; no error reaches the target."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[TraceStep] = []
        self.scores: list[ScoreProduct] = []
        self.kernels: list[str] = []  # attention that cannot be looked into
        self.factors: list[ElementwiseFactor] = []
        self._shadows = TensorLabels[TensorShadow]()
        self._pairs = 0

    def know(self, tensor: Tensor, shadow: TensorShadow | None) -> None:
        if shadow is not None:
            self._shadows.put(tensor, shadow)

    def of(self, tensor: Any) -> TensorShadow | None:
        """The shadow of a tensor; None if its shape has changed."""
        shadow = self._shadows.get(tensor)
        if shadow is None:
            return None
        known = shadow.pairs if shadow.pairs is not None else shadow.tokens
        return shadow if known is not None and known.shape == tensor.shape else None

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = _Call(func, args, kwargs)
        call.before = self._logits(call)
        call.result = func(*args, **kwargs)
        iterated = call.name == "iter"
        if iterated:
            call.result = list(call.result)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            try:
                self.sees(call)
            except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError):
                self._lose(call)
        return iter(call.result) if iterated else call.result

    def _logits(self, call: _Call) -> Tensor | None:
        """A copy of the scores that enter a softmax or a part of it, which may write over them; None for other
        functions."""
        name, args = call.name, call.args
        if name in SOFTMAX or name in EXP or (name in MINUS and len(args) > 1 and is_of_rows(*args[:2])):
            given = args[0] if args else call.kwargs.get("input")
            shadow = self.of(given)
            if shadow is not None and shadow.pairs is not None:
                with torch._C.DisableTorchFunction():
                    return given.detach().clone()  # type: ignore[union-attr]
        return None

    def _lose(self, call: _Call) -> None:
        known = [shadow for shadow in map(self.of, tensors_in(call.args)) if shadow is not None]
        for tensor in tensors_in(call.result):
            if known and tensor not in self._shadows:
                self.know(tensor, unknown(tensor.shape, max(shadow.depth for shadow in known)))

    def sees(self, call: FunctionCall) -> None:
        assert isinstance(call, _Call)
        name, args, result = call.name, call.args, call.result
        results = list(tensors_in(result))
        if not results and name != "setitem":
            return
        shape = tuple(results[0].shape) if results else ()
        self.steps.append(TraceStep(name, tuple(tuple(tensor.shape) for tensor in call.given), shape, call.where))
        if is_kernel(call.func):
            self.kernels.append(str(call.func))
        if all(self.of(tensor) is None for tensor in call.given) or name.endswith("_like") or name.startswith("new_"):
            return
        if name == "scaled_dot_product_attention":
            query = args[0] if args else call.kwargs["query"]
            self._fused(fused(self._pairs, self.of, args, call.kwargs), self.of(query), result, call.where)
        elif name == "setitem":
            self._written(call)
        elif (product := spelled(name, args, call.kwargs)) is not None:
            self._product(product, self.of(product.left), self.of(product.right), call)
        elif name == "vecdot":
            shape_of = torch.broadcast_shapes(args[0].shape, args[1].shape)
            self._summed((args[0], args[1]), shape_of, [len(shape_of) - 1], call)
        elif name in MOVES and (name != "getitem" or self.of(args[0]) is not None):
            self._moved(call)
        elif name in PLACES and len(args) >= 4 and isinstance(result, Tensor):
            self._placed(call)
        elif name in JOINS:
            tensors = list(args[0] if args else call.kwargs["tensors"])
            self.know(
                result, joined(call.func, tensors, [self.of(tensor) for tensor in tensors], args[1:], call.kwargs)
            )
        elif isinstance(result, Tensor) and result.dtype != torch.bool:
            self._changed(call)
        elif not isinstance(result, Tensor):
            self._lose(call)

    def _moved(self, call: _Call) -> None:
        source = call.args[0] if call.args else call.kwargs.get("input", call.kwargs.get("self"))
        shadow = self.of(source)
        if shadow is None:
            return
        func = torch.unbind if call.name == "iter" else call.func
        made = moved(func, call.name, call.args or (source,), call.kwargs, shadow)
        for tensor, own in zip(tensors_in(call.result), made if isinstance(made, list) else [made], strict=True):
            self.know(tensor, own)

    def _placed(self, call: _Call) -> None:
        """Rows written at an index, as a mixture of experts writes outputs back to their tokens."""
        tensor, axis, index, source = call.args[:4]
        own, given = self.of(tensor), self.of(source)
        depth = max(shadow.depth for shadow in (own, given) if shadow is not None)
        made = unknown(call.result.shape, depth)
        if given is not None and given.tokens is not None:
            known = None if own is None else own.tokens
            made = replace(made, tokens=placed(known, tensor.shape, axis % tensor.dim(), index, given.tokens))
        self.know(call.result, made)

    def _changed(self, call: _Call) -> None:
        """A function that makes other numbers of its arguments, element by element or by sums."""
        name, given, result = call.name, call.given, call.result
        shadows = [shadow for shadow in map(self.of, given) if shadow is not None]
        first = self.of(given[0])
        if name in REDUCTIONS and len(given) == 1 and first is not None:
            self._reduced(call, first)
        elif name == "embedding" and first is not None and first.tokens is not None:
            self.know(result, TensorShadow(first.tokens.unsqueeze(-1).expand(result.shape)))
        elif name in ("view_as_complex", "view_as_real") and first is not None:
            real = name == "view_as_real"
            self.know(
                result, first.map(lambda tensor: tensor.unsqueeze(-1).expand(result.shape) if real else tensor[..., 0])
            )
        elif name == "conv1d" and first is not None and first.tokens is not None:
            same = agreed_along(first.tokens, [-2], True)
            fits = same.shape[-1] == result.shape[-1]
            self.know(result, TensorShadow(same.expand(result.shape)) if fits else unknown(result.shape, first.depth))
        else:
            made = None if name in SHUFFLES else elementwise(result.shape, shadows)
            if made is not None:
                self._each(call, shadows)
                if name in TIMES | OVER:
                    made = self._multiplied(call, made)
                elif name in NORMS:
                    made = replace(made, scaled=NOT_SCALED)
            self.know(result, made or unknown(result.shape, max(shadow.depth for shadow in shadows)))

    def _multiplied(self, call: _Call, made: TensorShadow) -> TensorShadow:
        args, result, where = call.args, call.result, call.where
        factors = [arg for arg in args[:2] if isinstance(arg, Tensor) and self.of(arg) is not None]
        others = [arg for arg in args[:2] if not any(arg is factor for factor in factors)]
        by = as_number(others[0]) if len(others) == 1 else None
        if by is not None and len(factors) == 1:
            by = 1 / by if call.name in OVER and by and others[0] is args[1] else by
            kept, scaled = self.of(factors[0]), made.scaled.times(by, is_learned(others[0]), where)
            return replace(made, scaled=scaled, outer=None if kept is None else kept.outer)
        if len(others) == 1 and len(factors) == 1 and made.tokens is not None and not is_learned(others[0]):
            self.factors.append(ElementwiseFactor(others[0].detach().expand(result.shape), made.tokens, where))
            return made
        if len(others) == 1 and is_learned(others[0]) and made.pairs is None and others[0].dim() > 1:
            return replace(made, scaled=made.scaled.times(1.0, True, where))  # a temperature for each head
        if len(factors) < 2 or any(self.of(factor) is None for factor in factors):
            return made
        if all(factor.shape == result.shape and factor.is_contiguous() for factor in factors):
            return made  # of the same rows
        return replace(made, outer=(factors[0], factors[1]))

    def _reduced(self, call: _Call, shadow: TensorShadow) -> None:
        name, given, result = call.name, call.given[0], call.result
        axes = axes_of(name, call.args, call.kwargs, given)
        if shadow.outer is not None and name in ("sum", "mean") and result.dim() == given.dim() - len(axes):
            self._summed(shadow.outer, given.shape, axes, call)
        elif shadow.pairs is not None:
            if name in ("sum", "logsumexp", "norm", "vector_norm"):
                for scores in self._scores(shadow):
                    if scores.normalised is None and (scores.logits is not None or name != "sum"):
                        scores.note("sum", call.where)
                        scores.normalised = scores.along(shadow.pairs, axes[0])
        elif shadow.tokens is not None:
            tokens = agreed_along(shadow.tokens, axes, result.dim() == given.dim())
            known = tokens.shape == result.shape
            self.know(
                result, TensorShadow(tokens, depth=shadow.depth) if known else unknown(result.shape, shadow.depth)
            )

    def _each(self, call: _Call, shadows: Sequence[TensorShadow]) -> None:
        """The effect of an elementwise function on scores or weights."""
        for scores, pairs in [(product, shadow.pairs) for shadow in shadows for product in self._scores(shadow)]:
            assert pairs is not None
            if call.before is not None:
                _softened(scores, pairs, call, call.before)
            elif call.name == "normalize" and scores.normalised is None:
                scores.normalised = scores.along(pairs, axis_of(call.args, call.kwargs, 2, 1) % call.result.dim())
            elif call.name == "dropout":
                scores.note("dropout", call.where)
            elif call.name in MASKS:
                scores.note("mask", call.where)
            elif call.name in TIMES | OVER | PLUS:
                self._combined(scores, pairs, call)
            elif call.name not in CASTS:
                scores.note("function", call.where)
                # a convolution over the heads: what comes out is a sum of their scores
                scores.mixed |= call.name in ("conv1d", "conv2d", "conv3d") and scores.softened is None

    def _combined(self, scores: ScoreProduct, pairs: Tensor, call: _Call) -> None:
        """Scores or weights multiplied by, or added to, something else."""
        name, where = call.name, call.where
        others = [arg for arg in call.args if self.of(arg) is None]
        what = kind_of(name, call.args)
        scores.note("after" if what == "scale" and scores.softened is not None else what, where)
        if name in PLUS and any(map(is_triangle, others)):
            scores.note("triangle", where)
        if name in TIMES:
            for factor in tensors_in(others):
                scores.times(factor, pairs, where)
        if name in TIMES | OVER and scores.normalised is None:
            scores.learned |= any(map(is_learned, others))

    def _product(self, product: EinsumSpec, left: TensorShadow | None, right: TensorShadow | None, call: _Call) -> None:
        if _is_score(right) and not _is_score(left):
            product, left, right = product.turned(), right, left
        laid, result = laid_out(product, varies(left), varies(right)), call.result
        depth = max(shadow.depth for shadow in (left, right) if shadow is not None)
        made = None
        if laid is not None and left is not None and _is_score(left):
            made = self._after_scores(laid, left, right, call.where)
        elif laid is not None:
            made = self._before_scores(laid, left, right, call.where)
        fits = made is not None and (made.pairs if made.pairs is not None else made.tokens).shape == result.shape  # type: ignore[union-attr]
        self.know(result, made if fits else unknown(result.shape, depth))

    def _before_scores(
        self, laid: ProductLayout, left: TensorShadow | None, right: TensorShadow | None, where: Location | None
    ) -> TensorShadow | None:
        if left is None or right is None:
            return _projected(laid, left, right)
        rows, other = laid.left(laid.product.left), laid.right(laid.product.right)
        units = (laid.rows, laid.columns)
        count = math.prod(laid.lead)
        if count * units[0] * units[1] > _LARGEST:
            return None
        assert left.tokens is not None and right.tokens is not None
        scores = ScoreProduct(
            self._pairs,
            rows.detach().reshape(count, laid.rows, rows.shape[-1]).clone(),
            other.detach().reshape(count, laid.columns, other.shape[-1]).clone(),
            rows_of(laid.left(left.tokens), rows.shape),
            rows_of(laid.right(right.tokens), other.shape),
            max(left.depth, right.depth),
            left.scaled.by * right.scaled.by,
            left.scaled.learned or right.scaled.learned,
        )
        scores.note("scores", where)
        scores.note("scale", left.scaled.where or right.scaled.where)
        pairs = torch.arange(scores.first, scores.first + scores.count).reshape(*laid.lead, *units)
        self._pairs += scores.count
        self.scores.append(scores)
        return TensorShadow(None, laid.out(pairs), frozenset({len(self.scores) - 1}), depth=scores.depth)

    def _after_scores(
        self, laid: ProductLayout, left: TensorShadow, right: TensorShadow | None, where: Location | None
    ) -> TensorShadow | None:
        """Weights times values; other products with scores are not followed further."""
        chosen = [
            attention for attention in self._scores(left) if attention.logits is not None or attention.of_sequences
        ]
        if right is None and is_learned(laid.product.right):
            for scores in chosen:
                scores.mixed |= scores.softened is None
        if right is None or right.tokens is None or not chosen:
            return None if right is None or right.tokens is None else _projected(laid, None, right)
        assert left.pairs is not None
        pairs = laid.left(left.pairs)
        tokens = torch.full(pairs.shape[:-1], UNKNOWN)
        for scores in chosen:
            along = scores.along(pairs, -1)
            if scores.weights is None:
                scores.multiply(scores.gathered(laid.product.left, left.pairs, 0.0))
                scores.keys = "left" if along == "left" else "right"
                if along in ("left", "right", "none"):
                    scores.values = scores.rows_weighted(pairs, laid.right(laid.product.right))
                scores.note("values", where)
            tokens = torch.where(tokens == UNKNOWN, scores.query_tokens(pairs[..., 0], along == "left"), tokens)
        whole = tokens.unsqueeze(-1).expand(*laid.lead, laid.rows, laid.columns)
        return TensorShadow(laid.out(whole), depth=1 + max(left.depth, right.depth))

    def _summed(self, factors: tuple[Tensor, Tensor], shape: torch.Size, axes: Sequence[int], call: _Call) -> None:
        """A product written as an elementwise product and a sum."""
        product, *cuts = outer(*factors, shape, axes)
        own = [self.of(factor) for factor in factors]
        if any(shadow is None for shadow in own):
            return
        left, other = (shadow.map(cut) for shadow, cut in zip(own, cuts, strict=True) if shadow is not None)
        self._product(product, left, other, call)

    def _written(self, call: _Call) -> None:
        """`tensor[index] = value`: the shadow is written to in the same way, so that its views see it, too."""
        tensor, index, value = call.args
        own, source = self.of(tensor), self.of(value)
        if own is not None and own.pairs is not None and source is None:
            for scores in self._scores(own):
                scores.note("mask", call.where)
        if source is None:
            return
        made = own or TensorShadow()
        tokens = _stamped(made.tokens, tensor, index, source.tokens)
        pairs = _stamped(made.pairs, tensor, index, source.pairs)
        depth = max(made.depth, source.depth)
        self.know(tensor, TensorShadow(tokens, pairs, made.scores | source.scores, depth=depth, scaled=source.scaled))

    def _fused(self, scores: ScoreProduct, query: TensorShadow | None, result: Tensor, where: Location | None) -> None:
        """Attention in one call, all of it on one line."""
        if where is not None:
            scores.lines = dict.fromkeys(("scores", "scale", "mask", "softmax", "dropout", "values"), where)
        self._pairs += scores.count
        self.scores.append(scores)
        if query is not None and query.tokens is not None:
            tokens = agreed_along(query.tokens, [-1], True).expand(result.shape)
            self.know(result, TensorShadow(tokens, depth=scores.depth + 1))

    def told(self, make: Callable[[int, Known, ObservedCall], ScoreProduct], call: ObservedCall) -> None:
        """Record a call of Saccade's operator, which PyTorch's modes do not see. Calls that read no input, as in the
        encoder of a fixed source, are not followed."""
        read = any(self.of(tensor) is not None for tensor in (call.query, call.key, call.value))
        if not read or torch._C._are_functorch_transforms_active():
            return
        where = location_here()
        with torch.no_grad(), torch._C.DisableTorchFunction():
            scores = make(self._pairs, self.of, call)
            self._fused(scores, self.of(call.query), call.out, where)

    def _scores(self, shadow: TensorShadow) -> list[ScoreProduct]:
        return [self.scores[number] for number in sorted(shadow.scores)] if shadow.pairs is not None else []


def _softened(scores: ScoreProduct, pairs: Tensor, call: _Call, before: Tensor) -> None:
    """A shift of rows, a softmax or an exponential of scores, which were `before`."""
    if call.name in EXP and scores.logits is not None:
        return
    own = scores.gathered(before, pairs, -torch.inf)
    if call.name in MINUS:
        scores.unshifted = own
    elif call.name in SOFTMAX:
        if scores.unshifted is not None and _only_shifted(scores.unshifted, own):
            own = scores.unshifted
        at = softmax_axis_of(call.args, call.kwargs, call.given[0])
        axis = scores.along(pairs, at)
        weights = scores.gathered(call.result.exp() if call.name == "log_softmax" else call.result, pairs, 0.0)
        scores.joined = bool(((pairs == UNKNOWN).sum(at) == 1).all())
        scores.soften(own, weights, axis, call.where)
    else:
        scores.logits = own if scores.unshifted is None else scores.unshifted
        scores.note("softmax", call.where)


def _only_shifted(before: Tensor, after: Tensor) -> bool:
    """Whether each row of scores was shifted by one number, which does not change a softmax. A sink refers to the
    scores before the shift."""
    # of masked scores (-inf, or the least number) the shift is lost
    apart = (before - after).double().masked_fill(after < -1e30, torch.nan)
    low, high = apart.nan_to_num(nan=torch.inf).amin(-1), apart.nan_to_num(nan=-torch.inf).amax(-1)
    return bool((high - low <= 1e-4 * (1 + high.abs())).all())


def _is_score(shadow: TensorShadow | None) -> bool:
    return shadow is not None and shadow.pairs is not None


def _projected(laid: ProductLayout, left: TensorShadow | None, right: TensorShadow | None) -> TensorShadow | None:
    """The shadow of a product with a parameter matrix: row i belongs to the token of the input's row i."""
    shadow = left if left is not None else right
    if shadow is None or shadow.tokens is None:
        return None
    tokens = agreed_along((laid.left if left is not None else laid.right)(shadow.tokens), [-1], True)
    tokens = tokens if left is not None else tokens.transpose(-2, -1)
    return TensorShadow(laid.out(tokens.expand(*laid.lead, laid.rows, laid.columns)), depth=shadow.depth)


def _stamped(own: Tensor | None, tensor: Tensor, index: Any, source: Tensor | None) -> Tensor | None:
    if own is None and source is None:
        return None
    made = torch.full(tensor.shape, UNKNOWN) if own is None else own if 0 not in own.stride() else own.clone()
    made[index] = UNKNOWN if source is None else source
    return made

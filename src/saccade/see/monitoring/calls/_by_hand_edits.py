"""Edits of attention written by hand: the results of its softmax and its last product are recomputed.

Logits of other queries and keys are computed by the model's own functions: each function from the product to the
softmax is called again.

Shape legend: ... leading axes, B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D / Dv widths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_map

from ....interception._tracing import View
from ....operator import _observers
from ....operator._call import AttentionCall, GraphTensor, ObservedCall
from ._observed_products import AxisLayout, ObservedProduct, alike


class FunctionRun(NamedTuple):
    """One function that a model called."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def again(self, old: Tensor, new: Tensor) -> Any:
        """The call repeated with one tensor replaced by another."""
        args, kwargs = tree_map(lambda leaf: new if leaf is old else leaf, (self.args, dict(self.kwargs)))
        return self.func(*args, **kwargs)


_MOST_FUNCTIONS = 32  # from the product to the softmax


class ScoresReplay(NamedTuple):
    """The functions that computed scores, to be called again: their product, and each later function with its input."""

    product: FunctionRun
    since: tuple[tuple[FunctionRun, Tensor], ...] = ()

    def then(self, run: FunctionRun, scores: Tensor) -> ScoresReplay | None:
        """This replay and one more function, whose input was `scores`. None once there are 32: features that only look
        like scores would keep the tensors of all layers in memory."""
        return None if len(self.since) == _MOST_FUNCTIONS else self._replace(since=(*self.since, (run, scores)))

    def again(self, own: ObservedProduct, left: Tensor | None, right: Tensor | None) -> Tensor:
        """The scores of other factors, each in the shape of the model's; None is the model's own factor."""
        run = self.product
        for factor, new in zip(own.factors, (left, right), strict=True):
            if new is not None:
                args, kwargs = tree_map(_swap(factor, new), (run.args, dict(run.kwargs)))
                run = FunctionRun(run.func, args, kwargs)
        scores = run.func(*run.args, **run.kwargs)
        for run, given in self.since:
            scores = run.again(given, scores)
        return scores


def _swap(old: Tensor, new: Tensor) -> Any:
    return lambda leaf: new if leaf is old else leaf


def edited_weights(
    edits: _observers.CallEdits,
    own: ObservedProduct,
    replay: ScoresReplay | None,
    layout: AxisLayout,
    softmax: FunctionRun,
    result: Tensor,
) -> Tensor:
    """The weights of a softmax, with the edits.

    Args:
        own: the product of queries and keys.
        replay: computes the logits of other factors; None if that is unknown.
        softmax: the call that returned `result`.
    """
    left, right = (view(factor) for view, factor in zip(own.views, own.factors, strict=True))
    together = alike([left, right])
    query, key = layout.queries(together[0]), layout.keys(together[1])
    given: Tensor = softmax.args[0] if softmax.args else softmax.kwargs["input"]
    shape = (layout.batch, layout.heads, *result.shape[-2:])

    def logits(other_query: Tensor, other_key: Tensor) -> Tensor:
        if other_query is query and other_key is key:
            return given.reshape(shape)
        if replay is None:
            raise ValueError(
                "intervene: queries and keys of this attention cannot be changed: its model changes scores in place, "
                f"adds a second product to them, or calls more than {_MOST_FUNCTIONS} functions on them"
            )
        new_left = None if other_query is query else _as_factor(other_query, left, own.views[0], own.factors[0])
        new_right = None if other_key is key else _as_factor(other_key, right, own.views[1], own.factors[1])
        return replay.again(own, new_left, new_right).reshape(shape)

    def normalised(logits: Tensor) -> Tensor:
        weights: Tensor = softmax.again(given, logits.reshape(given.shape))
        return weights.reshape(shape)

    dense = _observers.DenseWeights(result.reshape(shape), logits, normalised)
    return edits.weights(AttentionCall(query, key, key), dense).reshape(result.shape)


def edited_output(
    edits: _observers.CallEdits,
    call: ObservedCall,
    product: ObservedProduct,
    layout: AxisLayout,
    run: FunctionRun,
    result: Tensor,
) -> tuple[Tensor, ObservedCall | None]:
    """The product of weights and values, with the edits, and the call for observers."""
    view, factor = product.views[1], product.factors[1]
    right = view(factor).transpose(-2, -1)  # (..., Lk, Dv)
    value = layout.keys(alike([product.views[0](product.factors[0]), right])[1])
    rows = product.out(result)  # (..., Lq, Dv)

    def with_value(other: Tensor) -> Tensor:
        new = _as_factor(other, right, lambda tensor: view(tensor).transpose(-2, -1), factor)
        return layout.queries(product.out(run.again(factor, new)))

    edited = edits.output(replace(call, value=value), layout.queries(rows), with_value)
    out = _permuted_back(edited.out.reshape(rows.shape), product.out, result.dim())
    if edited.call is None:
        return out, None
    shown = call.graph_tensors()["out"]
    used = {**call.graph_tensors(), "out": GraphTensor(out, shown.seen_as)}
    changed = replace(call, **edited.call.scoring(), query=edited.call.query.detach(), key=edited.call.key.detach())
    return out, replace(changed, value=edited.call.value.detach(), out=edited.out.detach(), used=used)


def _as_factor(tensor: Tensor, visible: Tensor, view: View, factor: Tensor) -> Tensor:
    """A tensor (B, H, L, D) reshaped to a factor of the model's matrix product, of which `visible` is a view."""
    if tensor.numel() != visible.numel():
        raise ValueError(
            f"intervene: a factor of shape {tuple(factor.shape)} is shared by several heads or items, and cannot be "
            "changed for some of them"
        )
    return _permuted_back(tensor.reshape(visible.shape), view, factor.dim())


_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


def _permuted_back(tensor: Tensor, view: View, axes: int) -> Tensor:
    """The inverse of `view`, a permutation of axes."""
    sizes = _PRIMES[:axes]
    permuted = view(tensor.new_empty(1).expand(*sizes)).shape
    return tensor.permute([list(permuted).index(size) for size in sizes])

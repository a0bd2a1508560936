"""Random draws of a target, and whether they reach scores, weights or values, found by tracing one call.

A dropout is known by what its draw reaches, and not by its name.

Shape legend: (..., Lq, Lk) of weights, as they enter the product with the values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...interception._tracing import TensorLabels, memory_of, tensors_in
from ...support._restored import seeded
from ..findings._finding import Location
from ..subject._inputs import NamedInputs
from ..subject._operations import EagerOperations, location_here
from ..subject._subject import Subject

# Operations that only lay numbers out anew: made to the clean weights, too, so that the two stay comparable.
_LAYOUT = frozenset(
    """view _unsafe_view reshape permute transpose t expand clone unsqueeze squeeze slice select
    _to_copy detach alias""".split()
)
UNIFORM = {"rand", "rand_like", "uniform_", "uniform", "_scaled_dot_product_flash_attention_for_cpu"}
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "dot"}
_SOFTMAX = {"_softmax", "_safe_softmax"}
_LIKE_EMPTY = {"empty_like", "zeros_like", "ones_like", "empty", "zeros", "ones", "new_empty", "new_zeros", "new_ones"}


@dataclass(frozen=True)
class RandomDraw:
    """One operation that drew random numbers."""

    name: str  # "bernoulli_", "rand_like", "native_dropout"
    location: Location | None


def drops(draws: tuple[RandomDraw, ...]) -> bool:
    """Whether the draw is dropout, not noise."""
    return any("bernoulli" in draw.name or "dropout" in draw.name or draw.name in UNIFORM for draw in draws)


@dataclass(frozen=True, eq=False)
class WeightedValues:
    """Weights times values."""

    weights: Tensor  # (..., Lq, Lk) that multiplied the values
    clean: Tensor | None  # the same as the softmax gave them
    draw: RandomDraw | None  # what was drawn for the weights, after the softmax
    on_values: RandomDraw | None  # what was drawn for the values


@dataclass(frozen=True, eq=False)
class FollowedCall:
    """A call and its random draws."""

    out: Tensor
    draws: tuple[RandomDraw, ...]
    before_softmax: tuple[tuple[RandomDraw, str], ...]  # draws that the softmax of weights saw, and on what: "scores"
    # or "product"
    products: tuple[WeightedValues, ...]


@dataclass(frozen=True, eq=False)
class _TensorLabel:
    """The known origin of a tensor."""

    draw: RandomDraw | None = None
    through_product: bool = False  # the draw went into a product that gave this
    clean: Tensor | None = None  # these are weights, and so they came out of the softmax
    exponential: bool = False
    before: tuple[RandomDraw, str] | None = None  # what the softmax that gave these weights saw


_NONE = _TensorLabel()


def follow_randomness(subject: Subject, inputs: NamedInputs, *, seed: int = 0, **masks: Any) -> FollowedCall:
    """Call the subject, in the mode that it is in, with PyTorch's generator at `seed`."""
    mode = _RandomnessMode(subject)
    with torch.no_grad(), seeded(seed), mode:
        out = subject(inputs, **masks).out
    return FollowedCall(out, tuple(mode.draws), tuple(mode.before_softmax), tuple(mode.products))


class _RandomnessMode(EagerOperations):
    def __init__(self, subject: Subject):
        super().__init__()
        module = subject.module
        tensors = () if module is None else (*module.parameters(), *module.buffers())
        self._learned = {memory_of(tensor) for tensor in tensors if tensor.numel()}
        self._labels = TensorLabels[_TensorLabel]()
        self.draws: list[RandomDraw] = []
        self.before_softmax: list[tuple[RandomDraw, str]] = []
        self.products: list[WeightedValues] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        taken, given = list(tensors_in([args, kwargs])), list(tensors_in(result))
        label = self._label(func, args, kwargs or {}, taken, given)
        for tensor in given:
            if label is not _NONE or tensor in self._labels:
                self._labels.put(tensor, label)
        return result

    def _label(self, func: Any, args: Any, kwargs: Any, taken: list[Tensor], given: list[Tensor]) -> _TensorLabel:
        name = func.overloadpacket.__name__
        labels = [self._labels.get(tensor) or _NONE for tensor in taken]
        if name in _LIKE_EMPTY or not given:
            return _NONE
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(name, args, kwargs):
            return self._drawn(name, labels)
        if name in _PRODUCTS or name.startswith("convolution"):
            return self._product(taken, labels)
        if name in _SOFTMAX:
            return self._softmax(labels[0], given[0])
        if name in _LAYOUT and len(taken) == 1:
            clean = labels[0].clean
            again = None if clean is None else func(clean, *args[1:], **kwargs)
            return replace(labels[0], clean=again)
        return self._pointwise(name, labels, given[0])

    def _drawn(self, name: str, labels: list[_TensorLabel]) -> _TensorLabel:
        draw = RandomDraw(name, location_here())
        self.draws.append(draw)
        dropped = labels[0] if name == "native_dropout" else _NONE
        return _TensorLabel(draw, clean=dropped.clean, before=dropped.before)

    def _product(self, taken: list[Tensor], labels: list[_TensorLabel]) -> _TensorLabel:
        if any(memory_of(tensor) in self._learned for tensor in taken):
            return _NONE
        factors, labels = taken[-2:], labels[-2:]
        for at, label in enumerate(labels):
            if label.clean is not None:
                other = labels[1 - at]
                self.before_softmax += [] if label.before is None else [label.before]
                self.products.append(WeightedValues(factors[at], label.clean, label.draw, other.draw))
                return _NONE
        draw = next((label.draw for label in labels if label.draw is not None), None)
        same = labels[0].draw is labels[1].draw  # the input itself was dropped, and nothing projected it
        return _NONE if draw is None or same else _TensorLabel(draw, through_product=True)

    def _softmax(self, label: _TensorLabel, out: Tensor) -> _TensorLabel:
        if label.draw is None or not drops((label.draw,)):
            return _TensorLabel(clean=out)
        return _TensorLabel(clean=out, before=(label.draw, "product" if label.through_product else "scores"))

    def _pointwise(self, name: str, labels: list[_TensorLabel], out: Tensor) -> _TensorLabel:
        if name in ("exp", "exp2", "exp_"):
            return _TensorLabel(labels[0].draw, labels[0].through_product, exponential=True)
        if name in ("div", "div_", "mul") and len(labels) == 2 and all(label.exponential for label in labels):
            merged = _merged(labels)
            return self._softmax(_TensorLabel(merged.draw, merged.through_product), out)
        if name in ("_log_softmax", "logsumexp"):
            return _NONE
        merged = _merged(labels)
        same = merged.clean is not None and merged.clean.shape == out.shape
        return merged if same else replace(merged, clean=None, before=None)  # a mean of weights is no weights


def _merged(labels: list[_TensorLabel]) -> _TensorLabel:
    labels = [label for label in labels if label is not _NONE]
    if not labels:
        return _NONE
    draw = next((label.draw for label in labels if label.draw is not None), None)
    weights = next((label for label in labels if label.clean is not None), _NONE)
    through, exponential = any(label.through_product for label in labels), any(label.exponential for label in labels)
    return _TensorLabel(draw, through, weights.clean, exponential, weights.before)


def _draws(name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operation that may draw does so in this call."""
    if name == "native_dropout":
        return bool(args[2]) and args[1] > 0
    if "scaled_dot_product" in name:
        given = kwargs.get("dropout_p", next((path for path in args[3:] if type(path) is float), 0.0))
        return bool(given > 0)
    return True

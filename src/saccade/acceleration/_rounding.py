"""What rounding to 8 bits does to a model, measured on samples, and which layers stay in float so that a bound holds.

Rounding errors of layers are small and nearly independent, so their divergences, and the distances of their cosines
from 1, nearly add up. That gives the order in which layers are tried; each decision is a measurement of the outputs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..operator._products import Product, comparing, unrounded
from ..support._restored import evaluating
from ._effects import same_random_numbers
from ._output_errors import OutputError, Outputs, Samples, inputs_of, metric_of
from ._thread import THREAD

T = TypeVar("T")

_TINY = 1e-12  # stands for an allowed error of 0
_SLACK = 1e-9  # of a bound: 0.90 - 0.89 is more than 0.01 in floating point
_NAMED = 3  # layers in a printed report


@dataclasses.dataclass(frozen=True)
class Bounds:
    """How far outputs may be from those of the float model."""

    max_kl: float | None = None
    min_cosine: float | None = None
    max_drop: float | None = None

    def __post_init__(self) -> None:
        _check("max_kl", self.max_kl, "a finite number above 0", lambda x: 0 < x < math.inf)
        _check("min_cosine", self.min_cosine, "a number above -1 and at most 1", lambda x: -1 < x <= 1)
        _check("max_drop", self.max_drop, "a finite number of 0 or more", lambda x: 0 <= x < math.inf)

    def given(self) -> dict[str, float]:
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.given().items())

    def excess(self, error: OutputError) -> float:
        """The error as a multiple of the allowed one, for the bound that it uses up most; without bounds the error."""
        far = None if error.worst_cosine is None else 1 - error.worst_cosine
        farthest = None if self.min_cosine is None else 1 - self.min_cosine
        pairs = (error.kl, self.max_kl), (far, farthest), (error.drop, self.max_drop)
        used = [off / max(most, _TINY) for off, most in pairs if off is not None and most is not None]
        used = used or [off for off, _ in pairs if off is not None][:1]
        return math.inf if any(map(math.isnan, used)) else max(used)

    def hold(self, error: OutputError) -> bool:
        return self.excess(error) <= 1 + _SLACK


@dataclasses.dataclass(frozen=True)
class LayerRounding:
    """One linear layer in 8 bits.

    Attributes:
        name: of the module in the model; "product (logits)" is that by a shared token embedding.
        error: of its products in 8 bits, |int8 - float| / |float| over all real tokens, for the float model's inputs.
        share: of the multiply-adds of all these layers, an estimate of what it costs to leave it in float.
        alone: the outputs if only this layer is in 8 bits; None where a bound holds without knowing it.
        in_float: whether it is left in float.

    Example:
        >>> from saccade.acceleration import LayerRounding, OutputError
        >>> layer = LayerRounding("mlp.down", error=0.007, share=0.25, alone=OutputError(kl=2e-4), in_float=False)
        >>> layer.alone.kl
        0.0002
    """

    name: str
    error: float
    share: float
    alone: OutputError | None
    in_float: bool


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Errors of a model's linear layers and outputs in 8 bits, on the samples.

    Attributes:
        layers: the linear layers that the samples call, the most harmful first: by the outputs with this layer alone in
            8 bits, or by their own error where that is not measured.
        outputs: the error of the outputs in the block.
        all_int8: the same with every layer in 8 bits.
        metric: its value in float and in the block; None without a metric.
        rows: real tokens or items of the samples.
        passes: how often the samples were run.
        uncalled: layers in 8 bits that no sample calls, so that nothing is known about them.
        bounds: in words; empty if there are none.

    Example:
        >>> import torch, saccade
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(192, 192), torch.nn.Linear(192, 256)), torch.randn(7, 192)
        >>> with saccade.accelerate(model, weights="int8", samples=[x], max_kl=0.1) as run:
        ...     pass
        >>> run.rounding.outputs.kl < 0.1, [layer.in_float for layer in run.rounding.layers]
        (True, [False, False])
    """

    layers: tuple[LayerRounding, ...]
    outputs: OutputError
    all_int8: OutputError
    metric: tuple[float, float] | None
    rows: int
    passes: int
    uncalled: tuple[str, ...]
    bounds: str

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        kept = [layer for layer in self.layers if layer.in_float]
        of = f"{self.rows:,} tokens or items" if self.rows else "the metric"
        yield f"rounding to int8, measured by {of} in {self.passes} passes:"
        yield f"    {len(self.layers)} layers in int8: {self.all_int8}"
        if kept:
            share = sum(layer.share for layer in kept)
            yield f"    {len(kept)} of them in float ({share:.1%} of the multiply-adds): {self.outputs}"
            yield "    in float: " + ", ".join(f"{layer.name} ({layer.share:.1%})" for layer in kept)
        elif self.bounds:
            yield f"    none in float: {self.bounds} holds"
        for layer in self.layers[:_NAMED]:
            alone = "" if layer.alone is None else f", alone in int8: {str(layer.alone).partition(',')[0]}"
            yield f"    harm by {layer.name}: own error {layer.error:.2g}{alone}"
        if self.uncalled:
            yield f"    {len(self.uncalled)} more in int8 that were not called"


class Measurement:
    """Measures models as `saccade.accelerate` was asked to, each time anew: weights may have changed.

    Raises:
        TypeError, ValueError: samples or a metric that are none, or that a bound lacks.
    """

    def __init__(self, bounds: Bounds, samples: Any, metric: Callable[[Any], float] | None):
        of_outputs = [name for name in bounds.given() if name != "max_drop"]
        if of_outputs and samples is None:
            raise ValueError(f"samples: {of_outputs[0]} needs inputs of the model to be measured with, got None")
        if bounds.max_drop is not None and metric is None:
            raise ValueError("metric: max_drop needs a function of the model to a number, got None")
        if metric is not None and not callable(metric):
            raise TypeError(f"metric: expected a function of the model, got {type(metric).__name__}")
        self.bounds, self.metric = bounds, metric
        self.samples = Samples(() if samples is None else inputs_of(samples), bounds.max_kl is not None)

    def __call__(self, model: nn.Module, products: Mapping[Product, str]) -> tuple[Rounding, Collection[Product]]:
        """Measure an accelerated model with `products` in 8 bits, and choose which of them stay in float.

        Raises:
            ValueError: a sample that the model cannot run, outputs without what a bound is about, or a bound that no
                selection of layers meets.
        """
        trial = _Trial(self, model, products)
        with torch.no_grad(), evaluating(model), THREAD.held.uncounted():
            trial.observe()
            with THREAD.held.unproved():
                whole = outputs = trial.error()
                alone: dict[Product, OutputError] = {}
                in_float: set[Product] = set()
                if trial.layers and not (self.bounds.given() and self.bounds.hold(whole)):
                    alone = {layer: trial.error(trial.layers.keys() - {layer}) for layer in trial.layers}
                    if self.bounds.given():
                        in_float = trial.chosen(alone)
                        outputs = trial.error(in_float)
        return trial.report(alone, in_float, outputs, whole), in_float


@dataclasses.dataclass
class _Sums:
    """Sums over one layer's products: squares of their errors and of themselves, and multiply-adds."""

    off: float = 0.0
    size: float = 0.0
    work: int = 0

    @property
    def error(self) -> float:
        return math.sqrt(self.off / self.size) if self.size else math.inf if self.off else 0.0


class _Trial:
    """An accelerated model; each pass over the samples chooses which of its layers read copies in 8 bits.

    Attributes:
        layers: those that the samples call. exact, before: outputs and metric in float.
    """

    def __init__(self, given: Measurement, model: nn.Module, products: Mapping[Product, str]):
        self.samples, self.metric, self.bounds = given.samples, given.metric, given.bounds
        self.model, self.products = model, products
        self.layers: dict[Product, _Sums] = {}
        self.exact: list[Outputs] = []
        self.before: float | None = None
        self.passes = 0

    def observe(self) -> None:
        """Run the model in float: its layers prove themselves, then each layer's own error is measured.

        In a first pass layers of padded batches prove themselves, in a second what is inside of them.
        """
        with unrounded():
            self.exact, _ = self._pass(list)
            self._pass(lambda again: self.samples.check_equal(self.exact, again))
        with THREAD.held.unproved(), comparing(self._compare):
            self.exact, self.before = self._pass(list)

    def error(self, in_float: Collection[Product] = ()) -> OutputError:
        """Error of the outputs with these layers in float."""
        for product in self.products:
            product.weights = None if product in in_float else "int8"
        error, now = self._pass(
            lambda outputs: self.samples.error(self.exact, outputs) if self.exact else OutputError()
        )
        return error if self.before is None or now is None else dataclasses.replace(error, drop=self.before - now)

    def chosen(self, alone: Mapping[Product, OutputError]) -> set[Product]:
        """Layers to leave in float so that the bounds hold: those that harm most for their multiply-adds.

        The fewest of them in this order are sought by halving; then each is put back if the bounds hold without it.
        """
        cost = {layer: max(sums.work, 1) for layer, sums in self.layers.items()}
        excess = {layer: self.bounds.excess(error) for layer, error in alone.items()}
        order = sorted(alone, key=lambda x: (excess[x] / cost[x], self.layers[x].error / cost[x]), reverse=True)
        best = min(alone, key=lambda x: excess[x])
        if not self.bounds.hold(alone[best]):
            raise ValueError(
                f"{self.bounds}: no selection of layers in int8 meets it; nearest is {self.products[best]} alone in "
                f"int8, with {alone[best]}"
            )
        too_few, enough = 0, len(order)
        while enough - too_few > 1:
            count = (too_few + enough) // 2
            if self.bounds.hold(self.error(order[:count])):
                enough = count
            else:
                too_few = count
        in_float = set(order[:enough])
        for layer in reversed(order[: enough - 1]):
            if self.bounds.hold(self.error(in_float - {layer})):
                in_float.remove(layer)
        return in_float

    def report(
        self,
        alone: Mapping[Product, OutputError],
        in_float: Collection[Product],
        outputs: OutputError,
        whole: OutputError,
    ) -> Rounding:
        work = sum(sums.work for sums in self.layers.values())
        layers = [
            LayerRounding(self.products[x], sums.error, sums.work / work, alone.get(x), x in in_float)
            for x, sums in self.layers.items()
        ]

        def harm(layer: LayerRounding) -> tuple[float, float]:
            return 0.0 if layer.alone is None else self.bounds.excess(layer.alone), layer.error

        return Rounding(
            layers=tuple(sorted(layers, key=harm, reverse=True)),
            outputs=outputs,
            all_int8=whole,
            metric=None if self.before is None or outputs.drop is None else (self.before, self.before - outputs.drop),
            rows=sum(len(vectors) for _, vectors in self.exact),
            passes=self.passes,
            uncalled=tuple(name for product, name in self.products.items() if product not in self.layers),
            bounds=str(self.bounds),
        )

    def _compare(self, product: Product, x: Tensor, exact: Tensor, rounded: Tensor) -> None:
        exact, rounded = self.samples.real_rows(exact), self.samples.real_rows(rounded)
        sums = self.layers.setdefault(product, _Sums())
        sums.off += float((rounded.double() - exact.double()).square().sum())
        sums.size += float(exact.double().square().sum())
        sums.work += exact.numel() * x.shape[-1]

    def _pass(self, read: Callable[[Iterator[Outputs]], T]) -> tuple[T, float | None]:
        """Read the outputs of a pass, and the metric, with the same random numbers in each pass."""
        self.passes += 1
        with same_random_numbers():
            result = read(self.samples.outputs(self.model))
            return result, None if self.metric is None else metric_of(self.model, self.metric)


def _check(name: str, value: Any, expected: str, fits: Callable[[Any], bool]) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and fits(value)):
        raise ValueError(f"{name}: expected {expected}, got {value!r}")

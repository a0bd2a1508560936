"""The records of one attention call, and of its gradients.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from ...operator._statistics import Statistics


@dataclass(frozen=True)
class CallSite:
    """A place of an attention call in a model. It is the same in every step.

    Attributes:
        name: `path`, and `path#2`, `path#3`, ... for the calls after the first that a module makes in one step.
        path: of the innermost module in whose forward the call happens, as `model.named_modules()` names it; "" is
            the model itself.
        order: the number of the call among those of that module within one step, from 1.
        layer: the first number in the path ("encoder.layers.3.attn" is layer 3). A module that runs several times in
            one step, for example with shared weights, counts on from there. Without a number in the path: the number of
            paths with attention before it.
        source: the called function or module: "saccade.attention", "F.scaled_dot_product_attention", ...

    Example:
        >>> import torch, saccade
        >>> config = saccade.nn.BlockConfig(saccade.nn.AttentionConfig(16, heads=4))
        >>> model = saccade.nn.Encoder(config, layers=2)
        >>> with saccade.watch(model, layers=lambda site, step: bool(print(site.name, site.layer, site.source))):
        ...     _ = model(torch.randn(2, 5, 16))
        blocks.0.attention 0 saccade.attention
        blocks.1.attention 1 saccade.attention
    """

    name: str
    path: str
    order: int
    layer: int
    source: str


@dataclass(frozen=True, eq=False)
class CallRecord:
    """One attention call of a forward pass. `on_record` of `saccade.watch` receives it right after the call.

    Attributes:
        name, path, layer, order: of its `CallSite`.
        step: number of the forward pass of the model, from 0; steps that are not observed count.
        statistics: of the call, see `saccade.statistics`.
        out_norm: (Hq,) mean over the counted rows of the L2 norm of the output.

    Example:
        >>> import torch, saccade
        >>> model, records = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4)), []
        >>> with saccade.watch(model, on_record=records.append):
        ...     _ = model(torch.randn(2, 5, 16))
        >>> records[0].step, records[0].statistics.entropy.shape, records[0].out_norm.shape
        (0, torch.Size([2, 4, 5]), torch.Size([4]))
    """

    name: str
    path: str
    layer: int
    order: int
    step: int
    statistics: Statistics
    out_norm: Tensor


@dataclass(frozen=True, eq=False)
class GradientRecord:
    """The gradients of one backward pass through one call, as `on_gradients` of `saccade.watch` receives them.

    Attributes:
        name, path, layer, order, step: of the call, as in its `CallRecord`.
        gradients: by "query", "key", "value", "out", the L2 norm of the gradient by head: (Hq,) for query and out, over
            counted rows, (Hkv,) for key and value, over the keys that counted rows may see; at least float32. A tensor
            without a gradient, or that the pass did not reach, is missing.

    Example:
        >>> import torch, saccade
        >>> model, records = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4, kv_heads=2)), []
        >>> with saccade.watch(model, gradients=True, on_gradients=records.append):
        ...     model(torch.randn(2, 5, 16)).square().mean().backward()
        >>> gradients = records[0].gradients
        >>> sorted(gradients), gradients["query"].shape, gradients["key"].shape
        (['key', 'out', 'query', 'value'], torch.Size([4]), torch.Size([2]))
    """

    name: str
    path: str
    layer: int
    order: int
    step: int
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Unobserved:
    """Attention that was not observed, or an unknown property: how often, and why.

    Example:
        >>> from saccade.monitoring import Unobserved
        >>> missed = Unobserved(3, "the module is TorchScript")  # watched.unobserved has one for each name
        >>> missed.count
        3
    """

    count: int
    reason: str


ROWS_UNKNOWN = "some keys are padding, and it is unknown whether the queries are the same tokens: all query rows count"


class StepCounts:
    """Counts of steps, and of attention that was not observed in them."""

    def __init__(self) -> None:
        self.steps = 0
        self.observed = 0
        self.passed_over = 0  # calls that `layers` did not match
        self.unobserved: dict[str, Unobserved] = {}
        self.unknown: dict[str, Unobserved] = {}

    def missed(self, name: str, reason: str) -> None:
        """Count attention that was not observed."""
        _count(self.unobserved, name, reason)

    def not_known(self, name: str, reason: str) -> None:
        """Count an observed call with an unknown property."""
        _count(self.unknown, name, reason)


def _count(table: dict[str, Unobserved], name: str, reason: str) -> None:
    before = table[name].count if name in table else 0
    table[name] = Unobserved(before + 1, reason)


OnRecord = Callable[[CallRecord], None]
OnGradients = Callable[[GradientRecord], None]

"""Feature maps of linear attention: features of queries and keys whose product approximates exp(q . k).

Shape legend: D width of a head, M = `width(D)` number of features.

Each is a frozen value and a function (..., D) -> (..., M). The attention of a map is sum_j phi(q).phi(k_j) v_j /
sum_j phi(q).phi(k_j): the state of a head holds M x Dv numbers, and M decides how much of the past can be told apart
(Arora et al., 2024, "Simple linear attention language models balance the recall-throughput tradeoff").

Example:
    >>> import torch, saccade
    >>> x = torch.rand(1, 2, 5, 4)
    >>> relu = saccade.variants.feature_maps.Relu()
    >>> saccade.variants.linear_attention(x, x, x, feature_map=relu).shape
    torch.Size([1, 2, 5, 4])
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

__all__ = ["FeatureMap", "named"]


class FeatureMap(ABC):
    """The base class of feature maps: features (..., M) of queries or keys (..., D). Abstract.

    Example:
        >>> import torch
        >>> from saccade.variants.feature_maps import NAMES
        >>> sorted(NAMES)
        ['dpfp', 'dpfp-2', 'dpfp-3', 'elu+1', 'relu', 'softmax', 'taylor']
        >>> NAMES["relu"](torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Features (..., M) of (..., D), in the dtype of x."""

    @abstractmethod
    def width(self, head: int) -> int:
        """M for heads of that width."""


class _EluPlusOne(torch.autograd.Function):
    """Keeps nothing but the features: where x > 0 they are above 1 and the slope is 1, elsewhere they are the slope."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clamp(max=0).exp_().add_(x.relu())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (features,) = ctx.saved_tensors
        return gradient * features.clamp(max=1)


@dataclass(frozen=True)
class EluPlusOne(FeatureMap):
    """elu(x) + 1: x + 1 above 0, exp(x) below (Katharopoulos et al., 2020, equation 7). M = D.

    `F.elu(x) + 1` loses all digits below x = -17 in float32, where it gives 0; exp(x) does not.

    Example:
        >>> import torch, saccade
        >>> saccade.variants.feature_maps.EluPlusOne()(torch.tensor([-1.0, 0.0, 2.0]))
        tensor([0.3679, 1.0000, 3.0000])
    """

    def __call__(self, x: Tensor) -> Tensor:
        features: Tensor = _EluPlusOne.apply(x)
        return features

    def width(self, head: int) -> int:
        return head


@dataclass(frozen=True)
class Relu(FeatureMap):
    """max(x, 0) (Kasai et al., 2021, "Finetuning Pretrained Transformers into RNNs", without its projection). M = D.

    Features can vanish. A query gives 0 if all its features vanish, or if it shares none with a key.

    Example:
        >>> import torch, saccade
        >>> saccade.variants.feature_maps.Relu()(torch.tensor([-1.0, 0.0, 2.0]))
        tensor([0., 0., 2.])
    """

    def __call__(self, x: Tensor) -> Tensor:
        return x.relu()

    def width(self, head: int) -> int:
        return head


@dataclass(frozen=True)
class Softmax(FeatureMap):
    """softmax(x) and softmax(-x) over the features of a token, side by side. M = 2 D.

    The map of Hedgehog (Zhang et al., 2024, "The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax
    Mimicry", section 4). Hedgehog puts learned weights before it: here these are the projections to queries and keys.
    Features are at most 1, and peaked, unlike those of elu(x) + 1.

    Example:
        >>> import torch, saccade
        >>> saccade.variants.feature_maps.Softmax()(torch.zeros(1, 2))
        tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)

    def width(self, head: int) -> int:
        return 2 * head


@dataclass(frozen=True)
class Dpfp(FeatureMap):
    """Products of rectified neighbours, r_i r_(i - n) for n = 1..nu with r = relu([x, -x]). M = 2 D nu.

    DPFP-nu (Schlag et al., 2021, "Linear Transformers Are Secretly Fast Weight Programmers", equation 37): sparse
    and nearly orthogonal, so that more keys can be told apart than the head has dimensions. Features can vanish.

    Args:
        nu: neighbours, at least 1 and less than 2 D.

    Raises:
        TypeError, ValueError: not an int, or outside of this range.

    Example:
        >>> import torch, saccade
        >>> saccade.variants.feature_maps.Dpfp()(torch.tensor([2.0, 3.0]))  # r is 2, 3, 0, 0
        tensor([0., 6., 0., 0.])
    """

    nu: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.nu, bool) or not isinstance(self.nu, Integral):
            raise TypeError(f"nu: expected an int, got {type(self.nu).__name__}")
        if self.nu < 1:
            raise ValueError(f"nu: expected at least 1, got {self.nu}")

    def __call__(self, x: Tensor) -> Tensor:
        self.width(x.shape[-1])
        r = torch.cat([x, -x], -1).relu()
        return torch.cat([r * r.roll(n, -1) for n in range(1, self.nu + 1)], -1)

    def width(self, head: int) -> int:
        if self.nu >= 2 * head:
            raise ValueError(f"nu: expected less than {2 * head}, twice the width of a head, got {self.nu}")
        return 2 * head * self.nu


@dataclass(frozen=True)
class Taylor(FeatureMap):
    """Features of 1 + s + s^2 / 2 at s = x . y / sqrt(D), exp(s) to second order. M = 1 + D + D (D + 1) / 2.

    The map of Based (Arora et al., 2024, equation 3), which keeps heads small (D = 16: 153 features): the state grows
    with D^2. Equal products x_i x_j = x_j x_i stand once, times sqrt(2). The polynomial is at least 1/2, so no sum of
    weights vanishes; but weights of opposite keys do not fall towards 0 as those of softmax do.

    Example:
        >>> import torch, saccade
        >>> taylor = saccade.variants.feature_maps.Taylor()
        >>> x, y = torch.tensor([1.0, 2.0, 0.0, 1.0]), torch.tensor([1.0, 0.0, 0.0, 1.0])
        >>> s = x @ y / 2
        >>> torch.allclose(taylor(x) @ taylor(y), 1 + s + s**2 / 2)
        True
    """

    def __call__(self, x: Tensor) -> Tensor:
        head = x.shape[-1]
        x = x * head**-0.25
        first, second = torch.triu_indices(head, head, device=x.device)
        weight = torch.ones_like(first, dtype=x.dtype).masked_fill(first == second, math.sqrt(0.5))
        return torch.cat([torch.ones_like(x[..., :1]), x, x[..., first] * x[..., second] * weight], -1)

    def width(self, head: int) -> int:
        return 1 + head + head * (head + 1) // 2


NAMES: dict[str, FeatureMap] = {
    "elu+1": EluPlusOne(),
    "relu": Relu(),
    "softmax": Softmax(),
    "dpfp": Dpfp(),
    "dpfp-2": Dpfp(2),
    "dpfp-3": Dpfp(3),
    "taylor": Taylor(),
}
"""How a configuration, which is saved as text, names them."""


def named(name: str) -> FeatureMap:
    """The feature map of that name in `NAMES`.

    Raises:
        TypeError, ValueError: not a name, or an unknown one.

    Example:
        >>> import saccade
        >>> saccade.variants.feature_maps.named("dpfp-2")
        Dpfp(nu=2)
    """
    if not isinstance(name, str):
        raise TypeError(f"feature_map: expected a name, got {type(name).__name__}")
    if name not in NAMES:
        raise ValueError(f"feature_map: expected one of {', '.join(NAMES)}, got {name!r}")
    return NAMES[name]

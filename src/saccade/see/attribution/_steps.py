"""A residual stream as steps, linear once the scales of one run are fixed, and the share of each component.

The stream of one token is a chain: components are added (`Writes`), and maps `x -> A x + c` act on everything added
before (`Diagonal`, `Matrix`). A linear readout M of its end is pulled back through the chain: before a map it is M A,
and where a component v is added, the share of v is M v; all constants M c go to the biases. So shares sum to the
readout exactly, and only M and one row of the stream are held in memory.

Everything is float64 on the CPU. Shape legend: E width of the stream at that place, F width after a map, n components,
D width of a readout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

_NAMES = {"token": "token embedding", "position": "position embedding", "type": "token type embedding"}


class Component(NamedTuple):
    """A part of the model that writes into the residual stream.

    `kind` is "token", "position" or "type" (the parts of the embedding), "head", "feed_forward" or "biases". Heads and
    feed-forward layers have a `layer`, heads a `head`, both counted from 0.

    Example:
        >>> from saccade.attribution import Component
        >>> print(Component("head", layer=2, head=1), "|", Component("feed_forward", layer=0), "|", Component("token"))
        head 2.1 | feed-forward 0 | token embedding
    """

    kind: str
    layer: int | None = None
    head: int | None = None

    def __str__(self) -> str:
        if self.kind == "head":
            return f"head {self.layer}.{self.head}"
        return f"feed-forward {self.layer}" if self.kind == "feed_forward" else _NAMES.get(self.kind, self.kind)


TOKEN, POSITION, TYPE, BIASES = (Component(kind) for kind in ("token", "position", "type", "biases"))


def exact(tensor: Tensor) -> Tensor:
    """A copy in float64 on the CPU."""
    return tensor.detach().to("cpu", torch.float64, copy=True)


class Writes(NamedTuple):
    """Components added to the stream: `vectors` (n, E)."""

    components: tuple[Component, ...]
    vectors: Tensor


class Diagonal(NamedTuple):
    """`x -> gain * (x - mean(x)) + constant`, or without the mean: a norm with its scale fixed. All (E,)."""

    gain: Tensor
    constant: Tensor | None = None
    centred: bool = False

    def pull(self, readout: Tensor) -> Tensor:
        """The readout (D, E) of the output, as one of the input."""
        readout = readout * self.gain
        return readout - readout.mean(-1, keepdim=True) if self.centred else readout


class Matrix(NamedTuple):
    """`x -> matrix x + constant`: (F, E) and (F,)."""

    matrix: Tensor
    constant: Tensor | None = None

    def pull(self, readout: Tensor) -> Tensor:
        """The readout (D, F) of the output, as one (D, E) of the input."""
        return readout @ self.matrix


Step = Writes | Diagonal | Matrix


def bias_step(bias: Tensor | None) -> list[Step]:
    """The step that adds a bias; [] without a bias."""
    return [] if bias is None else [Writes((BIASES,), exact(bias)[None])]


def matrix_step(weight: Tensor, bias: Tensor | None) -> Matrix:
    """A linear layer as a step."""
    return Matrix(exact(weight), None if bias is None else exact(bias))


def norm_steps(norm: nn.Module, x: Tensor) -> list[Step]:
    """A norm with its scale fixed at its value for `x` (E,); [] for the identity.

    Raises:
        TypeError: a norm other than layer, RMS and batch norm.
    """
    if isinstance(norm, nn.Identity):
        return []
    if not isinstance(norm, nn.LayerNorm | nn.RMSNorm | nn.BatchNorm1d):
        raise TypeError(f"model: expected layer, RMS or batch norms, got {type(norm).__name__}")
    weight, bias = (getattr(norm, name, None) for name in ("weight", "bias"))
    gain = torch.ones_like(x) if weight is None else exact(weight)
    constant = None if bias is None else exact(bias)
    if isinstance(norm, nn.BatchNorm1d):
        assert norm.running_mean is not None and norm.running_var is not None
        gain = gain / (exact(norm.running_var) + norm.eps).sqrt()
        shift = exact(norm.running_mean) * gain
        return [Diagonal(gain, -shift if constant is None else constant - shift)]
    centred = isinstance(norm, nn.LayerNorm)
    # Without an eps of its own PyTorch takes the machine epsilon of the dtype.
    eps = torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps
    spread = (x - x.mean() if centred else x).square().mean()
    return [Diagonal(gain / (spread + eps).sqrt(), constant, centred)]


def applied(steps: Sequence[Step], x: Tensor) -> Tensor:
    """The result of applying maps to x (E,)."""
    for step in steps:
        assert not isinstance(step, Writes)
        x = step.matrix @ x if isinstance(step, Matrix) else step.gain * (x - x.mean() if step.centred else x)
        x = x if step.constant is None else x + step.constant
    return x


def pulled_back(steps: Sequence[Step], readout: Tensor) -> Iterator[tuple[Step, Tensor]]:
    """Each step, the last first, with the readout (D, .) of its output."""
    for step in reversed(steps):
        yield step, readout
        if not isinstance(step, Writes):
            readout = step.pull(readout)


def shares(steps: Sequence[Step], readout: Tensor) -> dict[Component, Tensor]:
    """The share of each component in the readout (D, .) of the end: (D,) by component, in the order of the steps.

    Biases come last; all biases and constants of maps are one component.
    """
    by_component: dict[Component, Tensor] = {}
    biases = torch.zeros(len(readout), dtype=torch.float64)
    for step, here in pulled_back(steps, readout):
        if not isinstance(step, Writes):
            biases = biases if step.constant is None else biases + here @ step.constant
        elif step.components == (BIASES,):
            biases = biases + here @ step.vectors[0]
        else:
            by_component.update(zip(step.components, (step.vectors @ here.T), strict=True))
    order = [each for step in steps if isinstance(step, Writes) for each in step.components if each != BIASES]
    return {**{component: by_component[component] for component in order}, BIASES: biases}

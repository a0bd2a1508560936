"""Linear layers with weights of 8 bits, on CPUs: x W^T + b.

Weights are symmetric integers, activations bytes with a zero of their own, made as they come. Both have a scale for
each block of 128 entries of a row, so that an outlier costs only its own block accuracy, and no row depends on others.
Products of a block are summed in int32, exactly (`native/int8.h`).

Shape legend: ... any axes, E width, F features, N blocks of E, P panels of F.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ._backends.native import _kernels

PANEL = 1 if _kernels.module is None else _kernels.module.int8_panel  # features
BLOCK = 1 if _kernels.module is None else _kernels.module.int8_block  # terms
DTYPES = torch.float32, torch.bfloat16  # of activations
_AT_ONCE = 16  # panels
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {  # in the order of `Activation` in native/call.h
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
_LARGEST = 127  # -128 is left out, so that W and -W become the same numbers


class RowNorm(NamedTuple):
    """A layer norm over features F, its weight and bias of the dtype that it is given."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., F) to the same shape."""
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class RoundedWeight(Protocol):
    """A weight W (F, E) in few bits."""

    @property
    def features(self) -> int: ...

    @property
    def width(self) -> int: ...

    def dense(self) -> Tensor:
        """The weight that the products are with (F, E), float32."""
        ...

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x (..., E), with b (F,), to (..., F) of its dtype, without gradients."""
        ...


class PackedWeight(RoundedWeight, Protocol):
    """Integers and scales in the order in which a kernel reads them."""

    @property
    def packed(self) -> Tensor: ...

    @property
    def scales(self) -> Tensor: ...


class Int8Weight(NamedTuple):
    """A weight W (F, E) as integers q and a scale for each block of its rows, in the order in which the kernel reads.

    `packed` (P, E / 4, 64, 4) holds q, with zeros up to whole panels; `scales` (P, N, 2, 64) the scales and sums of q.
    """

    packed: Tensor
    scales: Tensor
    features: int
    width: int

    def integers(self) -> Tensor:
        """q (F, E), int8."""
        return self.packed.permute(0, 2, 1, 3).flatten(0, 1).flatten(1)[: self.features, : self.width]

    def dense(self) -> Tensor:
        """The weight that the products are with: scale q (F, E), float32."""
        return self.integers() * self.block_scales().repeat_interleave(BLOCK, 1)[:, : self.width]

    def block_scales(self) -> Tensor:
        """The scale of each block (F, N), float32."""
        return self.scales[:, :, 0].transpose(1, 2).flatten(0, 1)[: self.features]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b without gradients: `multiply_int8`."""
        return multiply_int8(x, self, bias)


def int8_weight(weight: Tensor) -> Int8Weight:
    """W (F, E) of any float dtype, rounded: each block of a row has the scale max |W| / 127.

    Raises:
        ValueError: W holds NaN or infinities.
    """
    made = _empty(*weight.shape)
    for some, rows in _panels(weight.detach()):  # of a large weight not all is in float32 at once
        parts = rows.float().unflatten(1, (-1, BLOCK))  # (64 P, N, 128)
        largest = parts.abs().amax(2, keepdim=True)
        if not bool(largest.isfinite().all()):
            raise ValueError("weight: expected finite numbers, because int8 has neither NaN nor infinity")
        scale = (largest / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        _put(made, some, (parts / scale).round_().clamp_(-_LARGEST, _LARGEST), scale[:, :, 0])
    return made


def int8_of(integers: Tensor, scales: Tensor) -> Int8Weight:
    """The weight of whole numbers q (F, E), -127 to 127, and the scales (F, N) of their blocks."""
    made = _empty(*integers.shape)
    for (some, rows), (_, own) in zip(_panels(integers), _panels(scales.float(), 1), strict=True):
        _put(made, some, rows.float().unflatten(1, (-1, BLOCK)), own)
    return made


def _empty(features: int, width: int) -> Int8Weight:
    blocks, panels, terms = -(-width // BLOCK), -(-features // PANEL), width + -width % 4
    packed = torch.empty(panels, terms // 4, PANEL, 4, dtype=torch.int8)
    return Int8Weight(packed, torch.empty(panels, blocks, 2, PANEL), features, width)


def _panels(rows: Tensor, multiple: int = BLOCK) -> Iterator[tuple[slice, Tensor]]:
    """Some panels of features at a time, and their rows, with zeros up to whole panels and blocks."""
    for first in range(0, -(-len(rows) // PANEL), _AT_ONCE):
        some = rows[first * PANEL : (first + _AT_ONCE) * PANEL]
        yield slice(first, first + _AT_ONCE), F.pad(some, (0, -rows.shape[1] % multiple, 0, -len(some) % PANEL))


def _put(made: Int8Weight, some: slice, q: Tensor, scale: Tensor) -> None:
    """Pack q (64 P, N, 128), floats, and scale (64 P, N) of some panels."""
    terms = made.packed.shape[1]
    made.scales[some] = torch.stack((scale, q.sum(2)), 1).unflatten(0, (-1, PANEL)).permute(0, 3, 2, 1)
    packed = q.flatten(1)[:, : 4 * terms].to(torch.int8).view(-1, PANEL, terms, 4)
    made.packed[some] = packed.transpose(1, 2)


def multiply_int8(
    x: Tensor,
    weight: Int8Weight,
    bias: Tensor | None,
    at_once: int = 64,
    *,
    activation: str | None = None,
    added: Tensor | None = None,
    then: tuple[Int8Weight, Tensor | None] | None = None,
    norm: RowNorm | None = None,
) -> Tensor:
    """norm(f(x W^T + b) + y), x (..., E), float32 or bfloat16, to (..., F) of its dtype. See `multiply_rounded`.

    Args:
        activation: f, a name of `FUNCTIONS`.
        added: y, of the shape and dtype of the output.
        then: W2 (F2, F) and b2 of a second product: norm(f(x W^T + b) W2^T + b2 + y), (..., F2).
        norm: its weight and bias contiguous and of the output's dtype.
    """
    last, then_bias = (weight, None) if then is None else (then[0], _floats(then[1]))
    second = () if then is None else (*_addresses(last, then_bias), last.features)
    y = None if added is None else added.contiguous().view(-1, last.features)
    number = 0 if activation is None else 1 + list(FUNCTIONS).index(activation)
    after = () if norm is None else tuple(0 if x is None else x.data_ptr() for x in norm[:2])
    further = number, 0 if y is None else y.data_ptr(), second, after, 0.0 if norm is None else norm.eps
    rows, out, odd = _launch(_kernels.module.int8_product, x, weight, bias, at_once, last.features, *further)
    if odd and then is not None:
        which = out.isnan().all(1)  # with more of them nothing is lost
        out[which] = multiply_int8(multiply_int8(rows[which], weight, bias, activation=activation), *then)
    elif odd:
        which = ~rows.isfinite().all(1)
        product = F.linear(rows[which].float(), weight.dense(), _floats(bias))
        out[which] = (product if activation is None else FUNCTIONS[activation](product)).to(out.dtype)
    if odd and y is not None:
        out[which] += y[which]
    if odd and norm is not None:
        out[which] = norm(out[which])
    return out.view(*x.shape[:-1], last.features)


def multiply_rounded(
    kernel: Callable[..., int], x: Tensor, weight: PackedWeight, bias: Tensor | None, at_once: int, *form: int
) -> Tensor:
    """x (..., E), float32 or bfloat16, to (..., F) of its dtype, by a kernel that takes rows as bytes.

    A row with NaN or infinities, which bytes cannot hold, is multiplied in float32 by the weight that the integers
    stand for.

    Args:
        at_once: products that an instruction may add, of those that the processor has: 64 (AMX), 4 (AVX512_VNNI) or 2.
            The bits are the same.
        form: what else the kernel takes.
    """
    rows, out, odd = _launch(kernel, x, weight, bias, at_once, weight.features, *form)
    if odd:
        which = ~rows.isfinite().all(1)
        out[which] = F.linear(rows[which].float(), weight.dense(), _floats(bias)).to(out.dtype)
    return out.view(*x.shape[:-1], weight.features)


def _launch(
    kernel: Callable[..., int],
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    at_once: int,
    features: int,
    *further: Any,
) -> tuple[Tensor, Tensor, int]:
    """x as rows, the kernel's rows, and how many of them are not finite."""
    rows, bias = x.contiguous().view(-1, weight.width), _floats(bias)
    out = rows.new_empty(len(rows), features)
    sizes = len(rows), weight.width, weight.features
    given = rows.data_ptr(), *_addresses(weight, bias), out.data_ptr(), *sizes, x.dtype == torch.bfloat16, at_once
    return rows, out, kernel(*given, torch.get_num_threads(), *further)


def _addresses(weight: PackedWeight, bias: Tensor | None) -> tuple[int, int, int]:
    return weight.packed.data_ptr(), weight.scales.data_ptr(), 0 if bias is None else bias.data_ptr()


def _floats(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().float().contiguous()


class _Untrained(torch.autograd.Function):
    """A weight that a backward pass must not reach."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, d_weight: Tensor) -> Tensor:
        raise RuntimeError(
            "weights: int8 weights cannot be trained, because their numbers are rounded. Freeze them with "
            "requires_grad_(False), as adapters do, or leave the block to train the model as it is"
        )


class _RoundedProduct(torch.autograd.Function):
    """The product, and its gradients with respect to x, by the weight that the integers stand for, and b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, rounded: RoundedWeight) -> Tensor:
        ctx.rounded = rounded
        return rounded.multiply(x.detach(), None if bias is None else bias.detach())

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        to_x, to_weight, to_bias, _ = ctx.needs_input_grad
        rounded: RoundedWeight = ctx.rounded
        dx = (d_out.float() @ rounded.dense()).to(d_out.dtype) if to_x else None
        # Whoever asks for the weight's gradient gets an error, not these zeros.
        nothing = d_out.new_zeros(()).expand(rounded.features, rounded.width) if to_weight else None
        return dx, nothing, d_out.reshape(-1, rounded.features).sum(0) if to_bias else None, None


def rounded_product(x: Tensor, weight: Tensor | None, bias: Tensor | None, rounded: RoundedWeight) -> Tensor:
    """x W^T + b with gradients of x and b.

    Args:
        weight: W (F, E), which `rounded` was made from: a backward pass to it raises RuntimeError. None: there is none.
    """
    trained = (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
    if torch.is_grad_enabled() and (x.requires_grad or trained):
        guarded = _Untrained.apply(weight) if weight is not None and weight.requires_grad else weight
        out: Tensor = _RoundedProduct.apply(x, guarded, bias, rounded)
        return out
    return rounded.multiply(x, bias)

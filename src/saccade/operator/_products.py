"""Products with a weight, x W^T + b, on CPUs: packed copies of the weight, few rows, 8 bits, training.

Which way is fastest depends on how many rows there are and on whose library multiplies; `Product` knows. Everything
else (gradients of gradients, transforms, compilers, other devices and dtypes) is `F.linear`'s.

Shape legend: ... any axes, R rows, E width, F features.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._device import DeviceContext

from . import _observers
from ._backends.native import _kernels
from ._backends.native._run import interrupted, is_plain
from ._derived import Derived
from ._int8 import DTYPES, FUNCTIONS as FUNCTIONS, Int8Weight, RowNorm, int8_weight, multiply_int8, rounded_product

_FUSED = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "silu": ("swish", "")}  # its ReLU of NaN is 0
FEW = 0 if _kernels.module is None else _kernels.module.most_rows
LARGE = 2**15  # entries of a weight, below which a call costs more than reading it
ORDERED = 0 if _kernels.module is None else _kernels.module.most_ordered_rows  # more are as fast with a packed copy
_BLOCKS = 512, 1024  # terms that oneDNN adds one by one before it adds their sum to the others
_PLAIN = 4  # rows of bf16 up to which a packed copy is no faster
_SIDE = 16  # of the unit matrix, see `_ordered`
_CHAINED = 48  # rows for each thread, below which two products one after the other keep more threads busy
_ROWS = 64  # a layout chosen for fewer rows is slower for many, and one for many as fast for few

_HARMLESS = DeviceContext, _observers.PassiveMode

Joined = tuple[Literal["add", "mul"], Tensor]


class Product:
    """`x W^T + b` for one weight.

    In inference on a CPU a few rows are multiplied by the weight as it lies: a step of decoding takes the time of
    reading the weights. Where there are `users`, all rows take a packed copy. In float32, with or without gradients,
    oneDNN multiplies by plain weights where PyTorch's matmul leaves half of the processor idle.

    With a packed copy a float32 row's bits do not depend on the rows beside it, nor on the number of threads: oneDNN
    sums in one order for two rows and more. One or two rows are multiplied by the weight itself in that same order,
    where a trial gave the same bits; elsewhere a single row is multiplied twice.

    `weights="int8"` multiplies by a copy of the weight in 8 bits, whatever the number of rows.

    Copies and pickles of a module begin without the copy of the weight.
    """

    def __init__(self) -> None:
        self.users = 0  # of `packed_weights`, which may be nested
        self.weights: str | None = None  # "int8", or as they are
        self.rounded: Derived[Int8Weight] = Derived()
        self.copy: Derived[Tensor] = Derived()  # the packed weight
        self.blocks: dict[tuple[Any, ...], int] = {}  # of shape, strides and activation: see `_block`

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        joined: Joined | None = None,
    ) -> Tensor:
        """x (..., E) with W (F, E) and b (F,) to (..., F).

        Args:
            activation: a name of `FUNCTIONS`, applied to the product; not together with `joined`.
            joined: what the product is added to or multiplied with, (..., F).
        """
        large = weight.numel() >= LARGE
        differentiable = x.requires_grad or weight.requires_grad or _differentiable(bias, joined)
        recorded = torch.is_grad_enabled() and differentiable
        if large and reads_integers(self) and fits_int8(weight) and _plain(x, weight) and fits(bias, weight):
            rounded = self.in_int8(weight, x)
            if not recorded and _THREAD.compare is None:
                return _finished_int8(x, rounded, bias, activation, joined)
            product = rounded_product(x, weight, bias, rounded)
            if _THREAD.compare is not None:
                with unrounded():
                    exact = self(x, weight, bias)
                _THREAD.compare(self, x, exact, product)
                product = exact
            return finished(product, activation, joined)
        if (large or self.users) and _plain(x, weight) and fits(bias, weight):
            if recorded:
                if large and x.dtype == torch.float32 and at_half() and x.numel() > FEW * weight.shape[1]:
                    return finished(_Trained.apply(x, weight, bias), activation, joined)
            else:
                out = self._inferred(x, weight, bias, activation, joined, large)
                if out is not None:
                    return out
        return finished(F.linear(x, weight, bias), activation, joined)

    def _inferred(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, joined: Joined | None, large: bool
    ) -> Tensor | None:
        """The product without gradients; None if PyTorch is as fast."""
        few = large and x.numel() <= FEW * weight.shape[1] and weight.is_contiguous()
        single = large and x.dtype == torch.float32
        if few and x.dtype == torch.bfloat16 and (not self.users or x.numel() <= _PLAIN * weight.shape[1]):
            return finished(few_rows(x, weight, bias), activation, joined)
        if self.users and x.dtype in dtypes() and not weight.is_inference():  # changes of such are not counted
            if single and x.numel() <= ORDERED * weight.shape[1]:
                block = self._block(x, weight, bias, activation)
                if block:
                    return _ordered(x, weight, bias, activation, joined, block)
            return multiply(x, self._packed(x, weight), bias, activation, joined)
        if few and single:
            return finished(few_rows(x, weight, bias), activation, joined)
        return multiply(x, weight.detach(), bias, activation, joined) if single and at_half() else None

    def int8(self, weight: Tensor, bias: Tensor | None, x: Tensor) -> Int8Weight | None:
        """See `Int8Reader`."""
        fit = is_plain(weight) and weight.dtype == x.dtype and fits(bias, weight)
        recorded = torch.is_grad_enabled() and (weight.requires_grad or _differentiable(bias, None))
        return self.integers(weight, x) if fit and not recorded else None

    def integers(self, weight: Tensor, x: Tensor) -> Int8Weight | None:
        """The integers that a product with x reads; None if it reads the weight itself."""
        in_int8 = reads_integers(self) and weight.numel() >= LARGE and fits_int8(weight)
        return self.in_int8(weight, x) if in_int8 else None

    def in_int8(self, weight: Tensor, x: Tensor | None = None) -> Int8Weight:
        """The weight in 8 bits, renewed after it has changed; ValueError if it is not finite.

        Beside a few rows, a line of each row of the weight would be a fourth of all bytes: then an eighth is looked at.
        """
        rows = 0 if x is None else x.numel() // x.shape[-1]
        few = 0 < rows <= FEW
        return self.rounded.of((weight,), rows, lambda: int8_weight(weight), one_band=few) or int8_weight(weight)

    def _packed(self, x: Tensor, weight: Tensor) -> Tensor:
        """The packed copy of the weight, renewed after the weight has changed. A weight that replaces another is packed
        for this call only, until it is used again."""
        rows = x.numel() // x.shape[-1]
        copy = self.copy.of((weight,), rows, lambda: packed(weight, rows))
        return packed(weight, rows) if copy is None else copy

    def _block(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> int:
        """Terms in a block of oneDNN's sums, found by trying; 0 if no known order gives its bits."""
        case = weight.shape, weight.stride(), activation
        if case not in self.blocks:
            self.blocks[case] = 0
            readable = weight.is_contiguous() or weight.t().is_contiguous()
            if readable and (activation is None or weight.shape[0] % _SIDE == 0):
                trial = torch.arange(ORDERED * weight.shape[1], dtype=x.dtype, device=x.device).sin().view(ORDERED, -1)
                expected = multiply(trial, packed(weight), bias, activation)
                found = [
                    n for n in _BLOCKS if torch.equal(_ordered(trial, weight, bias, activation, None, n), expected)
                ]
                if len(found) == 1 or weight.shape[1] <= _BLOCKS[0]:  # a weight of zeros tells no order from another
                    self.blocks[case] = found[0] if found else 0
        return self.blocks[case]

    def __deepcopy__(self, memo: Any) -> Product:
        return Product()

    def __reduce__(self) -> Any:
        return Product, ()


class Int8Reader(Protocol):
    """A linear layer whose weight may be read in 8 bits."""

    @property
    def bias(self) -> Any: ...

    def int8(self, x: Tensor) -> Int8Weight | None:
        """The weight in 8 bits, for a product with x (..., E) without gradients; None if there is no such product."""
        ...


def in_one_pass(
    layers: Sequence[Int8Reader],
    x: Tensor,
    activation: str | None = None,
    joined: Joined | None = None,
    norm: RowNorm | None = None,
) -> Tensor | None:
    """f(x W^T + b), x (..., E) to (..., F), what is joined to it and the norm of all, in 8 bits and in one pass.

    Of two layers f(x W1^T + b1) W2^T + b2: the numbers between both products are never all in memory. None where more
    passes are needed, or as fast.
    """
    if not rounds() or compares() or interrupted() or not (unfollowed() and is_plain(x) and x.numel() > 0):
        return None
    learned = [] if norm is None else [part for part in norm[:2] if part is not None]
    if torch.is_grad_enabled() and (_differentiable(None, joined) or any(t.requires_grad for t in (x, *learned))):
        return None
    if len(layers) > 1 and x.numel() < _CHAINED * torch.get_num_threads() * x.shape[-1]:
        return None
    weights, width = [], x.shape[-1]
    for layer in layers:
        weight = layer.int8(x)
        if weight is None or weight.width != width:
            return None
        weights.append(weight)
        width = weight.features
    then = (weights[1], layers[1].bias) if len(layers) > 1 else None
    return _finished_int8(x, weights[0], layers[0].bias, activation, joined, then, norm)


def _finished_int8(
    x: Tensor,
    weight: Int8Weight,
    bias: Tensor | None,
    activation: str | None,
    joined: Joined | None,
    then: tuple[Int8Weight, Tensor | None] | None = None,
    norm: RowNorm | None = None,
) -> Tensor:
    """`finished` of a product in 8 bits, or of two, and a norm after all."""
    shape, added = (*x.shape[:-1], (then[0] if then else weight).features), None
    if joined is not None and joined[0] == "add" and joined[1].shape == shape and joined[1].dtype == x.dtype:
        added, joined = joined[1], None
    after = norm if joined is None and norm is not None and _fits_rows(norm, shape[-1], x.dtype) else None
    out = multiply_int8(x, weight, bias, activation=activation, added=added, then=then, norm=after)
    out = finished(out, None, joined)
    return out if norm is after else norm(out)  # type: ignore[misc]


def layer_norm(module: nn.Module | None) -> RowNorm | None:
    """PyTorch's layer norm of the last axis, as a product may end in it; None for other modules."""
    if type(module) is not nn.LayerNorm or len(module.normalized_shape) != 1 or "forward" in vars(module):
        return None
    return RowNorm(module.weight, module.bias, module.eps)


def _fits_rows(norm: RowNorm, features: int, dtype: torch.dtype) -> bool:
    given = [x for x in norm[:2] if x is not None]
    return all(is_plain(x) and x.shape == (features,) and x.dtype == dtype and x.is_contiguous() for x in given)


Compare = Callable[[Product, Tensor, Tensor, Tensor], None]


class _ThreadState(threading.local):
    unrounded = False
    compare: Compare | None = None


_THREAD = _ThreadState()


@contextlib.contextmanager
def unrounded() -> Iterator[None]:
    """A block in which this thread's products read weights as they are, for proofs that two ways are the same: what
    differs in the last bit before a product in 8 bits may differ by a step of 255 in it."""
    before, _THREAD.unrounded = _THREAD.unrounded, True
    try:
        yield
    finally:
        _THREAD.unrounded = before


def reads_integers(product: Product) -> bool:
    """Whether large weights are read in 8 bits."""
    return product.weights == "int8" and rounds()


@contextlib.contextmanager
def comparing(compare: Compare) -> Iterator[None]:
    """A block in which this thread's products in 8 bits are computed in float, too, and give that result.

    Each calls `compare(product, x, exact, rounded)` with its input and both results, before activations and sums.
    """
    before, _THREAD.compare = _THREAD.compare, compare
    try:
        yield
    finally:
        _THREAD.compare = before


def compares() -> bool:
    """Whether this thread's products in 8 bits are compared."""
    return _THREAD.compare is not None


def rounds() -> bool:
    """Whether this thread's products are in few bits, outside of `unrounded` blocks."""
    return not _THREAD.unrounded


def fits_int8(weight: Tensor) -> bool:
    """Whether products with W (F, E) are computed in 8 bits here."""
    return weight.dtype in DTYPES and not weight.is_inference()


def packed(weight: Tensor, rows: int = _ROWS) -> Tensor:
    """A copy of W (F, E) in the order in which oneDNN reads it, for products with about so many rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), max(_ROWS, rows))


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, block: int = 0) -> Tensor:
    """x (..., E) of at most `FEW` rows, float32 or bf16, to (..., F). W is float32 or bf16; sums are in float32.

    With a `block` the terms of a sum are added one by one, in blocks of so many that are added as they end: of at most
    `ORDERED` rows and a float32 W, which may be a transpose.
    """
    features, width = weight.shape
    dtype, x = x.dtype, x.float().contiguous()
    bias = None if bias is None else bias.float().contiguous()
    out = x.new_empty(*x.shape[:-1], features)
    _kernels.module.few_rows(
        x.data_ptr(),
        weight.data_ptr(),
        weight.dtype == torch.bfloat16,
        not weight.is_contiguous(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        x.numel() // width,
        width,
        features,
        block,
        torch.get_num_threads(),
    )
    return out.to(dtype)


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None, joined: Joined | None = None
) -> Tensor:
    """The product by oneDNN, W packed or plain; activation, sum or product in the same pass."""
    if x.numel() == x.shape[-1]:  # oneDNN would sum one row in another order than two
        twice = None if joined is None else (joined[0], joined[1].reshape(1, -1).expand(2, -1).contiguous())
        out = multiply(x.reshape(1, -1).expand(2, -1), weight, bias, activation, twice)
        return out[0].view(*x.shape[:-1], out.shape[1])
    bias = None if bias is None else bias.contiguous()  # oneDNN reads it as it lies
    if joined is not None:
        return torch.ops.mkldnn._linear_pointwise.binary(x, joined[1], weight, bias, joined[0])
    name, algorithm = _FUSED.get(activation or "", ("none", ""))
    out = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, name, [], algorithm)
    return out.relu_() if activation == "relu" else out


def _ordered(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, joined: Joined | None, block: int
) -> Tensor:
    out = few_rows(x, weight.detach(), bias, block)
    if activation not in _FUSED:
        return finished(out, activation, joined)
    # The bits of oneDNN's activation are had from oneDNN alone: it activates a product with the unit matrix. Infinity
    # times its zeros would be NaN.
    if bool(out.sum().isfinite()):
        return multiply(out.view(-1, _SIDE), _unit(), None, activation).view(out.shape)
    number = out.isfinite()
    activated = multiply(out.where(number, 0.0).view(-1, _SIDE), _unit(), None, activation).view(out.shape)
    return activated.where(number, FUNCTIONS[activation](out))


@functools.cache
def _unit() -> Tensor:
    return packed(torch.eye(_SIDE, dtype=torch.float32, device="cpu"))


def finished(out: Tensor, activation: str | None, joined: Joined | None) -> Tensor:
    if activation is not None:
        return FUNCTIONS[activation](out)
    if joined is None:
        return out
    return out + joined[1] if joined[0] == "add" else out * joined[1]


class _Trained(torch.autograd.Function):
    """F.linear in float32 by oneDNN, and its gradients: y = x W^T + b, dx = dy W, dW = dy^T x, db = sum of dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return multiply(x.detach(), weight.detach(), None if bias is None else bias.detach())

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        rows, d_rows = x.flatten(0, -2), d_out.flatten(0, -2)
        # With create_graph the gradient is itself differentiated: by PyTorch's own products.
        own = not torch.is_grad_enabled() and is_plain(d_out) and not interrupted()
        dx = dw = None
        if wanted[0]:
            dx = (multiply(d_rows, weight.t(), None) if own else d_rows @ weight).view(x.shape)
        if wanted[1]:
            dw = multiply(d_rows.t(), rows.t(), None) if own else d_rows.t() @ rows
        return dx, dw, d_rows.sum(0) if ctx.biased and wanted[2] else None


def _differentiable(bias: Tensor | None, joined: Joined | None) -> bool:
    return (bias is not None and bias.requires_grad) or (joined is not None and joined[1].requires_grad)


def fits(bias: Tensor | None, weight: Tensor) -> bool:
    """Whether the bias is missing, or has shape (F,) for a weight (F, E); for other shapes `F.linear` broadcasts or
    raises an error."""
    return bias is None or (bias.shape == weight.shape[:1] and bias.dtype == weight.dtype and is_plain(bias))


def _plain(x: Tensor, weight: Tensor) -> bool:
    """Whether a call runs eagerly on memory, with no mode that intercepts PyTorch's functions."""
    return (
        not interrupted()
        and unfollowed()
        and is_plain(x)
        and is_plain(weight)
        and x.dtype == weight.dtype
        and x.numel() > 0
        and x.shape[-1] == weight.shape[1]
    )


def unfollowed() -> bool:
    """Whether no mode intercepts PyTorch's functions, except passive modes, under which results must stay
    bit-identical."""
    modes = torch._C._len_torch_function_stack()
    return not modes or all(isinstance(torch._C._get_function_stack_at(n), _HARMLESS) for n in range(modes))


@functools.cache
def at_half() -> bool:
    """Whether PyTorch's float32 matmul (MKL) leaves half of this processor's multipliers idle, and oneDNN is there.

    MKL takes AVX2 on processors that are not Intel's. Zen 5 multiplies 512 bits at once: 40 % of its peak by MKL, 70 to
    90 by oneDNN with the same plain weight. Zen 4 halves such instructions, and there both are as fast.
    """
    return bool(dtypes()) and _kernels.module is not None and _kernels.module.mkl_at_half()


@functools.cache
def dtypes() -> tuple[torch.dtype, ...]:
    """Dtypes that oneDNN multiplies at full speed here; empty if PyTorch is built without it."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return ()
    half = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if half else (torch.float32,)

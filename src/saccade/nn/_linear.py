"""Linear layers: few rows by a kernel that reads the weight at the speed of memory, many by packed copies of it.

Both are for inference on CPUs. Shape legend: ... any axes, R rows, E width, F features.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._backends.native import _kernels
from .._backends.native._run import interrupted, is_plain

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
_FUSED = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", ""), "silu": ("swish", "")}
FEW = 0 if _kernels.module is None else _kernels.module.most_rows
_LARGE = 2**15  # entries of a weight, below which a call costs more than reading it
_ROWS = 64  # a layout chosen for fewer rows is slower for many, and one for many as fast for few


class Product:
    """`x W^T + b` for one weight.

    In inference on a CPU a few rows are multiplied by the weight as it lies: a step of decoding takes the time of
    reading the weights. More rows take a packed copy inside `packed_weights`.

    Copies and pickles of a module begin without the copy of the weight.
    """

    def __init__(self) -> None:
        self.users = 0  # of `packed_weights`, which may be nested
        self.copy: tuple[tuple[int, int], Tensor] | None = None  # of which weight, and the copy

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
        """x (..., E) with W (F, E) and b (F,) to (..., F); an activation is a name of `FUNCTIONS`."""
        few = x.numel() <= FEW * weight.shape[1] and weight.numel() >= _LARGE
        plain = (few or self.users > 0) and _plain(x, weight)
        if plain and few and x.dtype == torch.float32 and weight.is_contiguous():
            out = _few_rows(x, weight, bias)
            return out if activation is None else FUNCTIONS[activation](out)
        if (
            plain and self.users and x.dtype in _dtypes() and not weight.is_inference()
        ):  # changes of such are not counted
            packed = self._packed(x, weight)
            name, algorithm = ("none", "") if activation is None else _FUSED[activation]
            return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, name, [], algorithm)
        out = F.linear(x, weight, bias)
        return out if activation is None else FUNCTIONS[activation](out)

    def _packed(self, x: Tensor, weight: Tensor) -> Tensor:
        """The copy, made anew where the weight has changed."""
        version = weight.data_ptr(), weight._version
        if self.copy is None or self.copy[0] != version:
            rows = max(_ROWS, x.numel() // x.shape[-1])
            self.copy = version, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
        return self.copy[1]

    def __deepcopy__(self, memo: Any) -> Product:
        return Product()

    def __reduce__(self) -> Any:
        return Product, ()


class Linear(nn.Linear):
    """`x W^T + b`: `nn.Linear`, which inside `packed_weights` multiplies by a packed copy of W."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__(in_features, out_features, bias)
        self.product = Product()

    def forward(self, x: Tensor) -> Tensor:
        """x (..., E) to (..., F)."""
        return self.product(x, self.weight, self.bias)

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """`activation(x W^T + b)`, in one pass where that is possible; hooks see what they see of a linear layer."""
        if self.product.users and not (self._forward_hooks or self._forward_pre_hooks):
            return self.product(x, self.weight, self.bias, activation)
        return FUNCTIONS[activation](self(x))


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., E) of at most `FEW` rows to (..., F), float32."""
    features, width = weight.shape
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], features)
    _kernels.module.few_rows(
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.contiguous().data_ptr(),
        out.data_ptr(),
        x.numel() // width,
        width,
        features,
        torch.get_num_threads(),
    )
    return out


def _plain(x: Tensor, weight: Tensor) -> bool:
    """Whether a call runs now, without gradients, on memory, with nobody who follows PyTorch's functions."""
    return (
        not torch.is_grad_enabled()
        and not interrupted()
        and not torch._C._len_torch_function_stack()
        and is_plain(x)
        and is_plain(weight)
        and x.dtype == weight.dtype
        and x.numel() > 0
        and x.shape[-1] == weight.shape[1]
    )


@contextlib.contextmanager
def packed_weights(module: nn.Module) -> Iterator[None]:
    """Inside, the linear layers of `module` multiply by copies of their weights that are packed for the CPU.

    oneDNN reads a packed weight at the speed of the chip, where a plain product is bound by its layout: about 1.1 times
    as fast for 1,000 rows, 1.3 times for 128, twice for 16; the activation of a feed-forward layer comes in the same
    pass. Up to eight rows need no copy: a kernel of its own reads the weight as it lies. Only calls without gradients,
    in float32 or bfloat16, use the copies. These are as large as the weights, made at the first call and dropped at the
    end, and made anew where a weight has been changed in place; a change through `weight.data`, which PyTorch does not
    count, is not noticed.
    """
    found = [getattr(part, "product", None) for part in module.modules()]
    products = [product for product in found if isinstance(product, Product)]
    for product in products:
        product.users += 1
    try:
        yield
    finally:
        for product in products:
            product.users -= 1
            if not product.users:
                product.copy = None


@functools.cache
def _dtypes() -> tuple[torch.dtype, ...]:
    """What oneDNN multiplies at full speed here; nothing where PyTorch comes without it."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return ()
    half = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if half else (torch.float32,)

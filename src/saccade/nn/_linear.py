"""Linear layers, and packed copies of their weights for inference on CPUs.

Shape legend: ... any axes, E width, F features.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
_FUSED = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", ""), "silu": ("swish", "")}
_ROWS = 64  # a layout chosen for fewer rows is slower for many, and one for many as fast for few


class Product:
    """`x W^T + b` for one weight, which inside `packed_weights` is multiplied as a packed copy.

    Copies and pickles of a module begin without the copy of the weight.
    """

    def __init__(self) -> None:
        self.users = 0  # of `packed_weights`, which may be nested
        self.copy: tuple[tuple[int, int], Tensor] | None = None  # of which weight, and the copy

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
        """x (..., E) with W (F, E) and b (F,) to (..., F); an activation is a name of `FUNCTIONS`."""
        packed = self._packed(x, weight) if self.users else None
        if packed is not None:
            name, algorithm = ("none", "") if activation is None else _FUSED[activation]
            return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, name, [], algorithm)
        out = F.linear(x, weight, bias)
        return out if activation is None else FUNCTIONS[activation](out)

    def _packed(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """The copy, made anew where the weight has changed; None where the call is not for it."""
        if not x.numel() or not _plain(x, weight):
            return None
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


def _plain(x: Tensor, weight: Tensor) -> bool:
    """Whether a call runs now, on plain tensors, with nobody who follows PyTorch's functions."""
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and type(x) is Tensor
        and type(weight) is nn.Parameter
        and not weight.is_inference()  # PyTorch counts no changes of such
        and x.device.type == weight.device.type == "cpu"
        and x.dtype == weight.dtype
        and x.dtype in _dtypes()
        and not torch._C._len_torch_function_stack()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
        and not torch.is_autocast_enabled("cpu")
    )


@contextlib.contextmanager
def packed_weights(module: nn.Module) -> Iterator[None]:
    """Inside, the linear layers of `module` multiply by copies of their weights that are packed for the CPU.

    oneDNN reads a packed weight at the speed of the chip, where a plain product is bound by its layout: about 1.1 times
    as fast for 1,000 rows, 1.3 times for 128, twice for 16 and for one; the activation of a feed-forward layer comes
    in the same pass. Only calls without gradients, in float32 or bfloat16, use it. The copies are as large as the
    weights. They are made at the first call and dropped at the end, and made anew where a weight has been changed in
    place; a change through `weight.data`, which PyTorch does not count, is not noticed.
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

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
_FEWEST = 2  # rows; one row is read as fast by a plain product, which is bound by memory


class Linear(nn.Linear):
    """`x W^T + b`: `nn.Linear`, which inside `packed_weights` multiplies by a packed copy of W.

    `activated` gives the activation of that in one pass.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__(in_features, out_features, bias)
        self._users = 0  # of `packed_weights`, which may be nested
        self._copy: tuple[tuple[int, int], Tensor] | None = None  # of which weight, and the copy

    def forward(self, x: Tensor) -> Tensor:
        """x (..., E) to (..., F)."""
        packed = self._packed(x) if self._users else None
        if packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise.default(x, packed, self.bias, "none", [], "")

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """`activation(x W^T + b)`, a name of `FUNCTIONS`; hooks see what they see of a linear layer."""
        packed = self._packed(x) if self._users and not (self._forward_hooks or self._forward_pre_hooks) else None
        if packed is None:
            return FUNCTIONS[activation](self(x))
        name, algorithm = _FUSED[activation]
        return torch.ops.mkldnn._linear_pointwise.default(x, packed, self.bias, name, [], algorithm)

    def _packed(self, x: Tensor) -> Tensor | None:
        """The copy, made anew where the weight has changed; None where the call is not for it."""
        rows = x.numel() // max(1, x.shape[-1])
        if rows < _FEWEST or not self._plain(x):
            return None
        version = self.weight.data_ptr(), self.weight._version
        if self._copy is None or self._copy[0] != version:
            self._copy = version, torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), rows)
        return self._copy[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_users": 0, "_copy": None}  # copies and pickles begin without

    def _plain(self, x: Tensor) -> bool:
        """Whether this call runs now, on plain tensors, with nobody who follows PyTorch's functions."""
        weight = self.weight
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
    as fast for 1,000 rows, twice for 16; the activation of a feed-forward layer comes in the same pass. Only calls
    without gradients, in float32 or bfloat16, use it. The copies are as large as the weights. They are made at the
    first call and dropped at the end, and made anew where a weight has been changed in place; a change through
    `weight.data`, which PyTorch does not count, is not noticed.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, Linear)]
    for layer in layers:
        layer._users += 1
    try:
        yield
    finally:
        for layer in layers:
            layer._users -= 1
            if not layer._users:
                layer._copy = None


@functools.cache
def _dtypes() -> tuple[torch.dtype, ...]:
    """What oneDNN multiplies at full speed here; nothing where PyTorch comes without it."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return ()
    half = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if half else (torch.float32,)

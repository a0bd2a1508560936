"""Linear layers: few rows by a kernel that reads the weight at the speed of memory, many by packed copies of it.

Shape legend: ... any axes, E width, F features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn

from .._int8 import Int8Weight
from .._observers import passive
from .._products import FUNCTIONS, Product, reads_integers


class Linear(nn.Linear):
    """`x W^T + b`: `nn.Linear`, which inside `packed_weights` multiplies by a packed copy of W."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__(in_features, out_features, bias)
        self.product = Product()

    def forward(self, x: Tensor) -> Tensor:
        """x (..., E) to (..., F)."""
        return self.product(x, self.weight, self.bias)

    @property
    def reads_int8(self) -> bool:
        """Whether large weights are read in 8 bits."""
        return reads_integers(self.product)

    def int8(self, x: Tensor) -> Int8Weight | None:
        """See `Int8Reader` in `_products.py`."""
        return self.product.int8(self.weight, self.bias, x)

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """`activation(x W^T + b)`, in one pass if possible; hooks see the linear layer's input and output."""
        fused = self.product.users or reads_integers(self.product)  # in 8 bits always, so that bits do not depend on it
        if fused and passive(self._forward_pre_hooks, self._forward_hooks):
            return self.product(x, self.weight, self.bias, activation)
        return FUNCTIONS[activation](self(x))


@contextlib.contextmanager
def packed_weights(module: nn.Module) -> Iterator[None]:
    """Inside the block, the linear layers of `module` multiply by copies of their weights that are packed for the CPU.

    oneDNN reads a packed weight at the speed of the chip; a plain product is limited by the weight's layout. Packed it
    is about 1.1 times as fast for 1,000 rows, 1.3 times for 128, twice for 16; the activation of a feed-forward layer
    comes in the same pass. Up to eight rows need no copy: a kernel of its own reads the weight in place. Only calls
    without gradients, in float32 or bfloat16, use the copies. These are as large as the weights. They are made at the
    first call, dropped at the end, and made again where a weight has been changed or replaced. A write that PyTorch
    does not count (through `weight.data`) is noticed at the next call if it changes whole rows or columns, and within
    E / 16 calls if it changes single entries of a weight (F, E).

    Example:
        >>> import torch, saccade
        >>> layer, x = saccade.nn.FeedForward(16), torch.randn(2, 20, 16)
        >>> with torch.no_grad(), saccade.nn.packed_weights(layer):
        ...     out = layer(x)
        >>> torch.allclose(out, layer(x), atol=1e-5)
        True
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
                product.copy.clear()

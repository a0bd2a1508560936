"""Linear layers with packed copies of their weights, and the activations that are fused with them.

Shape legend: ... any axes, E and F widths.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..operator._backends.native._run import is_plain
from ..operator._derived import Derived
from ..operator._int8 import Int8Weight
from ..operator._products import FEW, FUNCTIONS, LARGE, Product, dtypes, few_rows, finished, fits, multiply, packed
from ._effects import Effects, reaches_outside, same_random_numbers, shadow
from ._structure import has_own_forward


class PackedLinear:
    """Computes one linear layer with a packed copy of its weight, which all fused layers share.

    Args:
        module: an `nn.Linear`, or transformers' `Conv1D`, whose weight is transposed.
        weights: "bfloat16" has a few rows read a bf16 copy of the weight, and many rows what it is rounded to; "int8"
            has all rows read a copy in 8 bits; None as they are.
        prefix: of the names of the weight and the bias: those of `nn.MultiheadAttention` have one.
    """

    def __init__(self, module: nn.Module, weights: str | None, prefix: str = ""):
        self.module, self.weights, self._prefix = module, weights, prefix
        self.turned = not isinstance(module, nn.Linear | nn.MultiheadAttention)
        self.product = Product()
        self.product.users = 1
        self.product.weights = weights
        self.copy: Derived[Tensor] = Derived()  # the weight in bf16, or as rows where it is turned
        self.sorted_copy: Derived[Tensor] = Derived()  # the same of a joined projection, all queries first
        self._dropped: tuple[nn.Parameter, int, Tensor] | None = None  # whose weight, where its place is, its only copy

    @property
    def weight(self) -> Tensor:
        """W (F, E)."""
        weight: Tensor = getattr(self.module, self._prefix + "weight")
        return weight.t() if self.turned else weight

    @property
    def bias(self) -> Tensor | None:
        """b (F,)."""
        bias: Tensor | None = getattr(self.module, self._prefix + "bias")
        return bias

    @property
    def held(self) -> Tensor | None:
        """The packed copy of a dropped weight; None if the layer has had another weight or bias since then."""
        if self._dropped is None:
            return None
        parameter, place, copy = self._dropped
        if self.module.weight is parameter and parameter.data_ptr() == place and fits(self.bias, copy):
            return copy
        self.restore()
        return None

    def __call__(self, x: Tensor, activation: str | None = None, joined: Any = None) -> Tensor:
        """x (..., E) to (..., F)."""
        bias, held = self.bias, self.held
        if held is not None:
            return multiply(x, held, bias, activation, joined)
        if (
            self.weights == "bfloat16"
            and x.dtype == torch.float32
            and fits(bias, self.weight)
            and not torch.is_grad_enabled()
        ):
            return self._rounded(x, bias, activation, joined)
        return self.product(x, self.weight, bias, activation, joined)

    def int8(self, x: Tensor) -> Int8Weight | None:
        """See `Int8Reader` in `operator/_products.py`."""
        return self.product.int8(self.weight, self.bias, x)

    def _rounded(self, x: Tensor, bias: Tensor | None, activation: str | None, joined: Any) -> Tensor:
        copy = self.rounded_weight(x)
        if x.numel() <= FEW * copy.shape[1]:
            return finished(few_rows(x, copy, bias), activation, joined)
        return multiply(x, copy.float(), bias, activation, joined)

    def readable_weight(self, x: Tensor, heads: int | None = None) -> Tensor:
        """W (F, E) row by row, for a product of a few rows with x: the weight itself, or a copy that is turned or in
        bf16. Of a joined projection with so many `heads`, each with its query, key and value, all queries first."""
        if self.weights == "bfloat16" and x.dtype == torch.float32:
            return self._copied(x, torch.bfloat16, heads)
        return self._copied(x, self.weight.dtype, heads) if self.turned or heads else self.weight

    def rounded_weight(self, x: Tensor) -> Tensor:
        """The weight in bf16, for a product with x."""
        return self._copied(x, torch.bfloat16)

    def _copied(self, x: Tensor, dtype: torch.dtype, heads: int | None = None) -> Tensor:
        weight, rows = self.weight, x.numel() // x.shape[-1]

        def copied() -> Tensor:
            return by_kind(weight.detach(), heads).to(dtype).contiguous()

        held = self.copy if heads is None else self.sorted_copy
        copy = held.of((weight,), rows, copied, one_band=0 < rows <= FEW)
        return copied() if copy is None or copy.dtype is not dtype else copy

    def drop(self) -> None:
        """Keep only the packed copy and fill the weight itself with NaN until `restore`."""
        parameter: nn.Parameter = self.module.weight  # type: ignore[assignment]
        memory = parameter.untyped_storage()
        if parameter.is_shared() or memory.nbytes() > parameter.numel() * parameter.element_size():
            return  # others hold the memory, so nothing would be freed, and they would no longer share it
        copy = packed(self.weight)
        parameter.data = parameter.data.new_full((), torch.nan).expand(parameter.shape)
        self._dropped = parameter, parameter.data_ptr(), copy

    def restore(self) -> None:
        """Restore a dropped weight, bit for bit: packing only reorders its entries.

        A weight that was converted meanwhile gets its old numbers in the new dtype; a weight that was given other
        numbers keeps them.
        """
        if self._dropped is None:
            return
        parameter, place, copy = self._dropped
        self._dropped = None
        if parameter.data_ptr() == place or bool(parameter.detach().isnan().all()):
            weight = copy.to_dense()
            weight = weight.t().contiguous() if self.turned else weight
            parameter.data = weight.to(parameter.device, parameter.dtype)


def by_kind(tensor: Tensor, heads: int | None) -> Tensor:
    """Rows (3 H D, ...) of H heads, each with its query, key and value, as all queries, all keys, all values."""
    return tensor if heads is None else tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes what `nn.Linear` or transformers' `Conv1D` does, by class and forward."""
    if has_own_forward(module):
        return False
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def holds_rounded(module: nn.Module) -> bool:
    """Whether a module is a linear layer of Saccade that holds its weight in few bits (`readable` gives it)."""
    kind = type(module)
    return kind.__module__.startswith("saccade.") and callable(getattr(kind, "readable", None))


def large(module: nn.Module) -> bool:
    """Whether a linear layer is large enough for a packed copy, on a CPU and in a dtype that oneDNN supports."""
    weight: Any = getattr(module, "weight", None)
    return is_linear(module) and is_plain(weight) and weight.dtype in dtypes() and weight.numel() >= LARGE


_KNOWN = {F.gelu: "gelu", F.relu: "relu", torch.relu: "relu", F.silu: "silu"}


def activation_of(function: Any) -> str | None:
    """The name in `FUNCTIONS` of the activation that a module computes; None if there is none.

    PyTorch's own are known by their class. Copies of others are compared at numbers of all magnitudes and both signs:
    relative to the number, since what clips at 10 or cuts off at 1e-3 is something else.
    """
    if isinstance(function, nn.Module) and has_own_forward(function):
        return None
    known = _KNOWN.get(function) if callable(function) and not isinstance(function, nn.Module) else None
    if known is None and type(function) in (nn.ReLU, nn.SiLU):
        known = type(function).__name__.lower()
    if known is None and type(function) is nn.GELU:
        known = "gelu_tanh" if function.approximate == "tanh" else "gelu"
    return known or _compared(function)


def _compared(function: Any) -> str | None:
    sizes = torch.cat([torch.logspace(-30, 30, 1201), torch.linspace(0.01, 12, 1201)])
    x = torch.cat([sizes, -sizes, torch.zeros(1)])
    try:
        if reaches_outside(function):
            return None
        function = shadow(function)
        with torch.no_grad(), same_random_numbers():
            effects = Effects(function)
            y = function(x.clone())
            if effects.seen():
                return None
    except Exception:  # whatever it is, it is no activation
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        return None
    close = [name for name, known in FUNCTIONS.items() if bool(((y - known(x)).abs() <= 2e-6 * x.abs()).all())]
    return close[0] if close else None

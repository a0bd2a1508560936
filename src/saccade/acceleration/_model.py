"""The fused layers of one model, from installation to removal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

from ..operator._backends.native import _kernels
from ..operator._backends.native._run import is_plain
from ..operator._products import LARGE, Product, fits_int8
from ._finding import fused_layers
from ._fused_layers import PROVED, FusedLayer, FusedLinear, is_replacement
from ._linears import PackedLinear
from ._padded import PaddedLayer
from ._self_attention import FusedSelfAttention


class AcceleratedModel:
    """The fused layers of a model: `install` replaces the modules' calls, `uninstall` restores them.

    Attributes:
        products: those in 8 bits, with the names of their layers.
    """

    def __init__(self, model: nn.Module, weights: str | None, keep_weights: bool):
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        if weights not in (None, "bfloat16", "int8"):
            raise ValueError(f"weights: expected None, 'bfloat16' or 'int8', got {weights!r}")
        if weights is not None and not keep_weights:
            raise ValueError(
                f"keep_weights: expected True with weights={weights!r}, because the original weights cannot be "
                f"restored from {weights}; got False"
            )
        if weights is not None and _kernels.module is None:
            raise ValueError(f"weights: {weights!r} needs the native kernels: {_kernels.missing}")
        self.model, self.weights, self.keep = model, weights, keep_weights
        self.layers: list[FusedLayer] = []
        self.products: dict[Product, str] = {}
        self._own: list[Product] = []  # of Saccade's linear layers, in 8 bits
        self._large: list[Product] = []  # those of them that are large enough
        self.left: Counter[str] = Counter()  # large linear layers that are not in 8 bits, by the reason
        self._refusing: Any = None

    def install(self) -> None:
        """Replace the calls of the modules.

        Raises:
            RuntimeError: the model is accelerated already.
            ValueError: a weight that is to be in 8 bits is not finite.
        """
        if is_accelerated(self.model):
            raise RuntimeError("model: it is accelerated already")
        self.layers = fused_layers(self.model, self.weights)
        if not self.keep:  # its projection is a parameter without a layer, which stays as it is
            self.layers = [layer for layer in self.layers if not isinstance(layer, FusedSelfAttention)]
        try:
            if self.weights == "int8":
                self._round()
            for layer in self.layers:
                layer.install()
            if not self.keep:
                self._drop()
        except BaseException:
            self.uninstall()
            raise

    def uninstall(self) -> None:
        """Restore all modules and dropped weights."""
        for layer in self.layers:
            if isinstance(layer, FusedLinear):
                layer.linear.restore()
            layer.uninstall()
        if self._refusing is not None:
            self._refusing.remove()
            self._refusing = None
        for layer in self.layers:
            if isinstance(layer, PaddedLayer):
                layer.padded.forget()
        for product in self._own:
            product.weights = None
        for _, linear in self._linears():
            linear.copy.clear()
            linear.sorted_copy.clear()
        for product in (*self._own, *(linear.product for _, linear in self._linears())):
            product.rounded.clear()
        self._own, self.products = [], {}

    def leave_in_float(self, products: Collection[Product], reason: str) -> None:
        """Have these of the products read weights as they are, and no others; copies that are not read are dropped."""
        for product in self.products:
            product.weights = None if product in products else "int8"
            (product.rounded if product in products else product.copy).clear()
        self._large = [product for product in self._large if product not in products]
        if products:
            self.left[reason] = len(products)

    def _linears(self) -> Iterator[tuple[str, PackedLinear]]:
        """The linear layers that are computed here, with the names of their weights."""
        for layer in self.layers:
            if isinstance(layer, FusedLinear):
                yield f"{layer.name}.weight", layer.linear
            elif isinstance(layer, FusedSelfAttention):
                yield f"{layer.name}.in_proj_weight", layer.projection
                yield f"{layer.name}.out_proj.weight", layer.output

    def _round(self) -> None:
        """Round all weights to 8 bits now, so that those which cannot be are named before anything is computed."""
        taken = {layer.module for layer in self.layers if isinstance(layer, FusedLinear)}
        self._large, self.left = [], Counter()
        for name, module in self.model.named_modules():
            weight, product = getattr(module, "weight", None), getattr(module, "product", None)
            if isinstance(product, Product):
                product.weights = "int8"
                self._own.append(product)
                if not isinstance(weight, Tensor):  # of another module: a token embedding for the logits
                    self.products[product] = f"{name}.product (logits)".removeprefix(".")
            if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.numel() < LARGE:
                continue
            fits = is_plain(weight) and fits_int8(weight)
            if isinstance(product, Product) and fits:
                self._large.append(product)
                self._round_one(f"{name}.weight", product, weight)
            elif isinstance(module, nn.Linear) and module not in taken and not self._is_inside(module):
                why = "their forward is not nn.Linear's, or who holds them is unknown" if fits else _kind(weight)
                self.left[f"not in int8: {why}"] += 1
        for name, linear in self._linears():
            self._round_one(name, linear.product, linear.weight)

    def _round_one(self, name: str, product: Product, weight: Tensor) -> None:
        try:
            product.in_int8(weight)
        except ValueError:
            raise ValueError(f"model: {name} holds NaN or infinities, which int8 cannot hold") from None
        self.products[product] = name.removesuffix(".weight") or "(the model)"

    def _is_inside(self, module: nn.Module) -> bool:
        """Whether fused attention computes the layer as its own part."""
        return any(isinstance(layer, FusedSelfAttention) and module is layer.output.module for layer in self.layers)

    def _drop(self) -> None:
        """Drop the weights that a single linear layer reads, and keep their packed copies."""
        readers = Counter(id(parameter) for module in self.model.modules() for parameter in module._parameters.values())
        self._refusing = self.model.register_state_dict_pre_hook(_refuse)
        for layer in self.layers:
            if isinstance(layer, FusedLinear):
                if readers[id(layer.module.weight)] == 1:
                    layer.linear.drop()
                else:
                    layer.linear.product.users = 0  # a weight that stays needs no copy

    def lines(self) -> list[str]:
        """Lines of the report: accelerated modules by kind, and the others with the reason."""
        taken = Counter(layer.kind for layer in self.layers if layer.state == PROVED)
        lines = [f"{count:8}  {kind}" for kind, count in taken.items()]
        if self._large:
            lines.append(f"{len(self._large):8}  linear layers of Saccade's own, in int8")
        lines += [f"{count:8}  linear layers {why}" for why, count in self.left.items()]
        left = Counter((layer.kind, layer.status()) for layer in self.layers if layer.state != PROVED)
        return lines + [f"{count:8}  {kind}: {state}" for (kind, state), count in left.items()]

    def listed(self, every: bool) -> list[str]:
        """One line for each module; unless `every`, one for modules of one kind and status whose names differ only in
        numbers."""
        groups: dict[Any, list[str]] = {}
        for layer in self.layers:
            pattern = layer.name if every else re.sub(r"\d+", "*", layer.name)
            groups.setdefault((pattern, layer.kind, layer.status()), []).append(layer.name)
        return [
            f"{_joined(names) or '(the model)'}: {kind}, {status}" + (f" ({len(names)} modules)" if names[1:] else "")
            for (_, kind, status), names in groups.items()
        ]


def is_accelerated(model: nn.Module) -> bool:
    """Whether calls of the model's modules are replaced, or its products in 8 bits."""
    return any(
        is_replacement(held) or (isinstance(held, Product) and held.weights is not None)
        for module in model.modules()
        for held in vars(module).values()
    )


def _kind(weight: Tensor) -> str:
    if type(weight) not in (Tensor, nn.Parameter):
        return f"weights are of class {type(weight).__name__}"
    if not is_plain(weight):
        return f"weights are no plain tensors of a CPU ({weight.device.type})"
    if weight.is_inference():
        return "weights were made in inference mode, where writes are not counted"
    return f"weights are {str(weight.dtype).removeprefix('torch.')}"


def _joined(names: list[str]) -> str:
    """Merges names that differ only in numbers: a.0, a.1 and a.2 become a.0-2, a.0 and a.2 become a.0,2."""
    parts = [re.split(r"(\d+)", name) for name in names]
    return "".join(
        _numbers([int(n) for n in column]) if i % 2 else column[0] for i, column in enumerate(zip(*parts, strict=True))
    )


def _numbers(numbers: list[int]) -> str:
    ordered = sorted(set(numbers))
    first, last = ordered[0], ordered[-1]
    if len(ordered) > 2 and ordered == list(range(first, last + 1)):
        return f"{first}-{last}"
    return ",".join(map(str, ordered))


def _refuse(module: nn.Module, prefix: str, keep: bool) -> None:
    raise RuntimeError("model: its weights were dropped (keep_weights=False); leave the block to read them")

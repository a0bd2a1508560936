"""Linear layers that hold their weights in few bits and nothing else: `RoundedLinear`.

Shape legend: ... any axes, E width, F features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._backends.native._run import interrupted, is_plain
from .._groups import GroupedWeight
from .._int4 import int4_weight
from .._int8 import DTYPES, Int8Weight, RoundedWeight, int8_weight, rounded_product
from .._observers import passive
from .._products import FEW, FUNCTIONS, LARGE, dtypes, few_rows, in_one_pass, multiply, rounds, unfollowed
from ._linear import Linear

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}  # `Module.to(dtype)` converts floats only
_FLOATS = {bits: dtype for dtype, bits in _BITS.items()}
_CONV = "transformers.pytorch_utils", "Conv1D"


class Bfloat16Weight(NamedTuple):
    """A weight (F, E) in bfloat16, which is multiplied in the dtype of x."""

    halves: Tensor
    features: int
    width: int

    def dense(self) -> Tensor:
        """W (F, E), float32."""
        return self.halves.float()

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b without gradients: few rows read the weight itself, many a copy in float32, made for the call."""
        if x.dtype != torch.float32:
            return F.linear(x, self.halves, bias)
        if x.numel() <= FEW * self.width:
            return few_rows(x, self.halves, bias)
        return multiply(x, self.dense(), bias) if dtypes() else F.linear(x, self.dense(), bias)


def bfloat16_weight(weight: Tensor) -> Bfloat16Weight:
    """W (F, E) rounded to bfloat16. ValueError if it is not finite, or too large for bfloat16."""
    halves = weight.detach().to(torch.bfloat16).contiguous()
    if not bool(halves.isfinite().all()):
        raise ValueError("weight: expected finite numbers")
    return Bfloat16Weight(halves, *weight.shape)


FORMS: dict[str, Callable[[Tensor], Any]] = {"bfloat16": bfloat16_weight, "int8": int8_weight, "int4": int4_weight}


class HeldWeight(Tensor):
    """The weight W (F, E) of a `RoundedLinear`, for code that reads it.

    It has shape, dtype and device, and no numbers of its own: an operation gets a dequantised copy, and a linear
    product that of the layer. Writing to it raises RuntimeError, because the layer would not change.
    """

    layer: RoundedLinear

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("tensor")  # torch.nn.init names it so
        if func in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _SAME or (func is Tensor.requires_grad_ and args[1:] == (False,)):
            return first
        written = (first, *_listed(first)) if _writes(func.__name__) else ()
        if any(isinstance(each, cls) for each in (*written, kwargs.get("out"))):
            raise RuntimeError(
                "weight: the weights of a RoundedLinear are held in few bits and are neither written nor trained; load "
                "the model without weights= for that, or train adapters beside it"
            )
        if func is F.linear and len(args) > 1 and isinstance(args[1], cls) and not isinstance(first, cls):
            return args[1].layer.multiplied(first, args[2] if len(args) > 2 else kwargs.get("bias"))
        args, kwargs = torch.utils._pytree.tree_map_only(cls, _dense, (args, kwargs))
        return func(*args, **kwargs)


def _dense(weight: HeldWeight) -> Tensor:
    return weight.layer.dense()


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else ()


_GETTERS = "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad", "grad_fn"
_DESCRIBING = {getattr(Tensor, name).__get__ for name in _GETTERS} | {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.element_size, Tensor.is_floating_point, Tensor.__len__),
    *(Tensor.__hash__, Tensor.is_complex, Tensor.is_inference, Tensor.get_device),
}
_SAME = {Tensor.detach, Tensor.data.__get__}  # type: ignore[attr-defined]


def _writes(name: str) -> bool:
    """Whether a function of PyTorch writes to its first argument, or gives an address to others that may."""
    if name.startswith("__"):  # also __iadd__, where there is an __add__
        return name in ("__set__", "__setitem__") or (name[:3] == "__i" and hasattr(Tensor, "__" + name[3:]))
    return name.endswith("_") or name == "data_ptr"


class RoundedLinear(nn.Linear):
    """`x W^T + b` with a weight W that is held in few bits, as `saccade.models.load(..., weights=...)` makes it.

    The bits are buffers, which `to(dtype)` leaves as they are; the bias is a parameter. `weight` is read by tools and
    cannot be written. A backward pass reaches x and the bias. On devices other than the CPU, in transforms and with a
    compiler, each call dequantises the weight.

    Args:
        weight: (F, E), finite; or one that a checkpoint holds in few bits.
        bias: (F,) or None.
        form: a name of `FORMS`, by which floats are rounded; otherwise the name of the checkpoint's form.
        dtype: of the model, beside a weight in few bits.
    """

    _like: Tensor

    def __init__(
        self,
        weight: Tensor | GroupedWeight | Int8Weight,
        bias: nn.Parameter | None,
        form: str,
        dtype: torch.dtype = torch.float32,
    ):
        nn.Module.__init__(self)
        self.form = form
        rounded: Any = FORMS[form](weight) if isinstance(weight, Tensor) else weight
        self.out_features, self.in_features = rounded.features, rounded.width
        self._make, self._names, self._rest = type(rounded), [], {}
        for name, value in rounded._asdict().items():
            if isinstance(value, Tensor):
                self._names.append(name)
                self.register_buffer(name, value.view(_BITS.get(value.dtype, value.dtype)))
            else:
                self._rest[name] = value
        like = weight.new_empty(0) if isinstance(weight, Tensor) else torch.empty(0, dtype=dtype)
        self.register_buffer("_like", like, persistent=False)  # follows the model's dtype
        super().register_parameter("bias", bias)

    @property
    def weight(self) -> Tensor:
        """W (F, E), see `HeldWeight`."""
        empty = self._like.new_full((), torch.nan).expand(self.out_features, self.in_features)
        held = empty.as_subclass(HeldWeight)
        held.layer = self
        return held

    @weight.setter
    def weight(self, value: object) -> None:
        self.register_parameter("weight", None)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """RuntimeError for a weight, which would not be used."""
        if name == "weight":
            raise RuntimeError(f"weight: this layer holds its weight in {self.form}; replace the layer to change it")
        super().register_parameter(name, param)

    def rounded(self) -> RoundedWeight:
        """The weight in few bits."""
        tensors: dict[str, Any] = {name: self._buffers[name] for name in self._names}
        if self._make is not GroupedWeight:
            tensors = {name: x.view(_FLOATS.get(x.dtype, x.dtype)) for name, x in tensors.items()}
        made: RoundedWeight = self._make(**tensors, **self._rest)
        return made

    def memory(self) -> tuple[Tensor, ...]:
        """The buffers that hold the weight."""
        return tuple(cast(Tensor, self._buffers[name]) for name in self._names)

    def readable(self) -> Tensor | GroupedWeight | Int8Weight:
        """The weight as a native step reads it."""
        if not rounds():
            return self.dense()
        weight = self.rounded()
        return weight.halves if isinstance(weight, Bfloat16Weight) else cast(GroupedWeight | Int8Weight, weight)

    def dense(self) -> Tensor:
        """The weight that the products are with (F, E), in the dtype of the model."""
        with torch._C.DisableTorchFunction():  # modes that follow PyTorch's functions see a weight, not how it is made
            return self.rounded().dense().to(self._like.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., E) to (..., F)."""
        return self.multiplied(x, self.bias)

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """`activation(x W^T + b)`, in one pass if possible; hooks see the linear layer's input and output."""
        fused = passive(self._forward_pre_hooks, self._forward_hooks)
        out = in_one_pass([self], x, activation) if fused else None
        return FUNCTIONS[activation](self(x)) if out is None else out

    @property
    def reads_int8(self) -> bool:
        """Whether the weight is read in 8 bits."""
        return self._make is Int8Weight and rounds()

    def int8(self, x: Tensor) -> Int8Weight | None:
        """See `Int8Reader` in `_products.py`."""
        bias = self.bias
        recorded = torch.is_grad_enabled() and bias is not None and bias.requires_grad
        if self._make is not Int8Weight or recorded or not self._fits(x, bias):
            return None
        return cast(Int8Weight, self.rounded())

    def multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b (..., F) with gradients of x and b."""
        plain = rounds() and not interrupted() and unfollowed() and is_plain(x) and x.numel() > 0
        if plain and x.shape[-1] == self.in_features and self._fits(x, bias):
            return rounded_product(x, None, bias, self.rounded())
        return F.linear(x, self.dense(), bias)

    def _fits(self, x: Tensor, bias: Tensor | None) -> bool:
        return (
            is_plain(self._like)
            and x.dtype == self._like.dtype in DTYPES
            and (bias is None or (bias.shape == (self.out_features,) and bias.dtype == x.dtype and is_plain(bias)))
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weights={self.form!r}"


def is_roundable(module: nn.Module) -> bool:
    """Whether a module is a linear layer of PyTorch, Saccade or transformers (`Conv1D`) with a large weight."""
    kind = type(module)
    if kind not in (nn.Linear, Linear) and (kind.__module__, kind.__name__) != _CONV:
        return False
    weight: Any = module.weight
    return weight.numel() >= LARGE and weight.is_floating_point()


def output_form(form: str) -> str:
    """The form of an output layer: in 4 bits rare tokens would lose too much."""
    return "int8" if form == "int4" else form


class Rounding:
    """Replaces the large linear layers of a model by layers that hold their weights in few bits, one after the other.

    Layers whose weights other modules use too stay as they are, except that an output layer gets a copy of its own of
    the embedding that it is tied to: a step of decoding reads all of it, and of the embedding a row. A layer with the
    shape of an embedding is an output layer.

    Args:
        form: a name of `FORMS`; "stored" only replaces layers whose weights are given to `hold`.
        keep: names of weights that stay as they are.
    """

    def __init__(self, model: nn.Module, form: str, keep: Collection[str] = ()):
        tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
        others = (module for module in model.modules() if not isinstance(module, nn.Embedding))
        owners = Counter(id(tensor) for module in others for tensor in module._parameters.values())
        places: dict[Any, list[tuple[nn.Module, str]]] = {}
        for parent in model.modules():
            for name, module in parent._modules.items():
                if module is not None and is_roundable(module) and owners[id(module.weight)] == 1:
                    places.setdefault(module, []).append((parent, name))
        self._form, self._tables = form, {id(table) for table in tables}
        self._shapes = {table.shape for table in tables}
        named = ((f"{path}.weight", module) for path, module in model.named_modules() if module in places)
        self._left = {name: (module, places[module]) for name, module in named}
        for name in keep:
            self._left.pop(name, None)

    def round(self, name: str) -> None:
        """Replace the layer with the weight of this name, if it is to be replaced. ValueError: it is not finite."""
        if name not in self._left:
            return
        module, _ = self._left[name]
        weight = module.weight.detach()
        try:
            form = output_form(self._form) if weight.shape in self._shapes else self._form
            layer = RoundedLinear(weight if isinstance(module, nn.Linear) else weight.t(), module.bias, form)
        except ValueError:
            raise ValueError(f"{name}: holds NaN or infinities, which {self._form} cannot hold") from None
        self._replace(name, layer)

    def shapes(self) -> dict[str, tuple[int, int]]:
        """(F, E) of the layers that are left, by the names of their weights."""
        return {
            name: tuple(module.weight.shape if isinstance(module, nn.Linear) else module.weight.shape[::-1])
            for name, (module, _) in self._left.items()
        }

    def table(self, name: str) -> bool:
        """Whether the weight of a layer that is left is that of an embedding, too."""
        return id(self._left[name][0].weight) in self._tables

    def hold(self, name: str, weight: GroupedWeight | Int8Weight, form: str) -> RoundedLinear:
        """Replace the layer that is left under a name by one with a weight of a checkpoint."""
        module, _ = self._left[name]
        layer = RoundedLinear(weight, module.bias, form, module.weight.dtype)
        self._replace(name, layer)
        return layer

    def _replace(self, name: str, layer: RoundedLinear) -> None:
        module, places = self._left.pop(name)
        for parent, own in places:
            parent._modules[own] = layer.train(module.training)

    def round_all(self) -> None:
        """Replace all layers that are left. ValueError: a weight is not finite."""
        for name in list(self._left):
            self.round(name)


def described(model: nn.Module) -> str:
    """A line break, and how many linear layers hold their weights in few bits, with the bytes; "" if none does."""
    layers = [part for part in model.modules() if isinstance(part, RoundedLinear)]
    if not layers:
        return ""
    others = sum(isinstance(part, nn.Linear) for part in model.modules()) - len(layers)
    full = sum(part.out_features * part.in_features * part._like.element_size() for part in layers)
    held = sum(buffer.nbytes for part in layers for buffer in part.buffers())
    whole = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    forms = Counter(part.form for part in layers)
    form, _ = forms.most_common(1)[0]
    rest = "".join(f" ({count} of them in {other})" for other, count in forms.items() if other != form)
    dtype = str(layers[0]._like.dtype).removeprefix("torch.")
    return (
        f"\n{len(layers)} linear layers hold their weights in {form}{rest}: {_mb(held)}, in {dtype} {_mb(full)}; "
        f"{others} others stay {dtype}; the whole model has {_mb(whole)}"
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"

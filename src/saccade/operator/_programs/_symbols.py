"""Calls of PyTorch with symbols: `applied` makes the nodes of what a function computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._arrays import Recording, Symbol, array_of, indexed, like, made, named, symbol
from ._aten import FILLED, REDUCTIONS, RULES
from ._shapes import VIEWS, gathered, iterated, reduced, stacked, view
from ._values import Array, Index, NotTraceable, Value, kind_of

DESCRIBING = frozenset(  # what says nothing about values
    "dtype device shape ndim layout requires_grad is_cuda is_cpu is_meta is_sparse size dim ndimension numel nelement "
    "stride is_floating_point is_complex element_size itemsize get_device __len__ is_contiguous is_tensor result_type "
    "is_signed is_leaf is_inference is_quantized is_nested is_mps is_xpu grad_fn names __hash__ is_conj is_neg".split()
)
# What needs a value in Python, and what people write that does.
_VALUES = dict.fromkeys(("item", "tolist", "numpy", "__int__", "__float__", "__array__"), "") | {
    "__bool__": ", as of `if`, `and`, `or`, `not` and chained comparisons: use torch.where, &, |, ~",
    "__index__": ", as of a list or an array that is read by an index: make it a tensor",
}


def applied(recording: Recording, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a call of PyTorch with symbols."""
    name, ordered = named(func, args)
    if func is Tensor.__getitem__:
        return indexed(recording, *args)
    if name in DESCRIBING:
        return func(*args, **kwargs)
    if name in RULES:
        return _pointwise(recording, name, like(func, args, kwargs), ordered, kwargs)
    if name.endswith("_") and name[:-1] in RULES:
        return _in_place(recording, func, name[:-1], args, kwargs)
    special = _SPECIAL.get(name)
    if special is not None:
        return special(recording, func, args, kwargs)
    if name in _VALUES:
        raise NotTraceable(f"a value is needed in Python (Tensor.{name}{_VALUES[name]})")
    raise NotTraceable(f"torch.{name}")


def _in_place(recording: Recording, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`score += x`: the symbol takes over the value."""
    changed = args[0]
    if not isinstance(changed, Symbol) or changed.dim():
        raise NotTraceable(f"torch.{name}_ on a tensor made inside")
    like(func, (torch.ones((), dtype=changed.dtype), *args[1:]), kwargs)  # raises what PyTorch raises
    _become(recording, changed, _worked_out(recording, name, args, kwargs))
    return changed


def _become(recording: Recording, changed: Symbol, array: Array) -> None:
    own, build = changed.array, recording.build
    changed.array = made(own.shape, own.kind, lambda at: Value(build, array.entry(build, at)).to(own.kind).node)


def _overwritten(recording: Recording, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], Symbol) or args[0].dim():
        raise NotTraceable("writes to a tensor made inside")
    _become(recording, args[0], array_of(recording, args[1] if len(args) > 1 else 0))
    return args[0]


def _worked_out(recording: Recording, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Array:
    """The result of a rule for arrays, with the shape to which they broadcast."""
    rule, build = RULES[name], recording.build
    count = len(rule.names)
    rest = {key: value for key, value in kwargs.items() if key not in rule.names and key not in ("out", "inplace")}
    given = [*args[:count], *(kwargs.get(key) for key in rule.names[len(args) :])]
    arrays = [None if value is None else array_of(recording, value) for value in given]
    more = () if rule.only_values else args[count:]
    options = {} if rule.only_values else rest

    def at(index: Index) -> int:
        values = [None if array is None else Value(build, array.entry(build, index)) for array in arrays]
        return rule.make(*values, *more, **options).node

    return Array(np.broadcast_shapes(*(array.shape for array in arrays if array is not None)), "float", at)


def _pointwise(recording: Recording, name: str, shaped: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Symbol:
    kind, build = kind_of(shaped.dtype), recording.build
    if kind == "float":
        recording.dtypes.add(shaped.dtype)
    array = _worked_out(recording, name, args, kwargs)
    return symbol(
        recording, made(shaped.shape, kind, lambda at: Value(build, array.at(at)).to(kind).node), shaped.dtype
    )


def _filled(recording: Recording, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Symbol:
    shaped, value = like(func, args, kwargs), FILLED[named(func, args)[0]]
    if value is None:
        value = kwargs.get("fill_value", args[-1])
        if not isinstance(value, bool | int | float):
            raise NotTraceable(f"torch.{func.__name__} of a {type(value).__name__}")
    kind = kind_of(shaped.dtype)
    node = recording.build.const(value, kind)
    return symbol(recording, Array(tuple(shaped.shape), kind, lambda _: node), shaped.dtype)


def _dot(recording: Recording, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return applied(recording, torch.sum, (applied(recording, torch.mul, args, {}),), {})


_SPECIAL: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(FILLED, _filled),
    **dict.fromkeys(VIEWS, view),
    **dict.fromkeys(REDUCTIONS, reduced),
    **dict.fromkeys(("take", "embedding", "index_select"), gathered),
    **dict.fromkeys(("zero_", "fill_", "copy_"), _overwritten),
    "stack": stacked,
    "dot": _dot,
    "__iter__": iterated,
}

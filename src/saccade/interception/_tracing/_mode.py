"""A torch-function mode that sees every PyTorch function called on a thread.

F.scaled_dot_product_attention is seen however it was imported; F.multi_head_attention_forward is entered, so that what
it calls is seen. While a mode is on, PyTorch's modules do not take their native fast path: on this thread alone.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

SDPA = torch._C._nn.scaled_dot_product_attention
_MULTI_HEAD = inspect.unwrap(F.multi_head_attention_forward)


@dataclass(eq=False)
class FunctionCall:
    """One call of a PyTorch function."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None  # None: it has not run yet, or returns nothing, as `x[...] = 0` does

    @cached_property
    def name(self) -> str:
        return name_of(self.func)

    @cached_property
    def given(self) -> list[Tensor]:
        return list(tensors_in([*self.args, *self.kwargs.values()]))

    @cached_property
    def made(self) -> list[Tensor]:
        """The tensors in its result, or the tensor it wrote to if it returned nothing."""
        written = self.args[:1] if self.result is None else ()
        return list(tensors_in([self.result, *written, self.kwargs.get("out")]))


class FunctionMode(TorchFunctionMode):
    """Observes every function call and changes nothing, unless a subclass does in `called`."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.passes():
            return func(*args, **kwargs)
        if func is _MULTI_HEAD or func is F.multi_head_attention_forward:  # which `accelerate` may have replaced
            return self.multi_head(args, kwargs)
        return self.called(func, args, kwargs)

    def passes(self) -> bool:
        """Whether to pass calls through unobserved: under the compiler or a torch.func transform."""
        return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function and observe its result."""
        call = FunctionCall(func, args, kwargs, func(*args, **kwargs))
        with torch.no_grad(), torch._C.DisableTorchFunction():
            self.sees(call)
        return call.result

    def sees(self, call: FunctionCall) -> None:
        """Called with each finished call; subclasses override it."""

    def multi_head(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the body of F.multi_head_attention_forward under this mode; a plain call would switch the mode off."""
        if overridden(args, kwargs):
            return _MULTI_HEAD(*args, **kwargs)
        names = {**_MULTI_HEAD.__globals__, "has_torch_function": lambda _: False}
        of = _MULTI_HEAD
        inner = types.FunctionType(of.__code__, names, of.__name__, of.__defaults__, of.__closure__)
        inner.__kwdefaults__ = of.__kwdefaults__
        with self:
            return inner(*args, **kwargs)


def overridden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an argument has a `__torch_function__` of its own.

    `torch.overrides.has_torch_function` also says so where another mode is on, such as `with torch.device("cpu")`.
    """
    kinds = {type(arg) for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)}
    return any(_protocol(kind) not in _USUAL for kind in kinds)


def _protocol(kind: Any) -> Any:
    return getattr(kind.__torch_function__, "__func__", kind.__torch_function__)


_USUAL = (_protocol(Tensor), torch._C._disabled_torch_function_impl)  # of tensors and parameters


def name_of(func: Any) -> str:
    """`Tensor.__add__` -> "add", `Tensor.add_` -> "add", `x.mT` -> "mT"."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = getattr(func.__self__, "__name__", name)
    return str(name).strip("_")


def writes(func: Any) -> bool:
    """Whether a function writes into its first argument: `mul_`, `scores[...] = x`, `scores += x`."""
    name = getattr(func, "__name__", "")
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


_WRITING = frozenset("__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ipow__ __imod__".split())


def is_kernel(func: Any) -> bool:
    """Whether a function is a custom operator that computes attention, judged by its name."""
    if not isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)):
        return False
    name = str(func).lower()
    return "attention" in name or "attn" in name


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors among arguments or results, including those in lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for one in value:
            yield from tensors_in(one)

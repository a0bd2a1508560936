"""The mode that sees PyTorch's functions while a watched forward runs, and knows attention among them.

F.scaled_dot_product_attention is seen however it was imported; F.multi_head_attention_forward is entered, so that what
it calls is seen; scores, softmax and the product with the values are put together by `_unfused`. While a mode is on,
PyTorch's modules do not take their native fast path: on this thread alone, and nothing has to be switched off.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, has_torch_function

from ... import _tap
from ..._hooks import SdpaCall
from ..._masks import Mask, as_mask
from . import _thread
from ._observed_call import GraphTensor, ObservedCall
from ._origins import TensorOrigins
from ._padded import QueryRows, rows_of
from ._thread import counted_if_it_fails
from ._unfused import UnfusedFollower

_SDPA = torch._C._nn.scaled_dot_product_attention
_MHA = inspect.unwrap(F.multi_head_attention_forward)
SDPA = "F.scaled_dot_product_attention"


class AttentionCallsMode(_tap.PassiveMode, TorchFunctionMode):
    """Tells `_tap` of the attention calls among the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self._origins = TensorOrigins()
        self._unfused = UnfusedFollower(self._origins)
        # Inside nn.MultiheadAttention: whether its queries and keys are one sequence.
        self._within: Callable[[], bool | None] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Without observers the call that runs is told as a whole by someone else.
        if torch.compiler.is_compiling() or not _tap.THREAD.observers:
            return func(*args, **kwargs)
        if func is _SDPA:
            return self._sdpa(func, args, kwargs)
        if func is _MHA or func is F.multi_head_attention_forward:  # which someone, `accelerate` say, may have replaced
            return self._multi_head(args, kwargs)
        if _is_kernel(func):
            _thread.missed(str(func), "an attention kernel was called by itself")
        by_hand = self._unfused.concerns(func, args)
        result = func(*args, **kwargs)
        try:
            with torch._C.DisableTorchFunction():
                self._origins.sees(func, args, kwargs, result)
        except Exception as error:  # as in `counted_if_it_fails`, which costs more, and this runs for every function
            _thread.missed("what queries and keys are made of", f"{type(error).__name__}: {error}")
        if not by_hand:
            return result
        call: ObservedCall | None = None
        with torch.no_grad(), torch._C.DisableTorchFunction(), counted_if_it_fails("attention by hand"):
            call = self._unfused.sees(func, args, kwargs, result)
        if call is not None:
            _tell(call)
        return result

    def ended(self) -> None:
        """The forward has ended: what was begun by hand and never finished was not attention that is known."""
        self._unfused.ended()
        self._origins.ended()

    def completed(self, call: _tap.AttentionCall) -> _tap.AttentionCall:
        """A call that someone answered in PyTorch's place, with the rows that are tokens."""
        if isinstance(call, ObservedCall) or call.source != SDPA:
            return call
        own = {field.name: getattr(call, field.name) for field in fields(call)}
        rows = self._rows(as_mask(call.mask), own["bias"], call.query, call.key, (call.query, call.key))
        return ObservedCall(**own, real=rows.real, rows_unknown=rows.unknown)

    def _sdpa(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        with _tap.aside():
            out = func(*args, **kwargs)
        call: ObservedCall | None = None
        with torch.no_grad(), torch._C.DisableTorchFunction(), counted_if_it_fails(SDPA):
            call = self._seen(SdpaCall.of(*args, **kwargs), out)
        if call is not None:
            _tell(call)
        return out

    def _seen(self, given: SdpaCall, out: Tensor) -> ObservedCall | None:
        meaning = "a torch.func transform is at work" if _transformed() else given.meaning()
        if isinstance(meaning, str):
            _thread.missed(SDPA, meaning)
            return None
        query, key, value = meaning.query, meaning.key, meaning.value
        shape = (*query.shape[:3], value.shape[-1])
        used = {
            "query": _as_shaped(given.query, query.shape),
            "key": _as_shaped(given.key, key.shape),
            "value": _as_shaped(given.value, value.shape),
            "out": GraphTensor(out, None if out.shape == shape else lambda gradient: gradient.reshape(shape)),
        }
        rows = self._rows(meaning.mask, meaning.bias, query, key, (given.query, given.key))
        return ObservedCall(
            query,
            key,
            value,
            meaning.mask,
            meaning.bias,
            meaning.scale,
            None,
            None,
            meaning.dropout,
            out.detach().reshape(shape),
            SDPA,
            None,
            used,
            rows.real,
            rows.unknown,
        )

    def _rows(
        self, mask: Mask | None, bias: Any, query: Tensor, key: Tensor, given: tuple[Tensor, Tensor]
    ) -> QueryRows:
        """Which rows count, of a call of F.sdpa on the tensors `given`."""
        length = query.shape[2]

        def self_attention() -> bool | None:
            return self._origins.same(*given, length) if self._within is None else self._within()

        return rows_of(mask, bias, length, key.shape[2], self_attention)

    def _multi_head(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Enter F.multi_head_attention_forward: it would hand itself to this mode again, so it is told not to."""
        if has_torch_function([arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]):
            _thread.missed("F.multi_head_attention_forward", "an argument has a __torch_function__ of its own")
            return _MHA(*args, **kwargs)
        names = {**_MHA.__globals__, "has_torch_function": lambda _: False}
        entered = types.FunctionType(_MHA.__code__, names, _MHA.__name__, _MHA.__defaults__, _MHA.__closure__)
        entered.__kwdefaults__ = _MHA.__kwdefaults__
        query, key, heads = args[0], args[1], args[4]
        before, self._within = self._within, lambda: self._origins.same(query, key, query.shape[0], projected=False)
        try:
            with self._unfused.told("nn.MultiheadAttention", heads, self._within), self:
                return entered(*args, **kwargs)
        finally:
            self._within = before


def _tell(call: ObservedCall) -> None:
    with _tap.aside() as observers:
        for observer in observers:
            observer(call)


def _as_shaped(given: Tensor, shape: torch.Size) -> GraphTensor:
    """What the model gave; where the call broadcast it, its gradient has the heads that it has itself."""
    if given.shape == shape or given.numel() != shape.numel():
        return GraphTensor(given)
    return GraphTensor(given, lambda gradient: gradient.reshape(shape))


def _is_kernel(func: Any) -> bool:
    """Whether it is an operator (not one of PyTorch's functions) that computes attention, as its name says."""
    if not isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)):
        return False
    name = str(func).lower()
    return "attention" in name or "attn" in name


def _transformed() -> bool:
    return torch._C._are_functorch_transforms_active()

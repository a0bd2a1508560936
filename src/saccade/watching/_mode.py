"""The mode that sees PyTorch's functions while a watched forward runs, and knows attention among them.

F.scaled_dot_product_attention is seen however it was imported; F.multi_head_attention_forward is entered, so that what
it calls is seen; scores, softmax and the product with the values are put together by `_by_hand`. While a mode is on,
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

from .. import _tap
from .._masks import as_mask
from ..interception import SdpaCall
from . import _thread
from ._by_hand import ByHand
from ._padded import real_rows
from ._seen import SeenCall, Used
from ._thread import counted_if_it_fails

_SDPA = torch._C._nn.scaled_dot_product_attention
_MHA = inspect.unwrap(F.multi_head_attention_forward)
SDPA = "F.scaled_dot_product_attention"


class Sight(_tap.OnlyLooks, TorchFunctionMode):
    """Tells `_tap` of the attention calls among the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self._by_hand = ByHand()
        self._self_attention: bool | None = None  # what is known of the call that is inside nn.MultiheadAttention

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
        if not self._by_hand.concerns(func, args):
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        call: SeenCall | None = None
        with torch.no_grad(), torch._C.DisableTorchFunction(), counted_if_it_fails("attention by hand"):
            call = self._by_hand.sees(func, args, kwargs, result)
        if call is not None:
            _tell(call)
        return result

    def ended(self) -> None:
        """The forward has ended: what was begun by hand and never finished was not attention that is known."""
        self._by_hand.ended()

    def completed(self, call: _tap.AttentionCall) -> _tap.AttentionCall:
        """A call that someone answered in PyTorch's place, with the rows that are tokens."""
        if isinstance(call, SeenCall) or call.source != SDPA:
            return call
        own = {field.name: getattr(call, field.name) for field in fields(call)}
        lengths = call.query.shape[2], call.key.shape[2]
        return SeenCall(**own, real=real_rows(as_mask(call.mask), own["bias"], *lengths, self._self_attention))

    def _sdpa(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        with _tap.aside():
            out = func(*args, **kwargs)
        call: SeenCall | None = None
        with torch.no_grad(), torch._C.DisableTorchFunction(), counted_if_it_fails(SDPA):
            call = self._seen(SdpaCall.of(*args, **kwargs), out)
        if call is not None:
            _tell(call)
        return out

    def _seen(self, given: SdpaCall, out: Tensor) -> SeenCall | None:
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
            "out": Used(out, None if out.shape == shape else lambda gradient: gradient.reshape(shape)),
        }
        return SeenCall(
            query, key, value, meaning.mask, meaning.bias, meaning.scale, None, None, meaning.dropout,
            out.detach().reshape(shape), SDPA, None, used,
            real_rows(meaning.mask, meaning.bias, query.shape[2], key.shape[2], self._self_attention),
        )  # fmt: skip

    def _multi_head(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Enter F.multi_head_attention_forward: it would hand itself to this mode again, so it is told not to."""
        if has_torch_function([arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]):
            _thread.missed("F.multi_head_attention_forward", "an argument has a __torch_function__ of its own")
            return _MHA(*args, **kwargs)
        names = {**_MHA.__globals__, "has_torch_function": lambda _: False}
        entered = types.FunctionType(_MHA.__code__, names, _MHA.__name__, _MHA.__defaults__, _MHA.__closure__)
        entered.__kwdefaults__ = _MHA.__kwdefaults__
        query, key, heads = args[0], args[1], args[4]
        before, self._self_attention = self._self_attention, query is key
        try:
            with self._by_hand.told("nn.MultiheadAttention", heads, query is key), self:
                return entered(*args, **kwargs)
        finally:
            self._self_attention = before


def _tell(call: SeenCall) -> None:
    with _tap.aside() as observers:
        for observer in observers:
            observer(call)


def _as_shaped(given: Tensor, shape: torch.Size) -> Used:
    """What the model gave; where the call broadcast it, its gradient has the heads that it has itself."""
    if given.shape == shape or given.numel() != shape.numel():
        return Used(given)
    return Used(given, lambda gradient: gradient.reshape(shape))


def _is_kernel(func: Any) -> bool:
    """Whether it is an operator (not one of PyTorch's functions) that computes attention, as its name says."""
    if not isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)):
        return False
    name = str(func).lower()
    return "attention" in name or "attn" in name


def _transformed() -> bool:
    return torch._C._are_functorch_transforms_active()

"""The mode that observes PyTorch's functions during a watched forward, and recognises attention among them.

F.scaled_dot_product_attention is reported as one call; `_by_hand` combines scores, softmax and the product with the
values into one, also within F.multi_head_attention_forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....interception._hooks import SdpaCall
from ....interception._tracing import SDPA, FunctionMode, is_kernel, overridden
from ....operator import _observers
from ....operator._attention import attention
from ....operator._call import AttentionCall, GraphTensor, ObservedCall
from ....operator._masks import Mask, as_mask
from . import _thread
from ._by_hand import ByHandFollower
from ._origins import TensorOrigins
from ._padded import QueryRows, rows_of
from ._thread import counted_if_it_fails

SOURCE = "F.scaled_dot_product_attention"
_KERNEL = "an attention kernel was called by itself"
_FLEX = "PyTorch computed it; inside of saccade.accelerate() its calls on CPUs are observed"


class AttentionCallsMode(_observers.PassiveMode, FunctionMode):
    """Reports to `_observers` the attention calls among the functions of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self._origins = TensorOrigins()
        self._by_hand = ByHandFollower(self._origins)
        # Inside nn.MultiheadAttention: whether its queries and keys are one sequence.
        self._within: Callable[[], bool | None] | None = None

    def passes(self) -> bool:
        """Whether there are no observers, so that the running call is reported as a whole elsewhere."""
        return torch.compiler.is_compiling() or not _observers.THREAD.observers

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is SDPA:
            return self._sdpa(func, args, kwargs)
        if is_kernel(func):
            _thread.missed(str(func), _FLEX if str(func) == "flex_attention" else _KERNEL)
        by_hand = self._by_hand.concerns(func, args)
        result = func(*args, **kwargs)
        try:
            with torch._C.DisableTorchFunction():
                self._origins.sees(func, args, kwargs, result)
        except Exception as error:  # as `counted_if_it_fails`, which is slower, and this runs for every function
            _thread.missed("origins of queries and keys", f"{type(error).__name__}: {error}")
        if _observers.THREAD.editor is not None:
            self._by_hand.made(func, args, result)
        if not by_hand:
            return result
        call: ObservedCall | None = None
        with torch.no_grad(), torch._C.DisableTorchFunction(), counted_if_it_fails("attention by hand"):
            call = self._by_hand.sees(func, args, kwargs, result)
        if _observers.THREAD.editor is not None:
            result, call = self._by_hand.edited(func, args, kwargs, result, call)
        if call is not None:
            _tell(call)
        return result

    def ended(self) -> None:
        """The forward has ended: unfinished attention by hand is dropped."""
        self._by_hand.ended()
        self._origins.ended()

    def with_rows(self, call: AttentionCall, source: str) -> AttentionCall:
        """An unedited call of F.scaled_dot_product_attention with the rows that are tokens."""
        if source != SOURCE:
            return call
        with torch.no_grad(), torch._C.DisableTorchFunction():
            rows = self._rows(as_mask(call.mask), call.bias, call.query, call.key, (call.query, call.key))
        return replace(call, real=rows.real)

    def completes(self, call: ObservedCall) -> bool:
        """Whether a call was computed in PyTorch's place, so that its rows are not known yet."""
        return call.used is None and call.source == SOURCE

    def completed(self, call: ObservedCall) -> ObservedCall:
        """The call with the rows that are tokens."""
        rows = self._rows(as_mask(call.mask), call.bias, call.query, call.key, (call.query, call.key))
        return replace(call, real=rows.real, rows_unknown=rows.unknown)

    def _sdpa(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        edits = _observers.edits_of(SOURCE)
        if edits is not None:
            return self._edited_sdpa(edits, func, SdpaCall.of(*args, **kwargs))
        with _observers.aside():
            out = func(*args, **kwargs)
        call: ObservedCall | None = None
        with torch.no_grad(), torch._C.DisableTorchFunction(), counted_if_it_fails(SOURCE):
            call = self._seen(SdpaCall.of(*args, **kwargs), out)
        if call is not None:
            _tell(call)
        return out

    def _edited_sdpa(self, edits: _observers.CallEdits, func: Callable[..., Tensor], given: SdpaCall) -> Tensor:
        meaning = given.meaning()
        if torch._C._are_functorch_transforms_active() or isinstance(meaning, str):
            reason = meaning if isinstance(meaning, str) else "inside a torch.func transform"
            raise ValueError(f"intervene: a call of {SOURCE} cannot be changed: {reason}")
        query, key, value = meaning.query, meaning.key, meaning.value
        with torch.no_grad():
            rows = self._rows(as_mask(meaning.mask), meaning.bias, query, key, (given.query, given.key))

        def compute(changed: AttentionCall) -> Tensor:
            factors = changed.query, changed.key, changed.value
            if changed.scores_like(meaning) and all(
                now.shape == before.shape for now, before in zip(factors, (query, key, value), strict=True)
            ):
                rest = given[3:6]  # mask, dropout, causal
                out = func(*_as_given(given, factors), *rest, scale=given.scale, enable_gqa=given.enable_gqa)
                return out.reshape(*query.shape[:3], value.shape[-1])
            return attention(*factors, **changed.arguments())

        with _observers.aside() as observers:
            edited = edits.answered(replace(meaning, real=rows.real), compute)
            return meaning.shaped(_observers.notify_edited(observers, edited, SOURCE))

    def _seen(self, given: SdpaCall, out: Tensor) -> ObservedCall | None:
        meaning = "inside a torch.func transform" if torch._C._are_functorch_transforms_active() else given.meaning()
        if isinstance(meaning, str):
            _thread.missed(SOURCE, meaning)
            return None
        query, key, value = meaning.query, meaning.key, meaning.value
        shape = (*query.shape[:3], value.shape[-1])
        used = {
            "query": _as_shaped(given.query, query.shape),
            "key": _as_shaped(given.key, key.shape),
            "value": _as_shaped(given.value, value.shape),
            "out": GraphTensor(out, None if out.shape == shape else lambda gradient: gradient.reshape(shape)),
        }
        rows = self._rows(as_mask(meaning.mask), meaning.bias, query, key, (given.query, given.key))
        shaped = out.detach().reshape(shape)
        return meaning.observed(shaped, SOURCE, used=used, real=rows.real, rows_unknown=rows.unknown)

    def _rows(
        self, mask: Mask | None, bias: Any, query: Tensor, key: Tensor, given: tuple[Tensor, Tensor]
    ) -> QueryRows:
        """The counted rows of a call of F.sdpa on the tensors `given`."""
        length = query.shape[2]

        def self_attention() -> bool | None:
            return self._origins.same(*given, length) if self._within is None else self._within()

        return rows_of(mask, bias, length, key.shape[2], self_attention)

    def multi_head(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if overridden(args, kwargs):
            _thread.missed("F.multi_head_attention_forward", "an argument has a __torch_function__ of its own")
        query, key, heads = args[0], args[1], args[4]
        before, self._within = self._within, lambda: self._origins.same(query, key, query.shape[0], projected=False)
        try:
            with self._by_hand.within_call("nn.MultiheadAttention", heads, self._within):
                return super().multi_head(args, kwargs)
        finally:
            self._within = before


def _tell(call: ObservedCall) -> None:
    with _observers.aside() as observers:
        _observers.notify(observers, call)


def _as_given(given: SdpaCall, factors: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Four-dimensional query, key and value in the shapes of the model; broadcast tensors as they are."""
    return [
        factor.reshape(own.shape) if factor.numel() == own.numel() else factor
        for factor, own in zip(factors, given[:3], strict=True)
    ]


def _as_shaped(given: Tensor, shape: torch.Size) -> GraphTensor:
    """The model's tensor. Its gradient has its own shape, also where the call reshaped it."""
    if given.shape == shape or given.numel() != shape.numel():
        return GraphTensor(given)
    return GraphTensor(given, lambda gradient: gradient.reshape(shape))

"""Attention of transformers' models: each call of an attention function, eager ones included, told as a whole.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D / Dv widths.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ... import _tap
from ..._call import GraphTensor, ObservedCall
from . import _thread

Function = Callable[..., Any]


@contextlib.contextmanager
def attention_functions() -> Iterator[None]:
    """Attention functions that models of transformers look up on this thread tell `_tap` of their calls."""
    if "transformers" not in sys.modules:  # then no model of it exists
        yield
        return
    from ..._hooks.transformers import functions_wrapped_by

    with functions_wrapped_by(_telling):
        yield


def _telling(function: Function) -> Function:
    @functools.wraps(function)
    def told(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any) -> Any:
        if not _thread.THREAD.watchers or not _tap.THREAD.observers:
            return function(module, query, key, value, attention_mask, **more)
        with _tap.aside() as observers:
            given = function(module, query, key, value, attention_mask, **more)
            call: ObservedCall | None = None
            with torch.no_grad(), torch._C.DisableTorchFunction(), _thread.counted_if_it_fails(_name(function)):
                call = _call(function, module, query, key, value, attention_mask, given, more)
            if call is not None:
                _tap.tell(observers, call)
        return given

    return told


def _call(
    function: Function,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    given: Any,
    more: dict[str, Any],
) -> ObservedCall:
    from ..._hooks.transformers import meaning_of

    meaning = meaning_of(module, query, key, value, attention_mask, **more)
    out = given[0]  # (B, Lq, Hq, Dv)
    used = {
        "query": GraphTensor(query),
        "key": GraphTensor(key),
        "value": GraphTensor(value),
        "out": GraphTensor(out, _rows_inside),
    }
    return meaning.observed(out.detach().transpose(1, 2), _name(function), module, used=used)


def _rows_inside(gradient: Tensor) -> Tensor:
    return gradient.transpose(1, 2)


def _name(function: Function) -> str:
    return f"transformers {getattr(function, '__name__', type(function).__name__)}"

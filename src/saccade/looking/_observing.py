"""The attention calls of a transformers model, one by one, as Saccade's.

Shapes: as in `saccade._tap`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import _tap
from .._masks import Causal


@contextmanager
def observed(module: nn.Module, tell: _tap.Observer) -> Iterator[None]:
    """Meanwhile `tell` is given every attention call of the model on this thread."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as interface

    kind = type(interface)
    inner = kind.get_interface

    def get(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return _telling(inner(self, name, default), tell)

    kind.get_interface = get
    try:
        yield
    finally:
        kind.get_interface = inner


def _telling(function: Callable[..., Any], tell: _tap.Observer) -> Callable[..., Any]:
    def run(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any) -> Any:
        out = function(module, query, key, value, attention_mask, **more)
        causal = more.get("is_causal")
        causal = getattr(module, "is_causal", False) if causal is None else causal
        seen, bias = attention_mask, None
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            seen, bias = None, attention_mask.to(query.dtype)
        mask = Causal() if attention_mask is None and causal and query.shape[2] > 1 else seen
        call = _tap.AttentionCall(
            query, key, value, mask, bias, more.get("scaling"), more.get("softcap"), more.get("s_aux"), 0.0,
            out[0].transpose(1, 2), "transformers", module,
        )  # fmt: skip
        tell(call)
        return out

    return run

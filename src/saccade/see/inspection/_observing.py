"""The attention calls of a transformers model, observed as calls of Saccade.

Shape legend: as in `saccade.operator._call`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ...interception._hooks import SdpaCall, sdpa_handled_by
from ...interception._hooks.transformers import functions_wrapped_by, meaning_of
from ...operator import _observers


@contextmanager
def calls_told_to(tell: _observers.Observer) -> Iterator[None]:
    """Call `tell` for every attention call that a model of transformers makes on this thread.

    That is every call of its attention functions, for each implementation, and its direct calls of
    F.scaled_dot_product_attention.
    """

    inside = False  # within an attention function, calls of other functions are part of its call

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any) -> Any:
            nonlocal inside
            outer, inside = inside, True
            try:
                out = function(module, query, key, value, attention_mask, **more)
            finally:
                inside = outer
            meant = meaning_of(module, query, key, value, attention_mask, **more)
            tell(meant.observed(out[0].transpose(1, 2), "transformers", module))
            return out

        return run

    def handle(call: SdpaCall, proceed: Callable[[], Tensor]) -> Tensor:
        out = proceed()
        if not inside:
            meant = call.meaning()
            if isinstance(meant, str):
                raise ValueError(f"F.scaled_dot_product_attention is called with {meant}")
            rows = (*meant.query.shape[:3], meant.value.shape[-1])
            tell(meant.observed(out.reshape(rows), "F.scaled_dot_product_attention"))
        return out

    with functions_wrapped_by(wrap), sdpa_handled_by(handle):
        yield

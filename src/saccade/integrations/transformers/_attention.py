"""The attention function behind `attn_implementation="saccade"`.

Shape legend: B batch, Hq query heads, Lq / Lk lengths, Dv value width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ...interception._hooks.transformers import meaning_of
from ...operator._attention import attention
from ...operator._call import AttentionCall
from ...operator._weights import attention_weights

Attentions = Literal["weights", "statistics"]
Second = Callable[[AttentionCall], Any]


def function_giving(second: Second, ignored: frozenset[str]) -> Callable[..., tuple[Tensor, Any]]:
    """An attention function whose second value is `second(meaning)` if a caller requests attentions."""

    def saccade_attention_forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any
    ) -> tuple[Tensor, Any]:
        meaning = meaning_of(module, query, key, value, attention_mask, ignored=ignored, **more)
        out = attention(meaning.query, meaning.key, meaning.value, **meaning.arguments())
        asked = more.get("output_attentions") or _collected()
        return out.transpose(1, 2).contiguous(), second(meaning) if asked else None

    return saccade_attention_forward


def _collected() -> bool:
    """Whether the forward under way collects attentions: many models do not hand `output_attentions` down."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return False
    if torch.compiler.is_compiling() and not _active_collector.compiling:
        return False  # a context variable, which compilers cannot read
    return any(name.endswith("attentions") for name in _active_collector.get() or ())


# Compilers break their graph here: traced, the tiles of one call would be thousands of operations.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def weights(meaning: AttentionCall) -> Tensor:
    """(B, Hq, Lq, Lk) in the dtype of the query, as eager returns them but without dropout."""
    return attention_weights(meaning.query, meaning.key, **meaning.scoring()).to(meaning.query.dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def statistics(meaning: AttentionCall) -> Any:
    """`saccade.Statistics` of the call, without padded queries if the mask marks them."""
    from ...operator._statistics import statistics as of

    return of(meaning.query, meaning.key, value=meaning.value, **{**meaning.scoring(), "mask": meaning.counted_mask})

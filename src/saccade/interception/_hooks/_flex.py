"""Calls of torch.nn.attention.flex_attention.flex_attention, wherever the reference to the function was taken.

Models write `from ... import flex_attention`, or keep `torch.compile(flex_attention)`. So the code of the function is
exchanged, not a name: every reference runs it, and PyTorch's compiler traces it. Begin with `_replaced.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame

from ._exchanged import ExchangedCode
from ._replaced import run_handlers

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask


class FlexCall(NamedTuple):
    """The arguments of one call, with PyTorch's names and defaults."""

    query: Tensor  # (B, Hq, Lq, D)
    key: Tensor  # (B or 1, Hkv, Lk, D)
    value: Tensor  # (B or 1, Hkv, Lk, Dv)
    score_mod: Callable[..., Tensor] | None = None
    block_mask: BlockMask | None = None
    scale: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False
    kernel_options: dict[str, Any] | None = None
    return_aux: AuxRequest | None = None


FlexHandler = Callable[[FlexCall, Callable[[], Any]], Any]


def _exchanged(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: Any = None,
    enable_gqa: Any = False,
    return_lse: Any = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    # It runs among the globals of PyTorch's module, with PyTorch's defaults. A compiler traces it up to `answer`.
    given = (query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options)
    if not _saccade_flex.blocks.thread.held.values or torch.compiler.is_exporting():  # type: ignore[name-defined]  # noqa: F821
        return _saccade_flex.below(*given, return_aux=return_aux)  # type: ignore[name-defined]  # noqa: F821
    return _saccade_flex.answer(*given, return_aux)  # type: ignore[name-defined]  # noqa: F821


class _ExchangedFlex(ExchangedCode[FlexHandler]):
    def answer(self, *given: Any) -> Any:
        entered = self.blocks.thread.held
        call = FlexCall(*given)
        return run_handlers(entered, entered.values, call, lambda: self.below(*given[:-1], return_aux=given[-1]))


# A graph ends at the answer, as `torch.compiler.disable` says it: that would import the whole compiler.
_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
_ExchangedFlex.answer._torchdynamo_disable = True  # type: ignore[attr-defined]
_ExchangedFlex.answer._torchdynamo_disable_msg = "saccade answers flex_attention outside of the graph"  # type: ignore[attr-defined]
eval_frame.set_code_exec_strategy(_ExchangedFlex.answer.__code__, _SKIP)


def _theirs() -> Any:
    from torch.nn.attention import flex_attention as module

    return module.flex_attention


_FLEX = _ExchangedFlex("_saccade_flex", _theirs, _exchanged)


@contextmanager
def flex_handled_by(handler: FlexHandler) -> Iterator[None]:
    """A block in which `flex_attention(...)` on this thread calls `handler(call, proceed)`; see `sdpa_handled_by`.

    The function keeps its identity: names imported before and `torch.compile(flex_attention)` are answered, too. The
    code is put back after the last block of all threads, also after an exception.
    """
    with _FLEX.blocks.holding(handler):
        yield

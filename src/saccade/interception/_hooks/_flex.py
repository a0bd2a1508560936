"""Calls of torch.nn.attention.flex_attention.flex_attention, wherever the reference to the function was taken.

Models write `from ... import flex_attention`, or keep `torch.compile(flex_attention)`. So the code of the function is
exchanged, not a name: every reference runs it, and PyTorch's compiler traces it. Begin with `_replaced.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame

from ...support._threads import ThreadBlocks
from ._replaced import run_handlers

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

_GLOBAL = "_saccade_flex"


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
    if not _saccade_flex.handlers.thread.held.values or torch.compiler.is_exporting():  # type: ignore[name-defined]  # noqa: F821
        return _saccade_flex.below(*given, return_aux=return_aux)  # type: ignore[name-defined]  # noqa: F821
    return _saccade_flex.answer(*given, return_aux)  # type: ignore[name-defined]  # noqa: F821


class _ExchangedCode:
    """PyTorch's function while there are handlers: its code is `_exchanged`."""

    def __init__(self) -> None:
        self.handlers: ThreadBlocks[FlexHandler] = ThreadBlocks(self._put)
        self.below: Callable[..., Any] = _nothing
        self.code: CodeType = _exchanged.__code__.replace(co_name="flex_attention")

    def _put(self) -> Callable[[], None]:
        function = _theirs()
        if function is None or function.__code__ is self.code:
            return lambda: None
        before, space = function.__code__, function.__globals__
        self.below = FunctionType(before, space, function.__name__, function.__defaults__)
        self.below.__kwdefaults__ = function.__kwdefaults__
        space[_GLOBAL] = self
        function.__code__ = self.code

        def put_back() -> None:
            if function.__code__ is self.code:
                function.__code__ = before

        return put_back

    def answer(self, *given: Any) -> Any:
        entered = self.handlers.thread.held
        call = FlexCall(*given)
        return run_handlers(entered, entered.values, call, lambda: self.below(*given[:-1], return_aux=given[-1]))


# A graph ends at the answer, as `torch.compiler.disable` says it: that would import the whole compiler.
_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
_ExchangedCode.answer._torchdynamo_disable = True  # type: ignore[attr-defined]
_ExchangedCode.answer._torchdynamo_disable_msg = "saccade answers flex_attention outside of the graph"  # type: ignore[attr-defined]
eval_frame.set_code_exec_strategy(_ExchangedCode.answer.__code__, _SKIP)


def _nothing(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("flex_attention was called before it was found")


def _theirs() -> FunctionType | None:
    """PyTorch's own function, without the wrappers of other code; None if it is not written in Python."""
    from torch.nn.attention import flex_attention as module

    function = inspect.unwrap(module.flex_attention)
    return function if isinstance(function, FunctionType) and not function.__code__.co_freevars else None


_FLEX = _ExchangedCode()


@contextmanager
def flex_handled_by(handler: FlexHandler) -> Iterator[None]:
    """A block in which `flex_attention(...)` on this thread calls `handler(call, proceed)`; see `sdpa_handled_by`.

    The function keeps its identity: names imported before and `torch.compile(flex_attention)` are answered, too. The
    code is put back after the last block of all threads, also after an exception.
    """
    with _FLEX.handlers.holding(handler):
        yield

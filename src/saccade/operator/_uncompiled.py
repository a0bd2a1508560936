"""Functions at which torch.compile breaks its graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(reason: str) -> Callable[[F], F]:
    """Break a compiled graph at a call of the function, which then runs uncompiled with everything it calls.

    `torch.compiler.disable` says the same, but imports the whole compiler the moment a function is decorated.

    Args:
        reason: what the error of `fullgraph=True` shall say.
    """
    skip = eval_frame._FrameAction.SKIP

    def mark(function: F) -> F:
        marked: Any = function
        marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, reason
        eval_frame.set_code_exec_strategy(marked.__code__, eval_frame._FrameExecStrategy(skip, skip))
        return function

    return mark

"""Questions of all parts of the operator about values and about the transforms around a call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._subclasses.fake_tensor import unset_fake_temporarily

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


def describe(value: Any) -> str:
    """A few words for an error message: the type, and the dtype and shape of a tensor."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"a {value.dtype} array of shape {value.shape}"
    if isinstance(value, (bool, int, float, str)):
        return f"{value!r} ({type(value).__name__})"
    return f"a {type(value).__name__}"


def lasting(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: the function runs outside of torch.func, inference mode and fake tensors, so that its result can
    outlive them."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or no_transform():  # a compiler cannot trace these switches
            return function(*args, **kwargs)
        with torch._C._DisableFuncTorch(), unset_fake_temporarily(), torch.inference_mode(False):
            return function(*args, **kwargs)

    return run


def no_transform() -> bool:
    """Whether torch.func, dispatch modes and inference mode are all inactive. The test is cheaper than leaving them."""
    special = torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack()
    return not (special or torch.is_inference_mode_enabled())


def uncompiled(reason: str) -> Callable[[F], F]:
    """Break a compiled graph at a call of the function, which then runs uncompiled with everything it calls.

    `torch.compiler.disable` returns the same, but imports the whole compiler the moment a function is decorated.

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

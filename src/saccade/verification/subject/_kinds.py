"""Which targets can be verified, and the module inside PyTorch's wrappers."""

from __future__ import annotations

import functools
import inspect
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...support._registered import registered
from ..findings._words import article
from ._shortened import LoadedModel

EXPECTED = (
    "expected a function (q, k, v[, mask]), an nn.Module or its class, a transformers model, or a string, "
    '"path/to/file.py:Name" or "hf:DIR_OR_ID"'
)


def check(target: Any) -> None:
    """
    Raises:
        TypeError: it cannot be called with tensors.
    """
    if isinstance(target, nn.Module) and type(target).forward is nn.Module.forward and "forward" not in vars(target):
        raise TypeError(f"target: {_in_words(target)} has no forward; pass a module with a forward")
    if inspect.isclass(target):
        if not {"forward", "__call__"} & {name for kind in target.__mro__ for name in vars(kind)}:
            raise TypeError(f"target: instances of the class {target.__name__} cannot be called; {EXPECTED}")
    elif not callable(target) and not isinstance(target, LoadedModel):
        raise TypeError(f"target: {_in_words(target)} cannot be called; {EXPECTED}")


def saccade_models() -> Any | None:
    """The part that recognises Saccade's models; None if `saccade.models` was never imported, as importing it takes
    seconds."""
    return registered("verified_models") if "saccade.make.models" in sys.modules else None


def _in_words(target: Any) -> str:
    if isinstance(target, ModuleType):
        return f"the Python module {target.__name__!r}"
    if isinstance(target, Tensor):
        return f"a tensor of shape {list(target.shape)}"
    name = type(target).__name__
    return "None" if target is None else f"{article(name)} {name}"


def unwrapped(target: Any) -> tuple[Any, tuple[str, ...]]:
    """The wrapped target, and a description of each wrapper."""
    said: list[str] = []
    while True:
        if isinstance(target, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            said.append(f"what is checked is the module inside {type(target).__name__}")
            target = target.module
            continue
        known = saccade_models()
        inner = None if known is None else known.inner_of(target)
        if inner is not None:
            target = inner[0]
            said.append(inner[1])
            continue
        original = getattr(target, "_orig_mod", None) or getattr(target, "_torchdynamo_orig_callable", None)
        if original is None:
            return target, tuple(said)
        said.append("what is checked is what torch.compile was given; the compile check compiles it")
        target = original


def name_of(target: Any) -> str:
    """The name of the wrapped function or class."""
    target, _ = unwrapped(target)
    while isinstance(target, functools.partial):
        target, _ = unwrapped(target.func)
    if isinstance(target, torch.jit.ScriptFunction):
        return str(target.name)
    named = target if inspect.isclass(target) or inspect.isroutine(target) else type(target)
    return getattr(named, "__qualname__", repr(named)).replace("<locals>.", "")

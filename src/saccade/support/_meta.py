"""Modules on the meta device: names and shapes without numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class _DrawingNothing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.init.normal_:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def on_meta() -> Iterator[None]:
    """`torch.device("meta")`, where initial weights are not drawn.

    There are no numbers to draw, and PyTorch's rule for `normal_` there imports its compiler, which takes a second.
    """
    with torch.device("meta"), _DrawingNothing():
        yield

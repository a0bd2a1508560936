"""States of PyTorch and of models that are given back: random numbers, evaluation mode, modules without numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


@contextmanager
def seeded(seed: int | None, devices: Sequence[int] | None = ()) -> Iterator[None]:
    """A block in which the global generators start at `seed`, or continue if it is None. They are restored afterwards.

    Args:
        seed: as for `torch.manual_seed`.
        devices: the GPUs whose generators are given back, too; None is all of them.
    """
    with torch.random.fork_rng(devices=devices):
        if seed is not None:
            set_seed(seed)
        yield


def set_seed(seed: int) -> None:
    """`torch.manual_seed`, but fast without an accelerator: PyTorch would then store the seed for a later accelerator
    with a stack trace, which takes a hundred times as long."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards each module is in the mode in which it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


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

"""Functions that torch.utils.checkpoint calls again in the backward pass, when the block around the forward has ended.

As in `_flex.py` the code of PyTorch's function is exchanged: models import it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ._exchanged import ExchangedCode

Function = Callable[..., Any]


def _exchanged(function: Any, *args: Any, **options: Any) -> Any:  # it runs among the globals of PyTorch's module
    return _saccade_checkpoint.call(function, *args, **options)  # type: ignore[name-defined]  # noqa: F821


class _ExchangedCheckpoint(ExchangedCode[Callable[[Function], Function]]):
    def call(self, function: Function, *args: Any, **options: Any) -> Any:
        for wrap in self.blocks.thread.held.values:
            function = wrap(function)
        return self.below(function, *args, **options)


def _theirs() -> Any:
    from torch.utils import checkpoint as module

    return module.checkpoint


_CHECKPOINT = _ExchangedCheckpoint("_saccade_checkpoint", _theirs, _exchanged)


@contextmanager
def checkpoints_wrapped_by(wrap: Callable[[Function], Function]) -> Iterator[None]:
    """A block in which this thread's `torch.utils.checkpoint.checkpoint(function, ...)` gets `wrap(function)`.

    What `wrap` returned is also called in the backward pass, when the block may have ended, and perhaps on another
    thread.
    """
    with _CHECKPOINT.blocks.holding(wrap):
        yield

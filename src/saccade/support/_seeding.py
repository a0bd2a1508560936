"""PyTorch's global random state, set for a block and given back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


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

"""PyTorch's global random state, set for a block and given back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int | None, devices: Sequence[int] | None = ()) -> Iterator[None]:
    """Within the block the global generators start at `seed` (None: they continue); afterwards they are restored.

    Args:
        seed: as for `torch.manual_seed`.
        devices: the GPUs whose generators are given back, too; None is all of them.
    """
    with torch.random.fork_rng(devices=devices):
        if seed is not None:
            set_seed(seed)
        yield


def set_seed(seed: int) -> None:
    """`torch.manual_seed`. Without an accelerator PyTorch keeps the seed for one that may come, with a stack trace
    each time, which costs a hundred times what seeding does."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)

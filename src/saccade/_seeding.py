"""PyTorch's global random state, set for a block and given back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int | None, devices: Sequence[int] | None = ()) -> Iterator[None]:
    """The global generators start at `seed` within (None: they go on), and are as they were afterwards.

    Args:
        seed: for `torch.manual_seed`.
        devices: the GPUs whose generators are given back, too; None is all of them.
    """
    with torch.random.fork_rng(devices=devices):
        if seed is not None:
            torch.manual_seed(seed)
        yield

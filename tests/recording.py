"""Instruments: the largest tensor made, and what the autograd graph keeps."""

from __future__ import annotations

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """The largest tensor any operation returns, counting what it stores (an expanded view stores little)."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // max(1, x.element_size()))
        return result


@contextlib.contextmanager
def saved():
    """Elements the autograd graph keeps, each storage once."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        pinned.append(tensor)
        return tensor

    pinned = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept

"""Where queries and keys are kept: in memory up to a budget, and in files beyond it where a folder is given."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor


class KeptTensors:
    """Copies of tensors, in memory up to ``budget`` bytes (None: no limit), then memory-mapped files in ``folder``.

    The files have no name once they are opened, or are deleted with this object where the system needs one.
    """

    def __init__(self, budget: int | None = None, folder: str | Path | None = None) -> None:
        if budget is not None and budget < 0:
            raise ValueError(f"budget must be at least 0 bytes, got {budget}")
        self.budget, self.used, self.on_disk = budget, 0, 0
        self._files = None if folder is None else tempfile.TemporaryDirectory(prefix="saccade-", dir=folder)
        self._count = 0

    def take(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of ``tensor`` on the CPU, without a graph.

        Raises:
            ValueError: the budget does not hold it and there is no folder.
        """
        size = tensor.numel() * tensor.element_size()
        if self.budget is None or self.used + size <= self.budget:
            self.used += size
            return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        if self._files is None:
            raise ValueError(
                f"budget: {self.used + size:,} bytes are needed for queries and keys so far, and the budget is "
                f"{self.budget:,}; a larger one or a shorter text fits, and with a folder they are kept in files"
            )
        return self._mapped(tensor, size)

    def _mapped(self, tensor: Tensor, size: int) -> Tensor:
        assert self._files is not None
        path = Path(self._files.name) / f"{self._count}.bin"
        self._count += 1
        self.on_disk += size
        kept = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
        return kept.copy_(tensor.detach())

    def close(self) -> None:
        """Delete the files."""
        if self._files is not None:
            self._files.cleanup()
